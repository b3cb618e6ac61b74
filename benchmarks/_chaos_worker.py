"""The script that the workers of chaos.py run: a small training with every call between its steps, and a ledger.

The ledger is a second model, so that it is a part of the training's state: each sample has a parameter whose mean
gradient counts it, and a buffer sums these counts by epoch. Whatever workers do, it must end with ones everywhere.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.pace import Ask
from paceline.records import Plan, StepRecord
from paceline.transport import formats

FEATURES, WIDTH, CLASSES, RATE = 4, 16, 3, 0.02
DEADLINES: dict[str, dict[str, Any]] = {
    "deadline": {"deadline_s": 0.03},
    "floor": {"deadline_s": 0.01, "least_count": 0.8},
    "arrivals": {"deadline_s": None, "wait_for": 2},
}


class Hasty:
    """A pace that deals 1.3 times the batch in equal shares and closes every round early."""

    deadlines = True

    def __init__(self, name: str) -> None:
        self.name, self._bounds = name, DEADLINES[name]

    def check(self, workers: int) -> None:
        """Accept any number of workers."""

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""

    def plan(self, ask: Ask) -> Plan:
        """Return equal shares with the deadline."""
        total, size = ask.total if ask.last else round(1.3 * ask.total), len(ask.workers)
        samples = tuple(total // size + (rank < total % size) for rank in range(size))
        return Plan(generation=ask.generation, step=ask.step, samples=samples, **self._bounds)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Take no state."""


