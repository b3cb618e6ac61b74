"""The deadline of a step in which all work until it and everything finished counts.

From joint draws ``r_i^s`` of every worker's seconds per sample, worker i is expected to finish
``min(share_i, D / r_i^s)`` samples by D, and the deadline is the D with

    sum_i a_i * mean_s min(share_i, D / r_i^s) = total

where ``a_i`` is the part of its time that worker i is expected to be at work at all. A worker's pace says what it does
while it works. A stall of one micro-batch, a piece lost at the deadline, a worker that starts late because it was stuck
before: all of these lower the count and none of them is pace. So `Availability` learns from the steps with a deadline

    a_g = sum of samples counted / sum of samples expected        (both exponentially weighted, g a group of workers)

for two groups: workers that finished something when last seen before the plan, and workers that were *stuck*, that is,
finished nothing. So a fleet learns how likely a stuck worker is to come back in time, and any bias of the forecast is
taken out on the way.

>>> solve(np.array([[1.0, 2.0]]), 30, most=np.array([100.0, 100.0]))
20.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

PASSES = 60
"""Most steps of Newton's towards the deadline."""
KEEP = 0.95
"""Weight of the past in each step in which the group has anybody."""
PRIOR = ((0.99, 1.0), (0.05, 0.1))
"""Counted and expected before anything was seen, at work and stuck, in whole fleets' work: a worker at work nearly all
of its time, a stuck one half of it; the latter is soon forgotten."""
RANGE = (0.05, 2.0)


def solve(per_sample_s: Floats, total: int, *, most: Floats, at_work: Floats | float = 1.0) -> float:
    """Return the deadline in seconds by which ``total`` samples are expected, nobody doing more than ``most``.

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


class Availability:
    """The part of its time that a worker is at work: one ratio for those at work, one for those stuck."""

    def __init__(self) -> None:
        self._counted = np.array([counted for counted, _ in PRIOR])
        self._expected = np.array([expected for _, expected in PRIOR])

    @property
    def working(self) -> float:
        return float(self._ratio()[0])

    @property
    def stuck(self) -> float:
        return float(self._ratio()[1])

    def factors(self, stuck: Mask) -> Floats:
        """Return the factor of each worker."""
        return np.asarray(self._ratio()[stuck.astype(np.intp)])

    def observe(self, counted: Floats, expected: Floats, stuck: Mask) -> None:
        """Learn from a step with a deadline.

        ``counted`` are each worker's samples, ``expected`` those expected of it, ``stuck`` who was stuck before the
        plan.
        """
        total = float(expected.sum())
        if not total > 0:
            return
        for group, members in enumerate((~stuck, stuck)):
            if members.any():
                for sums, values in ((self._counted, counted), (self._expected, expected)):
                    sums[group] = KEEP * sums[group] + float(values[members].sum()) / total

    def _ratio(self) -> Floats:
        return np.asarray(np.clip(self._counted / np.maximum(self._expected, 1e-9), *RANGE))

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self._counted.tolist(), "expected": self._expected.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counted = np.array(state["counted"], dtype=np.float64)
        self._expected = np.array(state["expected"], dtype=np.float64)
