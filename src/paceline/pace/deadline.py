"""The deadline of a step in which all work until it and everything finished counts.

From joint draws ``r_i^s`` of every worker's seconds a sample, worker i is expected to finish
``min(share_i, D / r_i^s)`` samples by D, and the deadline is the D with

    sum_i a_i * mean_s min(share_i, D / r_i^s) = total

where ``a_i`` is the part of its time that worker i is expected to be at work at all (see `availability`).

>>> solve(np.array([[1.0, 2.0]]), 30, most=np.array([100.0, 100.0]))
20.0
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PASSES = 60


def expected_count(deadline_s: float, per_sample_s: Floats, shares: Floats, *, at_work: Floats | float = 1.0) -> float:
    """Samples finished by the deadline, on average over the draws (a row each)."""
    return float((at_work * np.minimum(shares, deadline_s / per_sample_s).mean(axis=0)).sum())


def solve(per_sample_s: Floats, total: int, *, most: Floats, at_work: Floats | float = 1.0) -> float:
    """The deadline in seconds by which ``total`` samples are expected, nobody doing more than ``most``.

    The expected count is concave in D, and linear until somebody's ``most`` binds; Newton's steps from the linear
    answer climb to the exact one. Where ``most`` is too small for the total, the deadline is when all are expected to
    be done.
    """
    speed = 1 / per_sample_s
    deadline_s = total / float((at_work * speed.mean(axis=0)).sum())
    for _ in range(PASSES):
        done = deadline_s * speed
        missing = total - float((at_work * np.minimum(most, done).mean(axis=0)).sum())
        slope = float((at_work * np.where(done < most, speed, 0.0).mean(axis=0)).sum())
        if missing <= 1e-9 * total:
            return deadline_s
        if slope <= 0:
            return float((most * per_sample_s).mean(axis=0).max())
        deadline_s += missing / slope
    return deadline_s
