"""The last micro-batch before a deadline: as large as the time left allows.

A micro-batch that is not finished when the round closes is lost, and delays its worker until it ends. So before each
one a worker asks what still fits, and stops when nothing does. Sizes come from a short ladder: every size is a shape
that kernels and caches meet again and again.

>>> ladder(16)
(16, 12, 8, 4, 2)
>>> fit(1.0, 0.1, ladder(16))
8
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

MARGIN = 0.1
"""Part by which a micro-batch may take longer than expected and still be in time: two standard deviations of the 5 % by
which micro-batches of one step scatter, so that one in forty is lost. Half of it would lose one in six, and a lost
micro-batch costs twice: what it took, and the delay of the next step."""
RECENT = 5
"""Micro-batches a worker's own pace is read from."""
RUNGS = (1.0, 0.75, 0.5, 0.25, 0.125)


def ladder(micro_batch: int) -> tuple[int, ...]:
    """Return the sizes to choose from, largest first: all, 3/4, 1/2, 1/4 and 1/8 of the micro-batch, at least 1."""
    if micro_batch < 1:
        raise ValueError(f"a micro-batch has at least one sample, not {micro_batch}")
    return tuple(sorted({max(1, int(part * micro_batch)) for part in RUNGS}, reverse=True))


def fit(time_left_s: float, seconds_per_sample: float, sizes: Sequence[int], *, margin: float = MARGIN) -> int:
    """Return the largest size with ``size * seconds_per_sample * (1 + margin) <= time_left_s``; 0 when none fits.

    An unknown pace (NaN, or not above 0) gives the smallest size: something must be tried to learn it.
    """
    return int(fit_all(np.array([time_left_s]), np.array([seconds_per_sample]), sizes, margin=margin)[0])


def fit_all(
    time_left_s: ArrayLike, seconds_per_sample: ArrayLike, sizes: Sequence[int], *, margin: float = MARGIN
) -> NDArray[np.int64]:
    """Return what `fit` does, for many workers at once."""
    rising = np.unique(np.array([0, *sizes], dtype=np.int64))
    if len(rising) < 2 or rising[0] < 0:
        raise ValueError(f"sizes are whole numbers of samples, at least one of them, not {list(sizes)}")
    left, pace = np.asarray(time_left_s, dtype=np.float64), np.asarray(seconds_per_sample, dtype=np.float64)
    known = pace > 0
    room = np.divide(
        left, pace * (1 + margin), out=np.full(np.broadcast(left, pace).shape, float(rising[1])), where=known
    )
    # A quotient such as 3 / 0.3 lies a hair below its whole number.
    largest = rising[np.searchsorted(rising, np.maximum(room, 0.0) * (1 + 1e-12), side="right") - 1]
    return np.where(left > 0, largest, 0)


def recent_pace(paces: Sequence[float]) -> float:
    """Return a worker's present seconds per sample: the median over its last micro-batches, robust to one stall."""
    return median(paces[-RECENT:]) if paces else float("nan")
