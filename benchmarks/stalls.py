"""What do stalls cost that nobody can see or interrupt, with a deadline and without?

Four equal workers, eight micro-batches to a share. One micro-batch in a hundred takes 50 times as long, inside the
user's own forward. Without deadlines every such stall holds up all four. The limit is each worker by itself, with the
same stalls and no rounds: the sum of those speeds. Stalls are placed on a worker's own count of samples, one in every
hundred micro-batches, so that all ways to train meet the same ones, and a micro-batch that was cut off does not stall
again. Adaptive, joint and the workers alone take turns in the same processes. Speeds are counted samples over wall
seconds, everything included, after the first steps.

    python benchmarks/stalls.py
"""

from __future__ import annotations

import json
import random
import statistics
import time

import torch
from common import FEATURES, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WORKERS, MICRO, SHARE = 4, 8, 8
SAMPLE_S = 0.001
STALL, EVERY = 50, 100
"""A stall takes as long as so many micro-batches; one micro-batch in so many has one."""
BATCH = WORKERS * MICRO * SHARE
STEPS, SKIP, ROUNDS, CALM_STEPS = 60, 12, 2, 60


class Work:
    """The user's forward: the time of its samples, and now and then a stall."""

    def __init__(self, rank: int, seed: int, *, stalls: bool) -> None:
        self._dice = random.Random(f"{seed}/{rank}")
        self._stalls, self._done, self._block = stalls, 0, -1
        self._place = 0

    def seconds(self, samples: int) -> float:
        """What the next so many samples take."""
        took = samples * SAMPLE_S
        for position in range(self._done, self._done + samples):
            block, within = divmod(position, EVERY * MICRO)
            if block > self._block:
                self._block, self._place = block, self._dice.randrange(EVERY * MICRO)
            if self._stalls and within == self._place:
                took += (STALL - 1) * MICRO * SAMPLE_S
        self._done += samples
        return took


def train(pace: str, seed: int, *, stalls: bool, steps: int) -> float:
    """Samples a second of a training under this pace."""
    generator = torch.Generator().manual_seed(0)
    length = BATCH * steps
    data = TensorDataset(torch.randn(length, FEATURES, generator=generator), torch.randint(10, (length,)))
    counted, began = 0, 0.0
    with paceline.join(pace, quiet=True) as fleet:
        work = Work(fleet.rank, seed, stalls=stalls)
        model = fleet.model(nn.Linear(FEATURES, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=MICRO):
            for x, y in step:
                until = time.perf_counter() + work.seconds(len(x))
                loss = nn.functional.cross_entropy(model(x), y)
                time.sleep(max(0.0, until - time.perf_counter()))
                step.backward(loss)
            step.commit(optimizer)
            if step.index < SKIP:
                began = time.perf_counter()
            else:
                counted += step.record.total
        if fleet.rank == 0:
            fleet_cv.append(_spread([record.total for record in fleet.history][SKIP:-1]))
    return counted / (time.perf_counter() - began)


fleet_cv: list[float] = []
"""Coefficient of variation of the steps' counts, a training each."""


def alone(rank: int, seed: int, *, steps: int) -> float:
    """Samples a second of one worker by itself under the same stalls, worked out: it does nothing but sleep."""
    work = Work(rank, seed, stalls=True)
    samples = steps * MICRO * SHARE
    return samples / sum(work.seconds(MICRO) for _ in range(samples // MICRO))


def _spread(counts: list[int]) -> float:
    return statistics.pstdev(counts) / statistics.mean(counts)


def measure() -> dict[str, float]:
    speeds: dict[str, list[float]] = {"adaptive": [], "joint": [], "calm adaptive": [], "calm joint": []}
    for seed in range(ROUNDS):
        for pace in ("adaptive", "joint"):
            speeds[pace].append(train(pace, seed, stalls=True, steps=STEPS))
        for pace in ("adaptive", "joint"):
            speeds[f"calm {pace}"].append(train(pace, seed, stalls=False, steps=CALM_STEPS))
    figures = {name: statistics.harmonic_mean(values) for name, values in speeds.items()}
    return {**figures, "count_cv": max(fleet_cv[1::4], default=0.0)}


def main() -> None:
    if is_worker():
        leave_result(measure())
        return
    found = run_workers(__file__, WORKERS)
    rates = [sum(alone(rank, seed, steps=STEPS) for rank in range(WORKERS)) for seed in range(ROUNDS)]
    limit = statistics.harmonic_mean(rates)
    print(f"limit {limit:,.0f} samples/s: {WORKERS} workers alone, {1 / EVERY:.0%} of micro-batches {STALL} times as long")
    for name in ("adaptive", "joint"):
        print(f"  {name:<9} {found[name]:>6,.0f} samples/s  {found[name] / limit:6.1%}")
    print(f"without stalls: joint {found['calm joint']:,.0f}, adaptive {found['calm adaptive']:,.0f} samples/s")
    figures = {
        "joint_over_limit": found["joint"] / limit,
        "joint_over_adaptive": found["joint"] / found["adaptive"],
        "calm_joint_over_adaptive": found["calm joint"] / found["calm adaptive"],
        "count_cv": found["count_cv"],
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
