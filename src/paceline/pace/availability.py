"""How much of its time a worker is at work: counted over expected samples, learned from the steps with a deadline.

A worker's pace says what it does while it works. A stall of one micro-batch, a piece lost at the deadline, a worker
that starts late because it was stuck before: all of these lower the count and none of them is pace. So the expected
count is multiplied by

    a_g = sum of samples counted / sum of samples expected        (both exponentially weighted, g a group of workers)

for two groups: workers that finished something when last seen before the plan, and workers that were *stuck*, that is,
finished nothing. So a fleet learns how likely a stuck worker is to come back in time, and any bias of the forecast is
taken out on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

KEEP = 0.95
"""Weight of the past in each step in which the group has anybody."""
PRIOR = ((0.99, 1.0), (0.05, 0.1))
"""Counted and expected before anything was seen, at work and stuck, in whole fleets' work: a worker at work nearly all
of its time, a stuck one half of it; the latter is soon forgotten."""
RANGE = (0.05, 2.0)


class Availability:
    """The two ratios."""

    def __init__(self) -> None:
        self._counted = np.array([counted for counted, _ in PRIOR])
        self._expected = np.array([expected for _, expected in PRIOR])

    @property
    def working(self) -> float:
        return float(self._ratio()[0])

    @property
    def stuck(self) -> float:
        return float(self._ratio()[1])

    def of(self, stuck: Mask) -> Floats:
        """The factor of each worker."""
        return np.asarray(self._ratio()[stuck.astype(np.intp)])

    def observe(self, counted: Floats, expected: Floats, stuck: Mask) -> None:
        """One step with a deadline: each worker's samples, those expected of it, and who was stuck before the plan."""
        whole = float(expected.sum())
        if not whole > 0:
            return
        for group, members in enumerate((~stuck, stuck)):
            if members.any():
                for sums, values in ((self._counted, counted), (self._expected, expected)):
                    sums[group] = KEEP * sums[group] + float(values[members].sum()) / whole

    def _ratio(self) -> Floats:
        return np.asarray(np.clip(self._counted / np.maximum(self._expected, 1e-9), *RANGE))

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self._counted.tolist(), "expected": self._expected.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counted = np.array(state["counted"], dtype=np.float64)
        self._expected = np.array(state["expected"], dtype=np.float64)
