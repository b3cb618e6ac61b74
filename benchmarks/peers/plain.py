"""The job in one process: what the others' lines are compared with."""

import job
import torch
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    dataset = job.Digits()
    model = job.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    loader = DataLoader(dataset, job.BATCH, shuffle=True)
    step = 0
    for epoch in range(job.EPOCHS):
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.commit(model, epoch, step, index)
            step += 1


if __name__ == "__main__":
    main()
