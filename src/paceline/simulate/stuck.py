"""Stalls inside micro-batches, where nobody can see or end them: a worker is *stuck* until its micro-batch is over.

One micro-batch in a hundred takes fifty times as long, 8 make an equal share. Who waits for everybody waits for most
steps; who does not finds a third of its workers stuck at any time. A matrix of seconds cannot tell this, for a stall
lasts over several steps: such fleets are played micro-batch by micro-batch (`rounds`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from paceline.simulate import play, rounds
from paceline.simulate.outcome import Floats, Outcome

PROBABILITY, FACTOR = 0.01, 50.0
MICRO_BATCHES = 8
WORKERS = 4
NOISE = rounds.stalling(PROBABILITY, FACTOR)


def machines(*, steps: int, workers: int, seed: int = 0) -> Floats:
    """Like machines of about one second, apart from the stalls: speeds within 2 %."""
    if steps < 1 or workers < 1:
        raise ValueError(f"a scenario has at least one step and one worker, not {steps} and {workers}")
    speeds = 0.02 * np.random.default_rng(seed).standard_normal(workers)
    return np.tile(np.exp(speeds), (steps, 1))


def alone(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """The limit: each worker alone under the same stalls, every micro-batch counted when it ends."""
    steps, workers = seconds.shape
    longer = (1 + PROBABILITY * (FACTOR - 1)) * math.exp(rounds.NOISE**2 / 2)
    length = play.all_busy_s(longer * seconds, play.costs(seconds, cost_s))
    none = np.zeros(steps)
    return Outcome("limit", workers, np.full(steps, float(workers)), length + overhead_s, none, none)
