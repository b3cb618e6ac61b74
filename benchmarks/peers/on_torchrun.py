"""The job with plain DDP and a checkpoint every epoch, from which torchrun starts all workers again."""

import os
from pathlib import Path

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = Path(os.environ["PEERS_FOLDER"]) / "snapshot.pt"


def main() -> None:
    dist.init_process_group("gloo")
    dataset = job.Digits()
    model = DistributedDataParallel(job.Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, job.BATCH // dist.get_world_size(), sampler=sampler)
    step = begin = 0
    if SNAPSHOT.exists():
        state = torch.load(SNAPSHOT)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin, step = state["epoch"], state["step"]
        job.restored(step)
    for epoch in range(begin, job.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.commit(model.module, epoch, step, index)
            step += 1
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1, "step": step}, SNAPSHOT.with_suffix(".new"))
            SNAPSHOT.with_suffix(".new").replace(SNAPSHOT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
