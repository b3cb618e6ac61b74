"""The job with Ray Train: a checkpoint every epoch, from which Ray starts all workers again."""

import os
import tempfile
from pathlib import Path

import job
import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader


def work() -> None:
    dataset = job.Digits()
    model = prepare_model(job.Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    context = train.get_context()
    loader = prepare_data_loader(DataLoader(dataset, job.BATCH // context.get_world_size(), shuffle=True))
    step = begin = 0
    if kept := train.get_checkpoint():
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin, step = state["epoch"], state["step"]
        job.restored(step)
    for epoch in range(begin, job.EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.commit(model.module, epoch, step, index)
            step += 1
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch + 1, "step": step}, Path(folder) / "state.pt")
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"loss": loss.item()}, checkpoint=checkpoint)


def main() -> None:
    ray.init(address=os.environ.get("PEERS_RAY"), num_cpus=None if "PEERS_RAY" in os.environ else job.WORKERS + 1)
    trainer = TorchTrainer(
        work,
        scaling_config=train.ScalingConfig(num_workers=job.WORKERS),
        run_config=train.RunConfig(
            storage_path=os.environ["PEERS_FOLDER"], failure_config=train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
