"""How long do the others stand still when workers enter an elastic fleet, by the size of the state?

Two emulated machines train a model with Adam; parameters, moments and frozen parameters, where a case has some, are the
state that a newcomer needs. One worker, or three in the same moment, are started as new processes and enter.

- *stall_s*: the longest time between two commits of a worker that was there before, around an entry, less a usual step:
  the longest of these workers and entries. *stall_steps*: the same in usual steps.
- *lost_s*: by how much the steps around all entries of the case, up to `AFTER` steps after each, took longer together
  than a usual step of that number of workers, on the worker for which that is the most.
- *first_share_s*: from the moment in which a newcomer's script begins its loop until it has committed a step with
  samples of its own, the longest; it includes the wait until a step boundary and that of `Entries`.
- *equal*: whether parameters and Adam's state are equal bit for bit on all workers in the end.

Each case has these figures under its name (``300MB_3``: 300 MB, three newcomers). All bytes go through this computer's
memory: over a network its line is the limit.

    python benchmarks/join_stall.py                       # 4 to 300 MB, all of it trained; within a minute
    python benchmarks/join_stall.py --case 1500:1:0.1     # MB, newcomers, trained part of the state; 8 GB of memory
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _flock import Life
from _goodput_training import Diary
from _smoke import smoke
from many_join import Fresh
from torch import nn
from torch.utils.data import TensorDataset

import paceline

CASES = ((4, 1, 1.0), (4, 3, 1.0), (300, 1, 1.0), (100, 3, 1.0))
"""Megabytes of state, newcomers, and the part of the state that belongs to trained parameters."""
FIRST = 2
SAMPLE_MS, BATCH, MICRO = 2.0, 32, 4
CALM, AFTER = 8, 4
"""Steps before newcomers are started, and steps after the last of them has come."""
LIMIT_S = 120.0
globals().update(smoke(CASES=((2, 1, 1.0),), CALM=4, AFTER=3))

Case = tuple[int, int, float]
PARAMETER, ADAM = 4, 8
"""Bytes per parameter, and of Adam's state for it."""


