"""The job with plain DDP."""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    dataset = job.Digits()
    model = DistributedDataParallel(job.Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, job.BATCH // dist.get_world_size(), sampler=sampler)
    step = 0
    for epoch in range(job.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.commit(model.module, epoch, step, index)
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
