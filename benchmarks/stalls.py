"""What do stalls cost that nobody can see or interrupt, with a deadline and without?

Four equal workers, eight micro-batches to a share. One micro-batch in a hundred takes 50 times as long, inside the
user's own forward. Without deadlines every such stall holds up all four. The limit is each worker by itself: the same
loop in plain torch with the same stalls and no rounds, all four at once; their speeds are added up. Stalls are placed
on a worker's own count of samples, one in every hundred micro-batches, so that all ways to train meet the same ones,
and a micro-batch that was cut off does not stall again. Adaptive, joint and the workers alone take turns in the same
processes. Speeds are counted samples over wall seconds, everything included, after the first steps.

What joint loses is told in parts of all worker-seconds: samples computed that did not count, steps that a late worker
took over, the round, and idle time before it (deadlines set wrong, the floor, laps). What is not among them is work,
stalls included, and what the loop itself costs.

    python benchmarks/stalls.py
"""

from __future__ import annotations

import json
import random
import statistics
import time

import torch
from _smoke import smoke
from common import FEATURES, is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WORKERS, MICRO, SHARE = 4, 8, 8
SAMPLE_S = 0.001
STALL, EVERY = 50, 100
"""A stall takes as long as so many micro-batches; one micro-batch in so many has one."""
EACH = 16
"""Samples per worker over which figures are added up."""
BATCH = WORKERS * MICRO * SHARE
STEPS, SKIP, ROUNDS, CALM_STEPS = 54, 12, 2, 32
globals().update(smoke(WORKERS=2, SAMPLE_S=0.0001, BATCH=2 * MICRO * SHARE, STEPS=6, SKIP=2, ROUNDS=1, CALM_STEPS=6))


class Work:
    """The user's forward: the time of its samples, and now and then a stall."""

    def __init__(self, rank: int, seed: int, *, stalls: bool) -> None:
        self._dice = random.Random(f"{seed}/{rank}")
        self._stalls, self._block = stalls, -1
        self._place = 0
        self._done = 0
        """Samples computed, counted or not."""

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


LOST = ("thrown", "catching_up", "round", "idle")
"""What worker-seconds are lost to, beside what all ways of training have."""


class Spent:
    """Seconds of one worker under a pace with deadlines, by what they were lost to."""

    def __init__(self) -> None:
        self.lost, self.total_s = dict.fromkeys(LOST, 0.0), 0.0
        self._computed = self._counted = 0

    def step(self, record: paceline.StepRecord, rank: int, *, computed: int, waited_s: float, took_s: float) -> None:
        """A step of ``took_s`` seconds; ``waited_s`` of them this worker stood, after its last micro-batch."""
        self.total_s += took_s
        if not computed:
            self.lost["catching_up"] += took_s
            return
        round_s = min(record.round_s, waited_s)
        self.lost["round"] += round_s
        self.lost["idle"] += waited_s - round_s
        self.lost["thrown"] += max(0, computed - record.samples[rank]) * SAMPLE_S