class Ledger(nn.Module):
    """Counts of every sample in every epoch, held as a model."""

    counted: torch.Tensor

    def __init__(self, epochs: int, length: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(length + 1, dtype=torch.float64))
        self.register_buffer("counted", torch.zeros(epochs, length, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a loss of zero whose gradient names the samples, and in its last entry is one."""
        return self.entries[numbers].sum() / len(numbers) + self.entries[-1]

    @torch.no_grad()
    def book(self, step: Any) -> None:
        """Add the samples of a committed step to their epoch: an entry moved by its count over the step's samples."""
        if step.applied:
            self.counted[step.epoch] += self.entries[:-1] / self.entries[-1] * step.record.weight
            self.entries.zero_()


class Script:
    """One worker's side of a run."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.folder = order, Path(order["folder"])
        self.data = samples(order["length"])
        self.progress = Path(order["files"] + ".progress")
        self.averages = order["combine"]["name"] != "gradients"
        self.keeps_ledger = not self.averages and order["shards"] == 1 and order["wire"] == "float32"
        self.last = -1
        """Number of the last step in which this worker had a part; where it steps by itself, its own number."""

    def join(self) -> paceline.Fleet:
        """Join the fleet with the run's pace, combine and wire format."""
        order = self.order
        settings = {name: value for name, value in order["combine"].items() if name != "name"}
        kinds: dict[str, Callable[..., Any]] = {
            "gradients": lambda: "gradients",
            "average": paceline.Averaging,
            "elastic-average": paceline.research.ElasticAverage,
        }
        combine = kinds[order["combine"]["name"]](**settings)
        if order["wire"] != "float32":
            formats.SMALLEST = 0  # these tensors are small
        pace = Hasty(order["pace"]) if order["pace"] in DEADLINES else order["pace"]
        return paceline.join(pace, combine=combine, comm_dtype=order["wire"], quiet=True, device="cpu")

    def run(self) -> dict[str, Any]:
        """Train to the end; return what is compared with the other workers."""
        order = self.order
        with self.join() as fleet:
            model = fleet.model(network(), shard=order["shards"] > 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            optimizers, ledger = [optimizer], None
            if self.keeps_ledger:
                ledger = fleet.model(Ledger(order["epochs"], order["length"]))
                optimizers.append(torch.optim.SGD(ledger.parameters(), lr=1.0))
            fleet.track(**{f"optimizer{number}": one for number, one in enumerate(optimizers)})
            if order["autosave_s"]:
                fleet.autosave(self.folder / "auto", every_s=order["autosave_s"])
            steps = self.steps(fleet)
            for step in steps:
                for x, y, numbers in step:
                    self.work(len(x))
                    loss = nn.functional.cross_entropy(model(x), y)
                    step.backward(loss if ledger is None else loss + ledger(numbers))
                step.commit(*optimizers)
                if ledger is not None:
                    ledger.book(step)
                self.note(step)
                self.call(fleet, step)
            inside = self.replica(model, optimizer) if order["shards"] > 1 else ""
        return {
            "last": steps.rounds if self.averages and self.last >= 0 else self.last,
            "replica": inside or self.replica(model, optimizer),
            "counted": ledger.counted.round(decimals=6).tolist() if ledger is not None else None,
        }

    def steps(self, fleet: paceline.Fleet) -> Any:
        """Return the fleet's steps, in the script's own order if it has one."""
        order, length = self.order, self.order["length"]

        def shuffled(epoch: int) -> Any:
            return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()

        own = {"order": shuffled} if order["order"] else {}
        sizes = {"global_batch": order["batch"], "micro_batch": order["micro"], "epochs": order["epochs"]}
        return fleet.steps(self.data, **sizes, **own)

    def work(self, count: int) -> None:
        """Take the time of ``count`` samples, and now and then longer, until the run hurries."""
        if not (self.folder / "hurry").exists():
            time.sleep(count * self.order["sample_s"] * random.uniform(0.7, 1.3))
            if random.random() < self.order["stalls"]:
                time.sleep(random.uniform(0.0, 0.3))

    def note(self, step: Any) -> None:
        """Leave a sign that this worker has made a step: it holds the training's state."""
        if self.averages or (step.record is not None and step.record.total > 0):
            self.last = step.index
            self.progress.touch()

    def call(self, fleet: paceline.Fleet, step: Any) -> None:
        """Make the calls that are due after this step: where workers step by themselves, after an epoch."""
        if self.averages and not step.ends_epoch:
            return
        at = step.epoch if self.averages else step.index
        for name, every, remainder in self.order["calls"]:
            if at % every == remainder:
                getattr(self, f"_{name}")(fleet, at)

    def _evaluate(self, fleet: paceline.Fleet, at: int) -> None:
        length = self.order["length"]
        found = fleet.evaluate(lambda x, y, i: {"n": len(x), "sum": i.sum().double()}, self.data, sums=("n", "sum"))
        assert found["n"] == found["count"] == length, (at, found)
        assert found["sum"] == length * (length - 1) / 2, (at, found)

    def _predict(self, fleet: paceline.Fleet, at: int) -> None:
        found = fleet.predict(lambda x, y, i: i.double(), self.data)
        assert found.flatten().tolist() == [float(i) for i in range(self.order["length"])], at

    def _save(self, fleet: paceline.Fleet, at: int) -> None:
        fleet.save(self.folder / "saved")

    def _any(self, fleet: paceline.Fleet, at: int) -> None:
        assert fleet.any(True)

    def replica(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """Return a digest of the parameters, and of the momenta where all workers make the same steps."""
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        if not self.averages:
            tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
        return digest(tensors)


def train(order: dict[str, Any]) -> None:
    """Run the script in this process, and leave its result in a file."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    with open(order["files"] + ".stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        value = Script(order).run()
        faulthandler.unregister(signal.SIGUSR1)
    written = Path(order["files"] + ".value")
    written.with_suffix(".part").write_text(json.dumps({**value, "pid": os.getpid()}))
    written.with_suffix(".part").rename(written)


def samples(length: int) -> TensorDataset:
    """Return the run's data: features, classes and the samples' own numbers."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, CLASSES, (length,), generator=generator), torch.arange(length))


def network() -> nn.Module:
    """Return the model, the same on every worker."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of all their bytes; of tensors that processes divide, of the whole."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()
