"""Matrices of seconds, on which every rule can be played: every worker's seconds for an equal share in every step.

They come from a run's log, from emulated machines, or from seeded scenarios, where a healthy worker takes about one
second. The same name, size and seed give the same scenario. Each has speeds that differ a little for good, and noise
from step to step; then it adds one trouble.

One scenario, *stuck*, is not a matrix alone: in it micro-batches stall, and nobody can see or end a stall, so a worker
is stuck until its micro-batch is over. One micro-batch in a hundred takes fifty times as long; 8 make an equal share. A
rule that waits for everybody waits in most steps; one that does not finds a third of its workers stuck at any time. A
matrix of seconds cannot describe this, for a stall lasts over several steps: such fleets are played micro-batch by
micro-batch (`paceline.simulate.deadline_play`).

>>> make("calm", steps=3, workers=5, seed=0).shape
(3, 5)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.machines import Machine
from paceline.records import StepRecord
from paceline.simulate import deadline_play, play
from paceline.simulate.play import Floats, Outcome

Generator = np.random.Generator

SPEEDS, NOISE = 0.1, 0.05
"""Spread (natural log) of the workers' speeds, and of each step's noise."""
NODE = 40
"""Workers per node, which slow down together; a quarter of the fleet where that is smaller."""


def make(name: str, *, steps: int, workers: int, seed: int = 0) -> Floats:
    """Return the scenario's matrix, steps x workers; raise ValueError for an unknown name or an empty size."""
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    if steps < 1 or workers < 1:
        raise ValueError(f"a scenario has at least one step and one worker, not {steps} and {workers}")
    if seed < 0:
        raise ValueError(f"a seed is a whole number from 0, not {seed}")
    return SCENARIOS[name](np.random.default_rng(seed), steps, workers)