def train(pace: str, seed: int, *, stalls: bool, steps: int) -> float:
    """Return the samples per second of a training under this pace."""
    data, counted, began, spent = _data(BATCH * steps), 0, 0.0, Spent()
    with paceline.join(pace, quiet=True) as fleet:
        work = Work(fleet.rank, seed, stalls=stalls)
        model = fleet.model(nn.Linear(FEATURES, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=MICRO):
            computed, opened = 0, time.perf_counter()
            done = opened
            for x, y in step:
                step.backward(_loss(model, x, y, work))
                computed, done = computed + len(x), time.perf_counter()
            step.commit(optimizer)
            ended = time.perf_counter()
            if step.index < SKIP:
                began = ended
            else:
                counted += step.record.total
                took = {"waited_s": ended - done, "took_s": ended - opened}
                spent.step(step.record, fleet.rank, computed=computed, **took)
        speed = counted / (time.perf_counter() - began)
        everybodys = _added_up(fleet, {"total": spent.total_s, **spent.lost})
        if fleet.rank == 0:
            records = list(fleet.history)[SKIP:-1]
            told.append(
                {
                    "count_cv": _spread([record.total for record in records]),
                    "least_count": min(record.total for record in records) / BATCH,
                    "deadlines": statistics.mean(record.deadline_s is not None for record in records),
                    **{name: everybodys[name] / everybodys["total"] for name in LOST},
                }
            )
    return speed


told: list[dict[str, float]] = []
"""Of each training: the spread of the steps' counts, the least of them over the batch, how many steps had a deadline,
and what worker-seconds were lost to."""


def _added_up(fleet: paceline.Fleet, figures: dict[str, float]) -> dict[str, float]:
    """Each figure's sum over the workers: each gives its own with the first of the samples that it is dealt.

    Samples are dealt by speed, so one for each worker could be two for one and none for another.
    """
    left = [figures]

    def score(_: torch.Tensor) -> dict[str, float]:
        return left.pop() if left else dict.fromkeys(figures, 0.0)

    samples = TensorDataset(torch.zeros(EACH * fleet.world_size))
    return dict(fleet.evaluate(score, samples, batch_size=1, sums=tuple(figures)))


def alone(seed: int, *, steps: int) -> float:
    """Samples a second of all workers, each by itself in plain torch, under the same stalls."""
    with paceline.join("equal", quiet=True) as fleet:
        work = Work(fleet.rank, seed, stalls=True)
        model = nn.Linear(FEATURES, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = _data(MICRO * SHARE)
        fleet.any(False)  # all begin together
        began = time.perf_counter()
        for _ in range(steps):
            for x, y in zip(data.tensors[0].split(MICRO), data.tensors[1].split(MICRO), strict=True):
                _loss(model, x, y, work).backward()
            optimizer.step()
            optimizer.zero_grad()
        speed = steps * MICRO * SHARE / (time.perf_counter() - began)
        return _added_up(fleet, {"speed": speed})["speed"]


def _data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(length, FEATURES, generator=generator), torch.randint(10, (length,), generator=generator)
    )


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, work: Work) -> torch.Tensor:
    until = time.perf_counter() + work.seconds(len(x))
    loss = nn.functional.cross_entropy(model(x), y)
    time.sleep(max(0.0, until - time.perf_counter()))
    return loss


def _spread(counts: list[int]) -> float:
    return statistics.pstdev(counts) / statistics.mean(counts)


def measure() -> dict[str, float]:
    speeds: dict[str, list[float]] = {"adaptive": [], "joint": [], "calm adaptive": [], "calm joint": [], "alone": []}
    for seed in range(ROUNDS):
        speeds["alone"].append(alone(seed, steps=STEPS))
        for pace in ("adaptive", "joint"):
            speeds[pace].append(train(pace, seed, stalls=True, steps=STEPS))
        for pace in ("adaptive", "joint"):
            speeds[f"calm {pace}"].append(train(pace, seed, stalls=False, steps=CALM_STEPS))
    figures = {name: statistics.harmonic_mean(values) for name, values in speeds.items()}
    stalled, calm = told[1::4], told[3::4]
    if not stalled:  # only the leader has them
        return figures
    lost = {f"lost_{name}": statistics.mean(one[name] for one in stalled) for name in LOST}
    return {
        **figures,
        **lost,
        "count_cv": max(one["count_cv"] for one in stalled),
        "least_count": min(one["least_count"] for one in stalled),
        "calm_deadlines": statistics.mean(one["deadlines"] for one in calm),
    }


def main() -> None:
    if is_worker():
        leave_result(measure())
        return
    found = run_workers(__file__, WORKERS)
    limit = found["alone"]
    print(
        f"limit {limit:,.0f} samples/s: {WORKERS} workers alone, {1 / EVERY:.0%} of micro-batches {STALL} times as long"
    )
    for name in ("adaptive", "joint"):
        print(f"  {name:<9} {found[name]:>6,.0f} samples/s  {found[name] / limit:6.1%}")
    lost = ", ".join(f"{name.replace('_', ' ')} {found[f'lost_{name}']:.1%}" for name in LOST)
    print(f"  joint's worker-seconds lost: {lost}; least count {found['least_count']:.2f} of the batch")
    print(
        f"without stalls: joint {found['calm joint']:,.0f}, adaptive {found['calm adaptive']:,.0f} samples/s; "
        f"{found['calm_deadlines']:.0%} of joint's steps have a deadline"
    )
    figures = {
        "joint_over_limit": found["joint"] / limit,
        "joint_over_adaptive": found["joint"] / found["adaptive"],
        "calm_joint_over_adaptive": found["calm joint"] / found["calm adaptive"],
        **{name: found[name] for name in ("count_cv", "least_count", "calm_deadlines")},
        **{f"lost_{name}": found[f"lost_{name}"] for name in LOST},
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
