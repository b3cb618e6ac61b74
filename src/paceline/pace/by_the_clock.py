"""Periods of local steps by the clock: how much is dealt for one, and when it is over. The simulator uses them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace.shares import proportional

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

GENEROUS = 1.4
"""Factor by which more is dealt for a period than a worker did in the last one, so that nobody runs out."""
FIRST_STEPS = 4
"""Local steps dealt for the first period by the clock, while nobody's speed is known."""


def by_the_clock(
    groups: Sequence[Sequence[int]], *, batch: int, speeds: Floats, rates: Floats, period_s: float
) -> tuple[Ints, Ints]:
    """Return the samples to deal to each worker for a period of ``period_s`` seconds, and for one local step.

    ``batch`` is one worker's part of the global batch if all had the same; a group's local step has as many times that
    as it has members, divided in proportion to their ``speeds`` (samples per second of their own work; 0: not known).
    ``rates`` are samples per second in local steps, waiting for the group included.

    >>> one, three = np.array([10.0, 10, 10]), np.array([3.0, 1, 2])
    >>> [part.tolist() for part in by_the_clock([[0, 1], [2]], batch=4, speeds=three, rates=one, period_s=2.0)]
    [[42, 14, 28], [6, 2, 4]]
    """
    batches, shares = np.full(len(speeds), batch), np.zeros(len(speeds), dtype=np.int64)
    for group in groups:
        members, together = list(group), batch * len(group)
        if (speeds[members] > 0).all():
            batches[members] = proportional(speeds[members], together, minimum=1)
        shares[members] = steps_dealt(rates[members].sum(), together, period_s) * batches[members]
    return shares, batches


def steps_dealt(rates: ArrayLike, batch: int, period_s: float) -> Ints:
    """Return the local steps of ``batch`` samples to deal for a period.

    ``rates`` are samples per second; 0 where not known.

    >>> steps_dealt([0.0, 0.1, 10.0], 4, 2.0).tolist()
    [4, 1, 7]
    """
    known = np.asarray(rates, dtype=np.float64)
    steps = np.maximum(1, np.ceil(GENEROUS * known * period_s / batch))
    return np.where(known > 0, steps, FIRST_STEPS).astype(np.int64)


@overload
def time_is_up(elapsed_s: float, steps: int, period_s: float) -> bool: ...


@overload
def time_is_up(elapsed_s: Floats, steps: Ints, period_s: float) -> Mask: ...


def time_is_up(elapsed_s: Floats | float, steps: Ints | int, period_s: float) -> Mask | bool:
    """Return whether the round comes now: this local step ends nearer to the period's end than the next would.

    >>> time_is_up(4.0, 4, 4.6), time_is_up(4.0, 4, 4.4)
    (False, True)
    """
    return elapsed_s + elapsed_s / steps / 2 >= period_s
