"""Eight workers join a fleet of two in the same second, each in need of 200 MB: what does it cost the training?

Ten emulated machines, so that computing does not want the cores; a model whose weights are mostly frozen, so that a
newcomer's state is large and a round is small. The eight are started at once, as new processes, while the two train.

- *donor_states*: the most states that one worker sent while the eight came in; a fleet of which one worker gives to all
  has 8 here.
- *join_s*: from the start of the eight until the first step with all ten. *entries*: in how many generations they came.
- *pause_s*: how long the two stood still at an entry, the longest: from the last commit without a newcomer to the first
  with it, less a usual step. A round needs all its members, so it waits until the last newcomer has its state.
- *slowed*: the part of *join_s* that these pauses take. What else the start of eight processes costs two that share
  their cores is not counted: on computers of their own it is nobody's.
- *timed_out*: workers that did not come to the end.

The bytes all go through this computer's memory, so on few cores the times are those of copying; over a network of
computers a donor's own line is the limit, and *donor_states* is what counts.

    python benchmarks/many_join.py     # half a minute
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _flock import Flock
from _goodput_training import Diary
from _smoke import smoke, smoking
from nursery import Worker
from torch import nn
from torch.utils.data import TensorDataset

import paceline

STATE_MB = 200
FIRST, JOINERS = 2, 8
SAMPLE_MS, BATCH, MICRO = 4.0, 64, 4
CALM_STEPS, AFTER_STEPS = 25, 10
LIMIT_S = 120.0
globals().update(smoke(STATE_MB=2, JOINERS=3, CALM_STEPS=4, AFTER_STEPS=3))


class Mostly(nn.Module):
    """A little to learn on top of much that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(STATE_MB * 250_000), requires_grad=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.frozen[:16])  # type: ignore[no-any-return]


class Fresh(Flock):
    """Workers that are new processes: they load torch first, as anybody's do. Forks in a smoke run.

    ``program``: the file to run, with the worker's order as its argument.
    """

    def __init__(self, folder: Path, *, program: str = __file__, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._program = program

    def _begin(self, order: dict[str, str], env: dict[str, str], err: Path) -> Worker:
        return super()._begin(order, env, err) if smoking() else Started(self._program, order, env, err)


class Started(Worker):
    """A worker process, as the nursery would show it."""

    def __init__(self, program: str, order: dict[str, str], env: dict[str, str], err: Path) -> None:
        with err.open("wb") as words:
            self._process = subprocess.Popen(
                [sys.executable, program, json.dumps(order)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        self.pid, self.returncode = self._process.pid, None

    def poll(self) -> int | None:
        return self._process.poll()

    def kill_group(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


def train(order: dict[str, Any]) -> None:
    """One worker: trains until the file ``stop`` is there, and notes every commit."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    diary, stop = Diary(Path(order["diary"])), Path(order["stop"])
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(3))
    with paceline.join(order["pace"], quiet=True) as fleet:
        model = fleet.model(Mostly())
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
        fleet.track(optimizer=optimizer)
        steps = fleet.steps(TensorDataset(x, x[:, :4]), global_batch=BATCH, micro_batch=MICRO, epochs=100_000)
        diary.note("ready")
        for step in steps:
            for xs, ys in step:
                step.backward(nn.functional.mse_loss(model(xs), ys))
            step.commit(optimizer)
            assert step.record is not None
            diary.note("step", workers=len(step.record.workers))
            if fleet.any(stop.exists()):
                break
    diary.note("end")


def measure(folder: Path) -> dict[str, Any]:
    """The figures of one fleet that eight join."""
    machines, most = ",".join(["1"] * (FIRST + JOINERS)), FIRST + JOINERS
    settings = {"machines": machines, "sample_ms": SAMPLE_MS, "minimum": FIRST, "maximum": most}
    with Fresh(folder, call="many_join:train", pace="adaptive", **settings) as flock:
        began = flock.let_join(JOINERS, first=FIRST, calm=CALM_STEPS, after=AFTER_STEPS, within_s=LIMIT_S)
        return {**figures(flock.lives[0].steps, began), **handed_over(flock)}


def figures(notes: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """What the diary of one of the two tells."""
    calm = [note for note in notes if note["t"] < began][2:]
    usual_s = median(after["t"] - before["t"] for before, after in pairwise(calm))
    pauses = [
        after["t"] - before["t"] - usual_s for before, after in pairwise(notes) if after["workers"] > before["workers"]
    ]
    join_s = next(note["t"] for note in notes if note["workers"] == FIRST + JOINERS) - began
    return {
        "pause_s": round(max(pauses), 3),
        "slowed": round(sum(pauses) / join_s, 3),
        "join_s": round(join_s, 2),
        "entries": len(pauses),
        "step_s": round(usual_s, 4),
    }


def handed_over(flock: Flock) -> dict[str, Any]:
    """Who sent how many states, as the workers' logs tell."""
    sent = [[int(mb) for mb in re.findall(r"sends a state of (\d+) MB", life.words)] for life in flock.lives]
    ended = sum(any(note["what"] == "end" for note in life.notes) for life in flock.lives)
    return {
        "donor_states": max(map(len, sent)),
        "donors": sum(map(bool, sent)),
        "state_mb": max((mb for one in sent for mb in one), default=0),
        "timed_out": len(flock.lives) - ended,
        "joiners": JOINERS,
        "cores": os.cpu_count(),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder) / "fleet")))


if __name__ == "__main__":
    if sys.argv[1:]:
        train(json.loads(sys.argv[1]))
    else:
        main()
