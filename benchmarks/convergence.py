"""Does training under deadlines reach the accuracy of synchronous training, and how much sooner?

The model, data and schedule of examples/digits.py on four equal workers, eight micro-batches to a share, under stalls:
one micro-batch in a hundred takes 50 times as long, inside the user's own forward. Synchronous training is pace
"adaptive", which waits for everybody; pace "joint" closes its rounds at a deadline and counts what is finished. All
ways of training take turns in the same processes and meet the same initial weights, order of samples and stalls for
each seed. "no floor" is joint whose rounds close at their deadline with any count, however thin. With --rules joint is
run with each rule for the learning rate of a count that varies.

Accuracy is that of worker 0's weights on the whole test set. Weights are put by every few steps and scored after the
training, so the clock (from the first step's start) holds no evaluation. Time to 97 % is read from the mean curve over
the seeds. ``accuracy_gap``: points by which joint ends below synchronous training, the mean over the seeds' differences
with its standard error. ``throughput_cost``: the part by which joint counts fewer samples a second than without the
floor.

    python benchmarks/convergence.py            # ten seeds, within eight minutes
    python benchmarks/convergence.py --rules    # the rules "linear" and "gain" as well, about twelve minutes
    python benchmarks/convergence.py --seeds 0:50 --quick    # fifty seeds, twenty minutes: what ten cannot show
    python benchmarks/convergence.py --quick    # two seeds, half the time a sample, within a minute
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from _smoke import smoke
from common import is_worker, leave_result, run_workers
from torch import nn
from torch.utils.data import TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits import datasets, network, one_cycle

WORKERS, MICRO, BATCH = 4, 4, 128
STALL, EVERY = 50, 100
"""A stall takes as long as so many micro-batches; one micro-batch in so many has one."""
GOAL = 0.97
KEEP_EVERY = 3
"""Steps between two sets of weights that are scored."""

WAYS: dict[str, tuple[str | Callable[[], paceline.Joint], str]] = {
    "sync": ("adaptive", "none"),
    "joint": ("joint", "none"),
    "no floor": (lambda: paceline.Joint(least_count=0.0), "none"),
    "joint, linear": ("joint", "linear"),
    "joint, gain": ("joint", "gain"),
}
"""Pace, and the learning rate's rule for a count that varies."""
PLAIN_WAYS = ("sync", "joint", "no floor")


class Size(NamedTuple):
    """How much is run: ``sample_s`` is what a sample takes without a stall, in seconds."""

    seeds: range
    epochs: int
    sample_s: float


FULL, QUICK = Size(seeds=range(10), epochs=8, sample_s=0.002), Size(seeds=range(2), epochs=8, sample_s=0.001)
globals().update(smoke(WORKERS=2, MICRO=32, FULL=Size(seeds=range(2), epochs=1, sample_s=0.00002)))

Curve = list[tuple[int, float, float]]
"""Step, seconds since the start, test accuracy."""


class Stalls:
    """How long this worker's micro-batches take: a function of the seed, the rank and the samples done before."""

    def __init__(self, seed: int, rank: int, sample_s: float) -> None:
        self._dice, self._sample_s = random.Random(f"{seed}/{rank}"), sample_s
        self._done, self._block, self._place = 0, -1, 0

    def seconds(self, samples: int) -> float:
        took = samples * self._sample_s
        for position in range(self._done, self._done + samples):
            block, within = divmod(position, EVERY * MICRO)
            if block > self._block:
                self._block, self._place = block, self._dice.randrange(EVERY * MICRO)
            if within == self._place:
                took += (STALL - 1) * MICRO * self._sample_s
        self._done += samples
        return took


def train(way: str, seed: int, size: Size, train_set: TensorDataset, test_set: TensorDataset) -> Curve:
    """A training of examples/digits.py under stalls; on worker 0, its curve."""
    pace, lr_scaling = WAYS[way]
    torch.manual_seed(seed)
    kept: list[tuple[int, float, dict[str, torch.Tensor]]] = []
    with paceline.join(pace if isinstance(pace, str) else pace(), seed=seed, quiet=True) as fleet:
        stalls = Stalls(seed, fleet.rank, size.sample_s)
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        steps = fleet.steps(train_set, global_batch=BATCH, micro_batch=MICRO, epochs=size.epochs, lr_scaling=lr_scaling)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: one_cycle(steps.progress))
        fleet.track(optimizer=optimizer, scheduler=scheduler)
        began = time.perf_counter()
        for step in steps:
            for x, y in step:
                step.backward(_loss(model, x, y, stalls))
            step.commit(optimizer, clip_norm=5.0)
            scheduler.step()
            if fleet.rank == 0 and (step.index % KEEP_EVERY == 0 or step.progress == 1):
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                kept.append((step.index, time.perf_counter() - began, weights))
    return [(index, seconds, accuracy(weights, test_set)) for index, seconds, weights in kept]


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, stalls: Stalls) -> torch.Tensor:
    until = time.perf_counter() + stalls.seconds(len(x))
    loss = nn.functional.cross_entropy(model(x), y)
    time.sleep(max(0.0, until - time.perf_counter()))
    return loss


