"""The training that goodput.py and spot.py disturb, and the same steps once more on one machine, from the run's log.

In float64, so that a replay of the committed steps must give the same weights to many digits, whoever did which sample.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.feed import Feed
from paceline.observe.log.reader import RunLog

LENGTH = 2500
"""Samples an epoch: two to four seconds of training. Not a whole number of batches."""
BATCH, MICRO, RATE, MOMENTUM = 256, 8, 0.05, 0.9
FEATURES, HIDDEN, CLASSES = 16, 32, 4
SETTLED_S = 1.0
"""After members changed, what the last group held is given back in a moment."""
ENDLESS = 100_000
"""Epochs; the file ``stop`` ends the training after one of them."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
    noise = torch.randn(LENGTH, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x @ teacher + noise).argmax(1))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def replica(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Weights and momenta, one after another."""
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    return torch.cat([part.detach().flatten() for part in [*model.parameters(), *momenta]])


class Diary:
    """What one worker process notes down, a JSON line each."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, what: str, **facts: Any) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps({"what": what, "t": time.time(), **facts}) + "\n")


def train(order: dict[str, Any]) -> None:
    """One worker: trains until the file ``stop`` is there, then leaves its replica in a file."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    diary, stop, whole = Diary(Path(order["diary"])), Path(order["stop"]), False
    since = (0, 0.0)
    with paceline.join(order["pace"], quiet=True) as fleet:
        model = fleet.model(network())
        optimizer = make_optimizer(model)
        fleet.track(optimizer=optimizer)
        steps = fleet.steps(data(), global_batch=BATCH, micro_batch=MICRO, epochs=ENDLESS)
        diary.note("ready")
        for step in steps:
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            assert step.record is not None
            generation = step.record.generation
            since = since if since[0] == generation else (generation, time.time())
            if step.ends_epoch:
                whole = step.record.total > 0  # else the fleet had gone on without this worker
                if whole and time.time() - since[1] > SETTLED_S:
                    place = {"size": fleet.world_size, "leads": fleet.is_leader, "generation": generation}
                    diary.note("epoch", **_holdings(), **place)
                if fleet.any(stop.exists()):
                    break
    if whole:
        torch.save(replica(model, optimizer), order["replica"])
        diary.note("end", step=step.index)


def _holdings() -> dict[str, int]:
    """What must not grow."""
    return {name: len(os.listdir(f"/proc/self/{folder}")) for name, folder in (("threads", "task"), ("files", "fd"))}


def replay(log: RunLog) -> tuple[torch.Tensor, float]:
    """The committed steps on one machine: its replica in the end, and the largest difference of any step's loss."""
    torch.set_num_threads(1)  # tensors this small are done sooner by one than handed to two that are busy
    model, (x, y) = network(), data().tensors
    optimizer, off = make_optimizer(model), 0.0
    feed = Feed(LENGTH, workers=1, seed=0)
    for record in log.records:
        if feed.epoch != record.epoch:
            feed.open(record.epoch)
        where = torch.as_tensor(feed.indices([piece for mine in record.ranges for piece in mine]))
        if not len(where):
            continue
        loss = nn.functional.cross_entropy(model(x[where]), y[where])
        off = max(off, abs(loss.item() - record.loss) if record.loss is not None else math.inf)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if record.applied:
            optimizer.step()
    return replica(model, optimizer), off