class Large(nn.Module):
    """Trained and frozen parameters of a given size, in layers of at most 16 MB, behind a small linear layer."""

    def __init__(self, state_mb: int, trained: float) -> None:
        super().__init__()
        moved = int(state_mb * 1e6 * trained) // (PARAMETER + ADAM)
        kept = int(state_mb * 1e6 * (1 - trained)) // PARAMETER
        self.moved = nn.ParameterList([nn.Parameter(torch.ones(part)) for part in layers(moved)])
        self.kept = nn.ParameterList([nn.Parameter(torch.rand(part), requires_grad=False) for part in layers(kept)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reached = sum(part[:1].sum() for part in [*self.moved, *self.kept])
        return self.head(x) * reached  # type: ignore[no-any-return]


def layers(size: int, most: int = 4_000_000) -> list[int]:
    return [min(most, size - at) for at in range(0, size, most)]


def train(order: dict[str, Any]) -> None:
    """One worker: trains until the file ``stop`` is there, and notes every commit."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    torch.manual_seed(1)
    state_mb, _, trained = json.loads(os.environ["JOIN_STALL"])
    diary, stop = Diary(Path(order["diary"])), Path(order["stop"])
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(3))
    with paceline.join(order["pace"], quiet=True) as fleet:
        model = fleet.model(Large(state_mb, trained))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=1e-4)
        fleet.track(optimizer=optimizer)
        steps = fleet.steps(TensorDataset(x, x[:, :4]), global_batch=BATCH, micro_batch=MICRO, epochs=100_000)
        diary.note("ready")
        for step in steps:
            mine = 0
            for xs, ys in step:
                step.backward(nn.functional.mse_loss(model(xs), ys))
                mine += len(xs)
            step.commit(optimizer)
            assert step.record is not None
            diary.note("step", workers=len(step.record.workers), mine=mine)
            if fleet.any(stop.exists()):
                break
        diary.note("end", digest=digest(model, optimizer, parameters))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> str:
    """Return a digest of all that the replicas share."""
    moments = [optimizer.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
    found = blake2b(digest_size=16)
    for tensor in [*model.parameters(), *moments]:
        found.update(memoryview(tensor.detach().numpy()))  # type: ignore[arg-type]
    return found.hexdigest()


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    _, joiners, _ = case
    os.environ["JOIN_STALL"] = json.dumps(case)
    most = FIRST + joiners
    settings: dict[str, Any] = {"machines": ",".join(["1"] * most), "sample_ms": SAMPLE_MS}
    with Fresh(
        folder, call="join_stall:train", pace="adaptive", minimum=FIRST, maximum=most, program=__file__, **settings
    ) as flock:
        began = flock.let_join(joiners, first=FIRST, calm=CALM, after=AFTER, within_s=LIMIT_S)
        return figures(flock.lives, began)


def figures(lives: list[Life], began: float) -> dict[str, Any]:
    """Return what the diaries of those who were there and of the newcomers tell."""
    diaries = [life.steps for life in lives]
    calm = [note for note in diaries[0] if note["t"] < began][2:]
    usual_s = median(after["t"] - before["t"] for before, after in pairwise(calm))
    stall_s = max(gap for notes in diaries[:FIRST] for gap in pauses(notes)) - usual_s
    first = [first_share_s(life) for life in lives[FIRST:]]
    digests = {note["digest"] for life in lives for note in life.notes if note["what"] == "end"}
    ended = sum(note["what"] == "end" for life in lives for note in life.notes)
    return {
        "stall_s": round(stall_s, 3),
        "stall_steps": round(stall_s / usual_s, 2),
        "lost_s": round(max(lost_s(notes, usual_s) for notes in diaries[:FIRST]), 3),
        "step_s": round(usual_s, 4),
        "entries": len(pauses(diaries[0])),
        "first_share_s": round(max(first), 3),
        "equal": ended == len(lives) and len(digests) == 1,
    }


def pauses(notes: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the last commit before each entry to the first after it."""
    return [after["t"] - before["t"] for before, after in pairwise(notes) if after["workers"] > before["workers"]]


def lost_s(notes: list[dict[str, Any]], calm_s: float) -> float:
    """Return by how much the steps around entries took longer than usual ones of the same number of workers."""
    gaps = [(after["t"] - before["t"], after["workers"]) for before, after in pairwise(notes)]
    entries = [at for at, (before, after) in enumerate(pairwise(notes)) if after["workers"] > before["workers"]]
    around = sorted({number for at in entries for number in range(at, min(at + AFTER, len(gaps)))})
    usual = {size: median(gap for gap, workers in gaps if workers == size) for _, size in gaps}
    usual[FIRST] = calm_s
    return sum(gaps[at][0] - usual[gaps[at][1]] for at in around)


def first_share_s(life: Life) -> float:
    ready = next(note["t"] for note in life.notes if note["what"] == "ready")
    return float(next(note["t"] for note in life.steps if note["mine"]) - ready)


def read_case(text: str) -> Case:
    size, joiners, trained = [*text.split(":"), "1", "1.0"][:3]
    return int(size), int(joiners), float(trained)


def name_of(case: Case) -> str:
    size, joiners, trained = case
    return f"{size}MB_{joiners}" + ("" if trained == 1 else f"_trained_{trained:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", type=read_case, metavar="MB[:NEWCOMERS[:TRAINED]]")
    asked = parser.parse_args().case
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in asked or CASES:
            name = name_of(case)
            found[name] = measure(case, Path(folder) / name)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    summary = {
        "stall_steps": max(one["stall_steps"] for one in found.values()),
        "stall_s": max(one["stall_s"] for one in found.values()),
        "equal": all(one["equal"] for one in found.values()),
        "cores": os.cpu_count(),
    }
    print(json.dumps({**summary, **found}))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        train(json.loads(sys.argv[1]))
    else:
        main()
