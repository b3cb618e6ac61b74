"""The job that every peer does: data, network, emulated machine, and the notes that the audit reads.

The network itself takes as long as its machine would: between its layers it sleeps until the machine it plays would be
there, a third of the time forwards and two thirds backwards. So the padding acts on every library alike, and sums of
gradients overlap with it where a library overlaps them with the backward pass.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every optimiser loads it, which would count as training
from torch import Tensor, nn
from torch.utils.data import Dataset

NOTES, SLOT, DIGITS = "PEERS_NOTES", "PEERS_SLOT", "PEERS_DIGITS"
"""Variables: the folder of the notes, which machine a worker plays, and the file of the data."""
BATCH, MICRO = 128, 16
EPOCHS = int(os.environ.get("PEERS_EPOCHS", "6"))
FACTORS = [float(factor) for factor in os.environ.get("PEERS_FACTORS", "1,1,2,4").split(",")]
SAMPLE_S = float(os.environ.get("PEERS_SAMPLE_MS", "1")) / 1000
WORKERS = len(FACTORS)
LR, MOMENTUM = 0.1, 0.9
HIDDEN, LAYERS = 256, 3
EVALUATE_EVERY = 4
"""Steps; worker 0 does it."""
CARRY_S = 0.01
"""What a sleep lasts too long, the next computation has less; at most so much."""
torch.set_num_threads(1)


def slot() -> int:
    """Which machine this process plays: the harness says so, else the launcher's number of the worker."""
    names = (SLOT, "PACELINE_WORKER", "RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


class Digits(Dataset[tuple[Tensor, Tensor, int]]):
    """scikit-learn's digits, 1,437 to train on and 360 to test with; a sample tells its index."""

    def __init__(self, *, test: bool = False) -> None:
        digits = np.load(os.environ[DIGITS])  # importing scikit-learn takes each worker longer than all its samples
        order = torch.randperm(len(digits["target"]), generator=torch.Generator().manual_seed(0))
        part = order[1437:] if test else order[:1437]
        self.x = torch.tensor(digits["data"], dtype=torch.float32)[part] / 16
        self.y = torch.tensor(digits["target"])[part]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Machine:
    """Sleeps until the machine of this worker would have done a part of its computation.

    A worker is killed in here, by its own SIGKILL when the harness has left the order: all its updates are noted then.
    From outside, one could die between an update and the note of it, and the audit would miss its samples.
    """

    def __init__(self) -> None:
        self._sample_s = SAMPLE_S * FACTORS[slot() % WORKERS]
        self._began = self._whole = self._ahead = 0.0
        self._order = Path(os.environ[NOTES], f"kill-{slot()}")

    def begin(self, samples: int) -> None:
        self._began = time.perf_counter() - self._ahead
        self._whole = samples * self._sample_s

    def reach(self, part: float) -> None:
        due = self._began + part * self._whole
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        self._ahead = min(CARRY_S, max(0.0, time.perf_counter() - due))
        if self._order.exists():
            self._order.unlink()  # not for the process that comes after this one
            _note(kind="killed")
            os.kill(os.getpid(), signal.SIGKILL)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine, layer: int) -> Tensor:
        ctx.machine, ctx.layer = machine, layer
        machine.reach(layer / LAYERS / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.machine.reach(1 / 3 + (LAYERS + 1 - ctx.layer) / LAYERS * 2 / 3)
        return grad, None, None


class Network(nn.Module):
    """85,002 parameters (340 kB of gradients), which compute in a millisecond what a machine takes 16 or more for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (64, HIDDEN, HIDDEN, 10)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self._machine = Machine()
        _await_all()

    def forward(self, x: Tensor) -> Tensor:
        if pads := self.training and torch.is_grad_enabled():
            self._machine.begin(len(x))
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x if number == 1 else x.relu())
            if pads:
                x = _Wait.apply(x, self._machine, number)
        return x


def _await_all() -> None:
    """All have loaded their libraries: from here on it is the training that is timed. Who comes back is let through."""
    folder = Path(os.environ[NOTES], "ready")
    folder.mkdir(exist_ok=True)
    (folder / str(slot())).touch()
    while len(os.listdir(folder)) < WORKERS:
        time.sleep(0.01)
    _note(kind="begin")


def commit(model: nn.Module, epoch: int, step: int, index: Iterable[Any]) -> None:
    """This worker's samples of the step are in the update that it has just made. Worker 0 also tests now and then."""
    samples = [int(i) for part in index for i in torch.as_tensor(part).reshape(-1)]
    _note(kind="commit", epoch=epoch, step=step, index=samples)
    if slot() == 0 and step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
        _note(kind="accuracy", step=step, accuracy=accuracy(model))


def restored(step: int) -> None:
    """The training goes on from a checkpoint made after so many steps; what came later is undone."""
    _note(kind="restored", step=step)


def accuracy(model: nn.Module) -> float:
    was = model.training
    model.eval()
    with torch.no_grad():
        found = (model(_test().x).argmax(1) == _test().y).float().mean().item()
    model.train(was)
    return found


def _test() -> Digits:
    if not _kept:
        _kept.append(Digits(test=True))
    return _kept[0]


_kept: list[Digits] = []


def _note(**what: Any) -> None:
    path = Path(os.environ[NOTES]) / f"{slot()}.{os.getpid()}"
    with path.open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")
