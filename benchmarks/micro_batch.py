"""Is ``micro_batch="auto"`` as fast as the best size set by hand?

Machines are played, 1, 1, 2 and 4 times slower than a reference that takes ``sample_ms`` per sample and ``fixed_ms``
more per micro-batch: a device that is not full works nearly as long on few samples as on many. The network itself takes
that long, a third of it forwards and two thirds backwards, and sleeps meanwhile. Beside the usual case there are four
others: no fixed cost, mostly fixed cost, memory for less than a share, one worker alone; and the default pace.

The same processes train with each size, one after another, and back again. A speed is the batch over the median of the
seconds from commit to commit, after the steps in which auto searches, so that what disturbs the host once does not
count; a size's speed is its median over the rounds. About a minute.

    python benchmarks/micro_batch.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from _smoke import smoke
from common import is_worker, leave_result, run_workers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

FACTORS, BATCH = (1, 1, 2, 4), 256
SEARCH, SETTLE, STEPS = 22, 5, 8
"""Steps before those that count, with auto and by hand, and how many count."""
SCALE, ROUNDS = 1.0, 1
globals().update(smoke(FACTORS=(1, 2), BATCH=16, SEARCH=2, SETTLE=1, STEPS=3, SCALE=0.05, ROUNDS=1))


@dataclass(frozen=True)
class Case:
    """Machines, and the sizes that are tried by hand."""

    fixed_ms: float
    sample_ms: float
    by_hand: tuple[int, ...]
    pace: str = "adaptive"
    room: int = BATCH
    """Samples of which a machine's memory holds a micro-batch."""
    workers: int = len(FACTORS)
    rounds: int = 1


USUAL = Case(8.0, 1.0, (16, 32, 64, 128), rounds=ROUNDS)
CASES = {
    "usual": USUAL,
    "default pace": replace(USUAL, pace="auto", by_hand=(128,), rounds=1),
    "no fixed cost": Case(0.0, 1.0, (16, 128)),
    "mostly fixed cost": Case(32.0, 0.25, (64, 128)),
    "memory for 40": Case(8.0, 1.0, (32, 40), room=40),
    "alone": Case(2.0, 0.25, (64, 256), workers=1),
}
globals().update(smoke(CASES={"usual": replace(USUAL, by_hand=(8,)), "alone": Case(2.0, 0.25, (16,), workers=1)}))


class Takes(torch.autograd.Function):
    """Takes the machine's time for the samples that pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, case: Case) -> Tensor:
        if len(x) > case.room:
            raise torch.OutOfMemoryError(f"no room for {len(x)} samples")
        milliseconds = FACTORS[int(os.environ["RANK"])] * SCALE * (case.fixed_ms + case.sample_ms * len(x))
        ctx.seconds = milliseconds / 1000
        time.sleep(ctx.seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Network(nn.Module):
    """A small network on the machine of this worker."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.last, self.case = nn.Linear(64, 256), nn.Linear(256, 10), case

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Takes.apply(self.first(x).relu(), self.case))


def train(case: Case, size: int | str) -> tuple[float, tuple[int, ...]]:
    """Return samples per second after the search, and the sizes that auto found."""
    generator = torch.Generator().manual_seed(0)
    before = SEARCH if size == "auto" else SETTLE
    length = BATCH * (before + STEPS)
    data = TensorDataset(
        torch.randn(length, 64, generator=generator), torch.randint(10, (length,), generator=generator)
    )
    stamps = []
    with paceline.join(case.pace, quiet=True) as fleet:
        model = fleet.model(Network(case))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=size):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            stamps.append(time.perf_counter())
        found = step.record.micro_size if size == "auto" else ()
    seconds = statistics.median(end - begin for begin, end in pairwise(stamps[before - 1 :]))
    return BATCH / seconds, tuple(found)


def in_rounds(case: Case) -> list[dict[int | str, Any]]:
    """Train with every size, forwards and backwards in turn."""
    sizes: list[int | str] = [*case.by_hand, "auto"]
    orders: Iterable[list[int | str]] = (sizes[:: (-1) ** number] for number in range(case.rounds))
    return [{size: train(case, size) for size in order} for order in orders]


def judge(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's figures: keys of what came as JSON are strings."""
    speeds = {size: statistics.median(one[str(size)][0] for one in rounds) for size in ("auto", *case.by_hand)}
    best = max(case.by_hand, key=speeds.__getitem__)
    return {
        "auto_over_best": round(speeds["auto"] / speeds[best], 4),
        "auto_over_best_by_round": [
            round(one["auto"][0] / max(one[str(size)][0] for size in case.by_hand), 4) for one in rounds
        ],
        "best": best,
        "auto_found": [one["auto"][1] for one in rounds],
        "samples_per_s": {str(size): round(value, 1) for size, value in speeds.items()},
    }


def main() -> None:
    if is_worker():
        workers = int(os.environ["WORLD_SIZE"])
        leave_result({name: in_rounds(case) for name, case in CASES.items() if case.workers == workers})
        return
    found = {}
    for workers in sorted({case.workers for case in CASES.values()}):
        found |= run_workers(__file__, workers)
    figures = {name: judge(case, found[name]) for name, case in CASES.items()}
    for name, its in figures.items():
        speeds = ", ".join(f"{size}: {value:,.0f}" for size, value in its["samples_per_s"].items())
        print(f"  {name:<18} auto is {its['auto_over_best']:5.3f} of the best by hand; samples/s {speeds}")
        print(f"  {'':<18} auto found {its['auto_found']}")
    print(
        json.dumps({**figures["usual"], "auto_over_best_by_case": {n: f["auto_over_best"] for n, f in figures.items()}})
    )


if __name__ == "__main__":
    main()
