"""A broad family of simulated clusters, from which the general forecast is made.

Every cluster has 4 to 200 workers in nodes of any size, speeds that differ, noise, and up to two troubles of seven
kinds, for workers or whole nodes. What the forecast is judged by is left out: rhythms of 11 to 13 steps, on-off factors
of 1.65 to 1.95, rhythms' factors of 1.85 to 2.15 (the scenarios *periodic* and *bursts*), and every kind of trouble in
`benchmarks/zero_shot.py` that is its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Generator = np.random.Generator
TROUBLES = {"on_off": 0.3, "rhythm": 0.2, "drift": 0.15, "spikes": 0.12, "skew": 0.1, "shift": 0.08, "common": 0.05}
"""Each kind's chance."""


def cluster(rng: Generator, steps: int) -> np.ndarray:
    """Seconds of every worker in every step, steps x workers."""
    workers = round(between(rng, 4, 200))
    node = np.arange(workers) // (int(rng.integers(1, max(2, workers // 2) + 1)) if rng.random() < 0.8 else 1)
    logs = speeds(rng, workers) + noise(rng, steps, workers)
    if rng.random() < 0.15:
        logs = logs + rng.uniform(0, 0.1) * rng.standard_normal((steps, node[-1] + 1))[:, node]
    for _ in range(rng.choice(3, p=[0.35, 0.5, 0.15])):
        kind = KINDS[str(rng.choice(list(TROUBLES), p=list(TROUBLES.values())))]
        columns = node if rng.random() < 0.65 else np.arange(workers)
        logs = kind(rng, logs, columns)
    return np.exp(logs[:, rng.permutation(workers)] + rng.uniform(-3, 3))


def between(rng: Generator, low: float, high: float) -> float:
    """Uniform in the log."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def outside(draw: Callable[[], float], low: float, high: float) -> float:
    """A draw that does not lie between these."""
    while low < (drawn := draw()) < high:
        pass
    return drawn


def speeds(rng: Generator, workers: int) -> np.ndarray:
    kind = rng.random()
    if kind < 0.6:
        return rng.uniform(0, 0.3) * rng.standard_normal(workers)
    if kind < 0.85:
        return np.log([1.0, between(rng, 1, 4), between(rng, 1, 4)])[rng.integers(3, size=workers)]
    return np.zeros(workers)


def noise(rng: Generator, steps: int, workers: int) -> np.ndarray:
    """Normal, with heavy tails, or lopsided."""
    kind, shape, spread = rng.random(), (steps, workers), between(rng, 0.008, 0.2)
    if kind < 0.6:
        return spread * rng.standard_normal(shape)
    return spread * (rng.standard_t(4, shape) / 1.4 if kind < 0.8 else rng.gumbel(size=shape) / 1.28)


def switching(rng: Generator, steps: int, columns: int, starts: float, ends: float) -> np.ndarray:
    now = rng.random(columns) < (starts / (starts + ends) if rng.random() < 0.5 else 0.0)
    states = np.empty((steps, columns), dtype=bool)
    for step in range(steps):
        luck = rng.random(columns)
        now = states[step] = np.where(now, luck >= ends, luck < starts)
    return states


def on_off(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Slow and fast again, at random."""
    count = columns[-1] + 1
    factor = np.log(outside(lambda: between(rng, 1.15, 5), 1.65, 1.95))
    slow = switching(rng, len(logs), count, between(rng, 0.004, 0.15), between(rng, 0.03, 0.6))
    if rng.random() < 0.3:
        slow &= rng.random(count) < 0.5
    each = rng.uniform(0.5, 1.5, count) if rng.random() < 0.3 else 1.0
    return logs + (slow * factor * each)[:, columns]


def rhythm(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Slow for some steps of every period."""
    count = columns[-1] + 1
    period = int(outside(lambda: float(rng.integers(4, 25)), 10.5, 13.5))
    factor = np.log(outside(lambda: between(rng, 1.15, 4), 1.85, 2.15))
    phase = rng.integers(period, size=count) if rng.random() < 0.8 else np.zeros(count, dtype=int)
    slow = (np.arange(len(logs))[:, None] + phase) % period < rng.integers(1, max(2, int(0.6 * period) + 1))
    if rng.random() < 0.3:
        slow &= rng.random(count) < 0.5
    return logs + (slow * factor)[:, columns]


def drift(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Speeds that wander about their mean."""
    count, keep, spread = columns[-1] + 1, 1 - between(rng, 0.003, 0.3), rng.uniform(0.05, 0.5)
    rows = np.empty((len(logs), count))
    now = spread * rng.standard_normal(count)
    for step in range(len(logs)):
        rows[step] = now
        now = keep * now + spread * np.sqrt(1 - keep**2) * rng.standard_normal(count)
    return logs + rows[:, columns]


def spikes(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Now and then a step that takes much longer."""
    shape = (len(logs), columns[-1] + 1)
    hit = rng.random(shape) < between(rng, 0.002, 0.06)
    exponential, tail = rng.exponential(rng.uniform(0.5, 3), shape), rng.pareto(rng.uniform(1.2, 3), shape)
    extra = exponential if rng.random() < 0.5 else np.minimum(tail, 40)
    return np.logaddexp(logs, np.where(hit, np.log(extra + 0.3), -50.0)[:, columns])


def skew(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Times that depend on the data: no memory, lopsided."""
    shape = rng.uniform(0.5, 8)
    return logs + np.log(0.3 + 0.7 * rng.gamma(shape, 1 / shape, logs.shape))


def shift(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Some change their speed once, for good."""
    count = columns[-1] + 1
    factor = np.log(between(rng, 1.2, 4)) * rng.choice([1, -1]) * (rng.random(count) < 0.4)
    after = np.arange(len(logs))[:, None] >= rng.integers(len(logs), size=count)
    return logs + (after * factor)[:, columns]


def common(rng: Generator, logs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The whole fleet slows down together."""
    slow = switching(rng, len(logs), 1, between(rng, 0.01, 0.15), between(rng, 0.05, 0.6))
    return logs + np.log(between(rng, 1.2, 3)) * slow


KINDS = {
    "on_off": on_off,
    "rhythm": rhythm,
    "drift": drift,
    "spikes": spikes,
    "skew": skew,
    "shift": shift,
    "common": common,
}
