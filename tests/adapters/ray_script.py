"""A training for the tests on Ray: ends when the folder it is in holds a file ``stop``, or after ``--epochs``."""

import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

LENGTH = 240


def train(epochs: int = 100_000, stop: str = "stop") -> str:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(LENGTH, 4), torch.randint(3, (LENGTH,)))
    with paceline.join("adaptive") as fleet:
        print(f"here is {socket.gethostname()} in {Path.cwd()}", flush=True)
        model = fleet.model(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=24, micro_batch=4, epochs=epochs):
            for x, y in step:
                time.sleep(0.01)
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            if fleet.any(Path(stop).exists()):
                break
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"weights {weights.double().sum().item():.9f}", flush=True)
    return f"{os.environ['PACELINE_WORKER']}: {weights.double().sum().item():.9f}"


if __name__ == "__main__":
    train(*(int(word) for word in sys.argv[1:]))
