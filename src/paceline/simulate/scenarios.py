"""Seeded scenarios: seconds of every worker in every step for an equal share, about one second for a healthy one.

The same name, size and seed give the same matrix. Every scenario has speeds that differ a little for good and noise
from step to step; each then adds one trouble.

>>> make("calm", steps=3, workers=5, seed=0).shape
(3, 5)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Generator = np.random.Generator

SPEEDS, NOISE = 0.1, 0.05
"""Spread (natural log) of the workers' speeds, and of each step's noise."""
NODE = 40
"""Workers of a node, which slow down together; a quarter of the fleet where that is smaller."""


def make(name: str, *, steps: int, workers: int, seed: int = 0) -> Floats:
    """The scenario's matrix, steps x workers. An unknown name or an empty size is a ValueError."""
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    if steps < 1 or workers < 1:
        raise ValueError(f"a scenario has at least one step and one worker, not {steps} and {workers}")
    if seed < 0:
        raise ValueError(f"a seed is a whole number from 0, not {seed}")
    return SCENARIOS[name](np.random.default_rng(seed), steps, workers)


def calm(rng: Generator, steps: int, workers: int) -> Floats:
    """Like machines and little noise: nothing to gain, and something to lose."""
    return _lognormal(rng, 0.02, (1, workers)) * _lognormal(rng, 0.03, (steps, workers))


def skewed(rng: Generator, steps: int, workers: int) -> Floats:
    """Machines of three generations, for good: half at 1, the others 1.5 and 3 times slower."""
    slower: Floats = np.array([1.0, 1.0, 1.5, 3.0])[rng.integers(4, size=workers)]
    return _healthy(rng, steps, workers) * slower


def drifting(rng: Generator, steps: int, workers: int) -> Floats:
    """Speeds that wander: the log follows ``d <- 0.99 d + 0.05 N(0, 1)``, a spread of about 0.35 in the long run."""
    drift = rng.normal(0.0, 0.35, workers)
    rows = np.empty((steps, workers))
    for step in range(steps):
        rows[step] = drift
        drift = 0.99 * drift + 0.05 * rng.standard_normal(workers)
    return _healthy(rng, steps, workers) * np.exp(rows)


def bursts(rng: Generator, steps: int, workers: int) -> Floats:
    """A node turns 1.8 times slower with probability 0.03 a step and recovers with 0.1: all its workers at once."""
    node = _nodes(workers)
    slow = np.empty((steps, node[-1] + 1), dtype=np.bool_)
    now = np.zeros(node[-1] + 1, dtype=np.bool_)
    for step in range(steps):
        luck = rng.random(len(now))
        now = np.where(now, luck >= 0.1, luck < 0.03)
        slow[step] = now
    return _healthy(rng, steps, workers) * np.where(slow, 1.8, 1.0)[:, node]


def periodic(rng: Generator, steps: int, workers: int) -> Floats:
    """Every node is twice as slow for 3 of every 12 steps, its phase fixed."""
    node = _nodes(workers)
    phase = rng.integers(12, size=node[-1] + 1)
    slow = (np.arange(steps)[:, None] + phase) % 12 < 3
    return _healthy(rng, steps, workers) * np.where(slow, 2.0, 1.0)[:, node]


def stalls(rng: Generator, steps: int, workers: int) -> Floats:
    """One step of a worker in a hundred stalls; the extra seconds have a heavy tail (Pareto 1.5, 50 at most)."""
    stalled = rng.random((steps, workers)) < 0.01
    extra = np.minimum(1 + rng.pareto(1.5, (steps, workers)), 50.0)
    return _healthy(rng, steps, workers) + np.where(stalled, extra, 0.0)


def long_sequences(rng: Generator, steps: int, workers: int) -> Floats:
    """Data-driven: a share holds 8 sequences of lognormal length, and attention costs the square. No memory."""
    length = _lognormal(rng, 0.5, (steps, workers, 8))
    cost = (0.7 * length + 0.3 * length**2).mean(axis=2)
    return np.asarray(cost * _lognormal(rng, 0.02, (1, workers)), dtype=np.float64)


SCENARIOS: dict[str, Callable[[Generator, int, int], Floats]] = {
    "calm": calm,
    "skewed": skewed,
    "drifting": drifting,
    "bursts": bursts,
    "periodic": periodic,
    "stalls": stalls,
    "long-sequences": long_sequences,
}


def _lognormal(rng: Generator, spread: float, shape: tuple[int, ...]) -> Floats:
    return np.asarray(np.exp(spread * rng.standard_normal(shape)))


def _healthy(rng: Generator, steps: int, workers: int) -> Floats:
    return _lognormal(rng, SPEEDS, (1, workers)) * _lognormal(rng, NOISE, (steps, workers))


def _nodes(workers: int) -> NDArray[np.int64]:
    """Each worker's node."""
    return np.arange(workers) // min(NODE, -(-workers // 4))
