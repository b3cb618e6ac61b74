"""The job with torchft: one replica group a machine, which the others do without when it fails."""

import os
from datetime import timedelta

import job
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    dataset = job.Digits()
    network = job.Network()
    plain = torch.optim.SGD(network.parameters(), lr=job.LR, momentum=job.MOMENTUM)

    def load_state_dict(state: dict) -> None:
        network.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def state_dict() -> dict:
        return {"model": network.state_dict(), "optimizer": plain.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"digits_{group}",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, plain)
    sampler = DistributedSampler(
        dataset, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(dataset, job.BATCH // groups, sampler=sampler)
    epoch = step = 0
    while step < job.EPOCHS * len(loader):
        sampler.set_epoch(epoch)
        for x, y, index in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            counts = manager.is_participating()
            optimizer.step()
            if manager.current_step() > step and counts:
                job.commit(network, epoch, manager.current_step() - 1, index)
            step = manager.current_step()
            if step // len(loader) > epoch:  # it came back, and the others are further
                break
        epoch = max(epoch + 1, step // len(loader))
    manager.shutdown()


if __name__ == "__main__":
    main()
