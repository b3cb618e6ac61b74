"""P2's WP-SGD against its relatives: ten workers of unequal speed on L2-regularised logistic regression.

Every worker runs SGD (one sample a step, constant rate) from the same start on the same data until the fastest has done
T_max steps; then parameters are averaged once, as P2 does. A rule's figure in a setting is its suboptimality
``F(average) - F*``, the mean over the seeds, divided by the best rule's; over all settings, the geometric mean and the
worst. A second table does the same work in 10 rounds, each an average of updates from a common start.

The 36 settings are three kinds of fleet, three strengths of regularisation, and four lengths of training, which decide
how far the workers have come: ``eta * lambda * T_max`` of 1, 3, 10 and 30.

    python benchmarks/wp_sgd.py                            # about 10 s
    python benchmarks/wp_sgd.py --each                     # every setting's figures too
    python benchmarks/wp_sgd.py --lengths 0.3,1,3,10       # other lengths of training
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from _smoke import smoke
from numpy.typing import NDArray

from paceline.averaging.weights import LocalWork, Mixture, rule_of
from paceline.research.wp_weights import log_contraction, spread

Floats = NDArray[np.float64]

WORKERS, FEATURES, SAMPLES = 10, 20, 2000
RATE = 0.2
SEEDS, ROUND_SEEDS, ROUNDS = 20, 5, 10
FLEETS = {
    "two very slow": [1.0] * 8 + [0.05] * 2,
    "half slow": [1.0] * 5 + [0.25] * 5,
    "spread": list(np.linspace(1.0, 0.1, WORKERS)),
}
STRENGTHS = (0.01, 0.03, 0.1)
LENGTHS = (1.0, 3.0, 10.0, 30.0)
"""``eta * lambda * T_max``: at 1 the slow have hardly left, at 30 all have arrived."""
globals().update(smoke(SAMPLES=200, SEEDS=2, ROUND_SEEDS=1, ROUNDS=2, STRENGTHS=(0.1,), LENGTHS=(1.0,)))
NAMES = ("uniform", "wp", "samples", "fastest", "normalised", "mse")


@dataclass(frozen=True)
class Setting:
    fleet: str
    strength: float
    length: float

    @property
    def steps(self) -> NDArray[np.int64]:
        """Local steps of each worker."""
        longest = self.length / (RATE * self.strength)
        return np.maximum(1, np.round(longest * np.array(FLEETS[self.fleet]))).astype(np.int64)

    def __str__(self) -> str:
        return f"{self.fleet}, lambda {self.strength:g}, eta lambda T {self.length:g}"


Figures = dict[Setting, dict[str, float]]


class Problem:
    """Logistic regression with ``lambda / 2 |w|^2``; features of unit length on average, labels of +-1 with noise."""

    def __init__(self, strength: float) -> None:
        generator = np.random.default_rng(0)
        truth = 4 * generator.standard_normal(FEATURES)
        self.strength = strength
        self.features = generator.standard_normal((SAMPLES, FEATURES)) / np.sqrt(FEATURES)
        chance = 1 / (1 + np.exp(-self.features @ truth))
        self.labels = np.where(generator.random(SAMPLES) < chance, 1.0, -1.0)
        self.best = self._solve()

    def loss(self, points: Floats) -> Floats:
        """F of every point (last axis: features)."""
        margins = self.labels * (points @ self.features.T)
        penalty = self.strength / 2 * np.sum(points**2, axis=-1)
        return np.asarray(np.logaddexp(0, -margins).mean(axis=-1) + penalty)

    def suboptimality(self, points: Floats) -> float:
        """Mean over the seeds (first axis)."""
        return float(np.mean(self.loss(points) - self.best))

    def step(self, points: Floats, drawn: NDArray[np.int64]) -> Any:
        """One SGD step of each worker on its own sample."""
        rows, labels = self.features[drawn], self.labels[drawn]
        margins = labels * np.einsum("...f,...f->...", points, rows)
        pull = labels / (1 + np.exp(margins))
        return points - RATE * (self.strength * points - pull[..., None] * rows)

    def _solve(self) -> float:
        point = np.zeros(FEATURES)
        for _ in range(50):
            chance = 1 / (1 + np.exp(self.labels * (self.features @ point)))
            slope = self.strength * point - self.features.T @ (self.labels * chance) / SAMPLES
            curve = (self.features.T * (chance * (1 - chance))) @ self.features / SAMPLES
            point -= np.linalg.solve(curve + self.strength * np.eye(FEATURES), slope)
        return float(self.loss(point))


def mixture(rule: str, steps: NDArray[np.int64], updates: Floats, strength: float) -> Mixture:
    """The rule's weights for workers that did so many steps and came back with these updates."""
    if rule == "fastest":
        return Mixture((steps == steps.max()) / np.sum(steps == steps.max()))
    shrunk = steps * log_contraction(RATE, strength)
    work = LocalWork(steps=steps, log_contraction=shrunk)
    if rule == "mse":
        distance, noise = spread(updates, work)
        work = LocalWork(steps=steps, log_contraction=shrunk, distance=distance, noise=noise)
    return rule_of(rule).weigh(work)


