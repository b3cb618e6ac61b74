"""Is ``micro_batch="auto"`` as fast as the best size set by hand?

Four machines are played, 1, 1, 2 and 4 times slower than a reference that takes SAMPLE_MS per sample and FIXED_MS more
per micro-batch: a device that is not full works nearly as long on few samples as on many. The network itself takes
that long, a third of it forwards and two thirds backwards, and sleeps meanwhile.

The same processes train with each size, one after another, in several rounds. A speed is the batch over the median of
the seconds from commit to commit, after the steps in which auto searches, so that what disturbs the host once does not
count; a size's speed is its median over the rounds.

    python benchmarks/micro_batch.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from _smoke import smoke
from common import is_worker, leave_result, run_workers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

FACTORS = (1, 1, 2, 4)
SAMPLE_MS, FIXED_MS, BATCH = 2.0, 16.0, 256
SIZES: tuple[int | str, ...] = ("auto", 16, 32, 64, 128)
SEARCH, STEPS, ROUNDS = 22, 38, 5
globals().update(smoke(FACTORS=(1, 2), SAMPLE_MS=0.05, BATCH=16, SIZES=("auto", 8), SEARCH=2, STEPS=4, ROUNDS=1))


class Takes(torch.autograd.Function):
    """Takes the machine's time for the samples that pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.seconds = factor * (FIXED_MS + SAMPLE_MS * len(x)) / 1000
        time.sleep(ctx.seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Network(nn.Module):
    """A small network on the machine of this worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)
        self.factor = FACTORS[int(os.environ["RANK"])]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Takes.apply(self.first(x).relu(), self.factor))


def train(size: int | str) -> tuple[float, tuple[int, ...]]:
    """Return samples per second after the search, and the sizes that auto found."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(BATCH * STEPS, 64, generator=generator), torch.randint(10, (BATCH * STEPS,), generator=generator)
    )
    stamps = []
    with paceline.join("adaptive", quiet=True) as fleet:
        model = fleet.model(Network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=size):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            stamps.append(time.perf_counter())
        found = step.record.micro_size if size == "auto" else ()
    seconds = statistics.median(end - begin for begin, end in pairwise(stamps[SEARCH - 1 :]))
    return BATCH / seconds, tuple(found)


def main() -> None:
    if is_worker():
        leave_result([{size: train(size) for size in SIZES} for _ in range(ROUNDS)])
        return
    rounds = run_workers(__file__, len(FACTORS))
    speeds = {size: statistics.median(one[str(size)][0] for one in rounds) for size in SIZES}
    best = max(SIZES[1:], key=speeds.__getitem__)
    for size, value in speeds.items():
        print(f"  micro_batch={size!s:<5} {value:>7,.0f} samples/s  {value / speeds[best]:5.3f} of the best by hand")
    figures = {
        "auto_over_best": round(speeds["auto"] / speeds[best], 4),
        "auto_over_best_by_round": [
            round(one["auto"][0] / max(one[str(size)][0] for size in SIZES[1:]), 4) for one in rounds
        ],
        "best": best,
        "auto_found": [one["auto"][1] for one in rounds],
        "samples_per_s": {str(size): round(value, 1) for size, value in speeds.items()},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