def calm(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw machines that are alike, with little noise: nothing to gain, and something to lose."""
    return _lognormal(rng, 0.02, (1, workers)) * _lognormal(rng, 0.03, (steps, workers))


def skewed(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw machines of three generations, for good: half at 1, the others 1.5 and 3 times slower."""
    slower: Floats = np.array([1.0, 1.0, 1.5, 3.0])[rng.integers(4, size=workers)]
    return _healthy(rng, steps, workers) * slower


def drifting(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw speeds whose log follows ``d <- 0.99 d + 0.05 N(0, 1)``, with a spread of about 0.35 in the long run."""
    drift = rng.normal(0.0, 0.35, workers)
    rows = np.empty((steps, workers))
    for step in range(steps):
        rows[step] = drift
        drift = 0.99 * drift + 0.05 * rng.standard_normal(workers)
    return _healthy(rng, steps, workers) * np.exp(rows)


def bursts(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw nodes that turn 1.8 times slower with probability 0.03 per step, all workers at once; 0.1 to recover."""
    node = _nodes(workers)
    slow = np.empty((steps, node[-1] + 1), dtype=np.bool_)
    now = np.zeros(node[-1] + 1, dtype=np.bool_)
    for step in range(steps):
        luck = rng.random(len(now))
        now = np.where(now, luck >= 0.1, luck < 0.03)
        slow[step] = now
    return _healthy(rng, steps, workers) * np.where(slow, 1.8, 1.0)[:, node]


def periodic(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw nodes that are twice as slow for 3 of every 12 steps, each with a fixed phase."""
    node = _nodes(workers)
    phase = rng.integers(12, size=node[-1] + 1)
    slow = (np.arange(steps)[:, None] + phase) % 12 < 3
    return _healthy(rng, steps, workers) * np.where(slow, 2.0, 1.0)[:, node]


def stalls(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw stalls in one of a hundred steps of a worker; the extra seconds are heavy-tailed (Pareto 1.5, most 50)."""
    stalled = rng.random((steps, workers)) < 0.01
    extra = np.minimum(1 + rng.pareto(1.5, (steps, workers)), 50.0)
    return _healthy(rng, steps, workers) + np.where(stalled, extra, 0.0)


def long_sequences(rng: Generator, steps: int, workers: int) -> Floats:
    """Draw costs from the data: 8 sequences per share, lognormal lengths, attention quadratic, steps independent."""
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
    """Return each worker's node."""
    return np.arange(workers) // min(NODE, -(-workers // 4))


# -- stalls inside micro-batches ---------------------------------------------------------------------------------------

STUCK_PROBABILITY, STUCK_FACTOR = 0.01, 50.0
STUCK_MICRO_BATCHES = 8
STUCK_WORKERS = 4
STUCK_NOISE = deadline_play.stalling(STUCK_PROBABILITY, STUCK_FACTOR)


def stuck_machines(*, steps: int, workers: int, seed: int = 0) -> Floats:
    """Return the seconds of machines that are alike apart from the stalls: about one second, speeds within 2 %."""
    if steps < 1 or workers < 1:
        raise ValueError(f"a scenario has at least one step and one worker, not {steps} and {workers}")
    speeds = 0.02 * np.random.default_rng(seed).standard_normal(workers)
    return np.tile(np.exp(speeds), (steps, 1))


def stuck_limit(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """Return the limit: each worker alone under the same stalls, every micro-batch counted when it ends."""
    steps, workers = seconds.shape
    longer = (1 + STUCK_PROBABILITY * (STUCK_FACTOR - 1)) * math.exp(deadline_play.NOISE**2 / 2)
    length = play.all_busy_s(longer * seconds, play.costs(seconds, cost_s))
    none = np.zeros(steps)
    return Outcome("limit", workers, np.full(steps, float(workers)), length + overhead_s, none, none)


# -- what was recorded, or is emulated ---------------------------------------------------------------------------------

logger = logging.getLogger("paceline.simulate")


def longest_stretch(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the longest sequence of steps with the same workers; of two equal ones, the later."""
    best, start = (0, 0), 0
    for stop in range(1, len(records) + 1):
        if stop == len(records) or records[stop].workers != records[start].workers:
            best = max(best, (start, stop), key=lambda span: (span[1] - span[0], span[0]))
            start = stop
    return records[best[0] : best[1]]


def equal_share_seconds(records: Sequence[StepRecord]) -> Floats:
    """Return each worker's seconds for an equal share of a full batch: ``seconds / samples * batch / workers``.

    A worker that sat out or was not measured counts as fast as when last measured (before its first measurement, as
    then). The seconds for which a worker was stuck at a deadline are added: it took at least those. If the run's
    members changed, the longest stretch with the same members is used, with a warning. A worker that was never measured
    raises ValueError.
    """
    if not records:
        raise ValueError("the run has no steps")
    logged, records = records, longest_stretch(records)
    if len(records) < len(logged):
        taken = f"steps {records[0].step} to {records[-1].step} ({len(records)} of {len(logged)})"
        logger.warning("the run's workers came and went: its longest stretch with the same ones is taken, %s", taken)
    samples, seconds, measured = measurements(records)
    each = np.divide(seconds, samples, out=np.zeros_like(seconds), where=measured)
    return _filled(each, measured) * (_full_batch(records) / len(records[0].workers)) + _stuck_s(records)


def measurements(records: Sequence[StepRecord]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return samples and seconds by step and worker, and where both were measured.

    A worker that was never measured raises ValueError.
    """
    samples = np.array([record.samples for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records], dtype=np.float64)
    measured = (samples > 0) & (seconds > 0) & np.isfinite(seconds)
    if not measured.any(axis=0).all():
        worker = records[0].workers[int(np.argmin(measured.any(axis=0)))]
        raise ValueError(f"worker {worker} was never measured in this run")
    return samples, seconds, measured


def emulated_seconds(fleet: Sequence[Machine], steps: int, *, share: int) -> tuple[Floats, Floats]:
    """Return the seconds of emulated machines for an equal share of ``share`` samples, and their constant costs.

    The costs come on top of the seconds. Both matrices have one row per step and one column per machine.
    """
    if steps < 1:
        raise ValueError(f"machines are played for at least one step, not {steps}")
    each = [[machine.seconds(step, share, begins=False) for machine in fleet] for step in range(steps)]
    costs = [[machine.slowness.cost_s(step) for machine in fleet] for step in range(steps)]
    return np.array(each), np.array(costs)


def _full_batch(records: Sequence[StepRecord]) -> float:
    """Return the largest sample count of steps that waited for everybody, or the median count if none did."""
    waited = [record.total for record in records if record.deadline_s is None and record.wait_for is None]
    return float(max(waited)) if waited else float(np.median([record.total for record in records]))


def _stuck_s(records: Sequence[StepRecord]) -> Floats:
    """Return the seconds that workers without a finished micro-batch spent on one; 0 for the others."""
    rows = np.zeros((len(records), len(records[0].workers)))
    for row, record in zip(rows, records):
        if record.unfinished_s:
            row[:] = np.where(np.array(record.samples) == 0, record.unfinished_s, 0.0)
    return np.where(np.isfinite(rows), rows, 0.0)


def _filled(each: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Fill gaps with the value before them, and gaps at the start with the first value."""
    step = np.where(measured, np.arange(len(each))[:, None], -1)
    source = np.maximum.accumulate(step, axis=0)
    source = np.where(source < 0, np.argmax(measured, axis=0), source)
    return np.take_along_axis(each, source, axis=0)