def one_shot(settings: Sequence[Setting], progress: Any) -> Figures:
    """All settings of one strength share their workers' paths: only the step at which a worker stops differs."""
    figures: Figures = {}
    for strength in STRENGTHS:
        problem, chosen = Problem(strength), [s for s in settings if s.strength == strength]
        paths = _paths(problem, {int(t) for s in chosen for t in s.steps})
        for setting in chosen:
            ends = np.stack([paths[int(t)][:, worker] for worker, t in enumerate(setting.steps)], axis=1)
            figures[setting] = {rule: problem.suboptimality(_averages(rule, setting, ends)) for rule in NAMES}
            progress(setting)
    return figures


def _paths(problem: Problem, stops: set[int]) -> dict[int, Floats]:
    """Where all workers of all seeds (seeds x workers x features) are after so many steps."""
    generator = np.random.default_rng(1)
    points, kept = np.zeros((SEEDS, WORKERS, FEATURES)), {}
    for number in range(1, max(stops) + 1):
        points = problem.step(points, generator.integers(SAMPLES, size=(SEEDS, WORKERS)))
        if number in stops:
            kept[number] = points
    return kept


def _averages(rule: str, setting: Setting, ends: Floats) -> Floats:
    """The start is zero, so a worker's end is its update."""
    return np.stack([mixture(rule, setting.steps, seed, setting.strength).coefficients @ seed for seed in ends])


def in_rounds(settings: Sequence[Setting], progress: Any) -> Figures:
    """The same work, averaged ROUNDS times; all rules see the same samples."""
    figures: Figures = {}
    for setting in settings:
        problem, generator = Problem(setting.strength), np.random.default_rng(2)
        starts = np.zeros((len(NAMES), ROUND_SEEDS, FEATURES))
        for number in range(ROUNDS):
            steps = setting.steps * (number + 1) // ROUNDS - setting.steps * number // ROUNDS
            points = np.repeat(starts[:, :, None], WORKERS, axis=2)
            for local in range(int(steps.max())):
                moved = problem.step(points, generator.integers(SAMPLES, size=(ROUND_SEEDS, WORKERS)))
                points = np.where((local < steps)[:, None], moved, points)
            starts = starts + _moves(setting, steps, points - starts[:, :, None])
        figures[setting] = {rule: problem.suboptimality(starts[place]) for place, rule in enumerate(NAMES)}
        progress(setting)
    return figures


def _moves(setting: Setting, steps: NDArray[np.int64], updates: Floats) -> Floats:
    """The averaged update of each rule and seed (rules x seeds x features)."""
    return np.array(
        [
            [mixture(rule, steps, seed, setting.strength).coefficients @ seed for seed in seeds]
            for rule, seeds in zip(NAMES, updates, strict=True)
        ]
    )


def summary(figures: Figures) -> dict[str, tuple[float, float]]:
    """For each rule: suboptimality over the best rule's, geometric mean and worst."""
    ratios = {rule: [row[rule] / min(row.values()) for row in figures.values()] for rule in NAMES}
    return {rule: (float(np.exp(np.mean(np.log(values)))), float(max(values))) for rule, values in ratios.items()}


def report(title: str, figures: Figures, *, each: bool) -> dict[str, Any]:
    rows = summary(figures)
    print(f"\n| {title} | geometric mean | worst |\n|---|---|---|")
    for rule, (middle, worst) in rows.items():
        print(f"| {rule} | {middle:.2f} | {worst:.2f} |")
    if each:
        for setting, row in figures.items():
            print(f"  {setting}: " + ", ".join(f"{rule} {value:.2e}" for rule, value in row.items()))
    over = {setting: row["uniform"] / row["wp"] for setting, row in figures.items()}
    best, worst_setting = max(over, key=over.__getitem__), min(over, key=over.__getitem__)
    print(f"WP beats uniform most, {over[best]:.1f} times, at: {best}")
    print(f"WP loses to uniform most, {1 / over[worst_setting]:.1f} times, at: {worst_setting}")
    wins = sum(value > 1 for value in over.values())
    return {
        **{rule: [round(figure, 2) for figure in pair] for rule, pair in rows.items()},
        "wp_beats_uniform_most": round(over[best], 2),
        "wp_loses_to_uniform_most": round(1 / over[worst_setting], 2),
        "wp_wins": f"{wins}/{len(over)}",
    }


def _counter(total: int) -> Iterator[None]:
    """Progress on standard error: one line that rewrites itself, none in a pipe."""
    for done in range(1, total + 1):
        if sys.stderr.isatty():
            print(f"\r{done}/{total} settings", end="\n" if done == total else "", file=sys.stderr, flush=True)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="print every setting's figures too")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="eta * lambda * T_max, such as 0.3,1,3,10")
    options = parser.parse_args()
    settings = [Setting(*parts) for parts in product(FLEETS, STRENGTHS, options.lengths)]
    counter = _counter(2 * len(settings))
    once = one_shot(settings, lambda _: next(counter))
    often = in_rounds(settings, lambda _: next(counter))
    next(counter, None)
    first = report(f"averaged once, {SEEDS} seeds", once, each=options.each)
    second = report(f"averaged {ROUNDS} times, {ROUND_SEEDS} seeds", often, each=options.each)
    grid = {"settings": len(settings), "workers": WORKERS, "lengths": options.lengths}
    print(json.dumps({**grid, "one_shot": first, "rounds": second}))


def _lengths(text: str) -> tuple[float, ...]:
    lengths = tuple(float(part) for part in text.split(","))
    if not all(0 < length < 1000 for length in lengths):
        raise ValueError
    return lengths


if __name__ == "__main__":
    main()
