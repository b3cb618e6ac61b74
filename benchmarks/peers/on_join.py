"""The job with DDP, where each rank has a batch and a part of the data that fit its machine, and join() at their ends.

DDP takes the mean over the ranks, so a rank's loss counts in proportion to its samples only if it is scaled to that.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

SPEEDS = [1 / factor for factor in job.FACTORS]  # known, and set by hand


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = job.Digits()
    model = DistributedDataParallel(job.Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    batch = round(job.BATCH * SPEEDS[rank] / sum(SPEEDS))
    first, end = (round(len(dataset) * sum(SPEEDS[:n]) / sum(SPEEDS)) for n in (rank, rank + 1))
    step = 0
    for epoch in range(job.EPOCHS):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        loader = DataLoader(dataset, batch, sampler=order[first:end])
        with model.join():
            for x, y, index in loader:
                loss = nn.functional.cross_entropy(model(x), y) * len(y) * world / job.BATCH
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                job.commit(model.module, epoch, step, index)
                step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