def accuracy(weights: dict[str, torch.Tensor], test_set: TensorDataset) -> float:
    model = network().eval()
    model.load_state_dict(weights)
    images, labels = test_set.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def measure(ways: Sequence[str], size: Size) -> dict[str, list[Curve]]:
    curves: dict[str, list[Curve]] = {way: [] for way in ways}
    data = datasets()
    for seed in size.seeds:
        for way in ways:
            curves[way].append(train(way, seed, size, *data))
            if curves[way][-1]:
                print(f"seed {seed}, the last is {size.seeds[-1]}: {way} done", file=sys.stderr, flush=True)
    return curves


def mean_curve(curves: list[Curve]) -> Curve:
    """Step, seconds and accuracy, each the mean over the seeds: one training's first 97 % is mostly luck."""
    means = [tuple(statistics.mean(column) for column in zip(*points)) for points in zip(*curves)]
    return [(step, seconds, score) for step, seconds, score in means]


def summary(curves: list[Curve]) -> dict[str, float | None]:
    finals = [curve[-1][2] for curve in curves]
    reached = next(((step, seconds) for step, seconds, score in mean_curve(curves) if score >= GOAL), (None, None))
    return {
        "accuracy": statistics.mean(finals),
        "spread": statistics.stdev(finals),
        "standard_error": statistics.stdev(finals) / len(finals) ** 0.5,
        "steps_to_goal": reached[0],
        "seconds_to_goal": reached[1],
        "steps": statistics.mean(curve[-1][0] + 1 for curve in curves),
        "seconds": statistics.mean(curve[-1][1] for curve in curves),
    }


def gap(sync: list[Curve], joint: list[Curve]) -> tuple[float, float]:
    """Points of accuracy that joint ends below synchronous training, and their standard error, paired by seed."""
    each = [100 * (one[-1][2] - other[-1][2]) for one, other in zip(sync, joint, strict=True)]
    return statistics.mean(each), statistics.stdev(each) / len(each) ** 0.5


def ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def seeds(text: str) -> range:
    first, last = map(int, text.split(":"))
    return range(first, last)


def rounded(row: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK.seeds)} seeds, half the time a sample")
    parser.add_argument("--rules", action="store_true", help="joint with each rule for a count that varies")
    parser.add_argument("--seeds", type=seeds, help="from the first to before the last, as in 10:50")
    options = parser.parse_args()
    ways, size = tuple(WAYS) if options.rules else PLAIN_WAYS, QUICK if options.quick else FULL
    size = size._replace(seeds=options.seeds or size.seeds)
    if is_worker():
        leave_result(measure(ways, size))
        return
    curves = run_workers(__file__, WORKERS, *sys.argv[1:])
    found = {way: summary(each) for way, each in curves.items()}
    trouble = f"{1 / EVERY:.0%} of micro-batches {STALL} times as long"
    print(f"digits, {WORKERS} workers, {trouble}, {len(size.seeds)} seeds, {size.epochs} epochs:")
    for way, row in found.items():
        goal = "never" if row["seconds_to_goal"] is None else f"after {row['seconds_to_goal']:.1f} s"
        print(
            f"  {way:<14} test accuracy {row['accuracy']:.2%}, spread {row['spread']:.2%}; {GOAL:.0%} {goal}; "
            f"all {row['steps']:.0f} steps {row['seconds']:.1f} s"
        )
    sync, joint, thin = found["sync"], found["joint"], found["no floor"]
    (points, error), (thin_points, thin_error) = (gap(curves["sync"], curves[way]) for way in ("joint", "no floor"))
    cost = 1 - (ratio(thin["seconds"], joint["seconds"]) or 1.0)  # as many samples in either
    print(
        f"joint ends {points:.2f} points below sync (standard error {error:.2f}), {thin_points:.2f} without the floor"
    )
    print(f"({thin_error:.2f}); the floor costs {cost:.1%} of the throughput")
    figures = {
        "accuracy_gap": points,
        "accuracy_gap_error": error,
        "accuracy_gap_no_floor": thin_points,
        "throughput_cost": cost,
        "accuracy_sync": sync["accuracy"],
        "accuracy_joint": joint["accuracy"],
        "time_ratio": ratio(sync["seconds_to_goal"], joint["seconds_to_goal"]),
        "whole_time_ratio": ratio(sync["seconds"], joint["seconds"]),
        "spread_sync": sync["spread"],
        "spread_joint": joint["spread"],
    }
    ways_told = {way: rounded(row) for way, row in found.items()}
    print(json.dumps({**rounded(figures), "seeds": len(size.seeds), "epochs": size.epochs, "ways": ways_told}))


if __name__ == "__main__":
    main()
