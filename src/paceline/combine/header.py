"""The small facts that ride in every round: one float64 vector, into which each worker writes its own slots.

Summing over the fleet leaves every worker's facts intact, because all others add zeros. The leader's next plan rides
in it too, so a plan costs no wait of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from paceline.records import REPORTED, Plan

FIELDS = (
    *REPORTED,
    "weight",
    "unit",
    "kinds",
    "ratio",
    "loss",
    "squares",
    "wants_state",
    "nonfinite",
    "overflow",
    "ended",
    "fingerprint",
    "rates",
    "updates",
    "modes",
    "leaves",
    "changes",
)
"""What each worker says of its step: first what the step's record has of it, then what the round is run by.

``unit``, where weights are counts as they were read: items per sample, -1 where these vary; ``kinds``: bits that say
how weights came about (loop/loss_weights.py); ``ratio``: between counts of several means; ``loss`` is the weighted sum;
``squares``: its own mean gradient's squared norm times its weight, where the learning
rate needs it; ``ended``: its stream has no more samples; ``rates``: a digest of its optimisers' rates and other
settings, 0 where it knows none; ``updates``: one more than the updates it made in the step before, 0 where it knows
of none; ``modes``: a digest of which of its modules train, where that is compared; ``wants_state``: it is so far
behind that it asks for a copy of a peer's state;
``leaves``: it leaves after this step; ``changes``: it has heard that the group is to be re-formed, with others."""


def number_of(data: bytes) -> int:
    """Return a digest that a float64 holds exactly, also with 1 added to tell it from nothing.

    >>> number_of(b"the first step") == number_of(b"the first step") < 2**48
    True
    """
    return int.from_bytes(blake2b(data, digest_size=6).digest(), "big")


_COLUMN = {name: number for number, name in enumerate(FIELDS)}

SUMS = 64
"""How many figures ``step.add`` can carry."""
PLAN_HEAD = 7


@dataclass(frozen=True)
class Layout:
    """Where everything stands in the vector."""

    workers: int
    parameters: int
    counters: int

    @property
    def sizes(self) -> tuple[int, ...]:
        plan = PLAN_HEAD + 2 * self.workers
        return self.workers * len(FIELDS), plan, 2 * SUMS, self.parameters, self.counters

    def empty(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.zeros(sum(self.sizes))

    @cached_property
    def _slices(self) -> list[slice]:
        ends = list(accumulate(self.sizes))
        return [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def parts(self, vector: np.ndarray[Any, np.dtype[np.float64]]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """Views of the vector: facts (worker x field), plan, sums, used parameters, counters."""
        facts, plan, sums, used, counters = (vector[part] for part in self._slices)
        return [facts.reshape(self.workers, len(FIELDS)), plan, sums.reshape(SUMS, 2), used, counters]


layout_of = lru_cache(maxsize=8)(Layout)
"""The same one for the same numbers."""


class Header:
    """One round's vector, being written (before the round) or read (after it)."""

    def __init__(self, layout: Layout) -> None:
        self.vector = layout.empty()
        self.facts, self._plan, self._sums, self.used, self.counters = layout.parts(self.vector)
        self._totals: list[float] | None = None

    def tensor(self) -> torch.Tensor:
        """The vector for the wire, which shares memory with this header."""
        self._totals = None
        return torch.from_numpy(self.vector)

    def write(self, rank: int, **facts: float) -> None:
        own, self._totals = self.facts[rank], None
        for name, value in facts.items():
            own[_COLUMN[name]] = value

    def column(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.facts[:, _COLUMN[name]]

    def total(self, name: str) -> float:
        """Over the workers. After the round: it is worked out once, for all facts."""
        if self._totals is None:
            self._totals = self.facts.sum(axis=0).tolist()
        return self._totals[_COLUMN[name]]

    def unit(self) -> float:
        """By what the weights of this round are divided to be samples, where they are counts of items and every sample
        has as many; else 1."""
        units = set(self.column("unit").tolist()) - {0.0}
        unit = units.pop() if len(units) == 1 else 1.0
        return max(unit, 1.0)

    def write_plan(self, plan: Plan) -> None:
        count = len(plan.samples)
        forecast = np.full(count, np.nan) if plan.forecast_s is None else np.asarray(plan.forecast_s, dtype=float)
        deadline = -1.0 if plan.deadline_s is None else plan.deadline_s
        wait_for = 0 if plan.wait_for is None else plan.wait_for
        expects = -1 if plan.expects is None else plan.expects
        self._plan[:PLAN_HEAD] = 1, plan.generation, plan.step, deadline, wait_for, expects, plan.least_count
        self._plan[PLAN_HEAD : PLAN_HEAD + count] = plan.samples
        self._plan[PLAN_HEAD + count :] = forecast

    def read_plan(self) -> Plan | None:
        present, generation, step, deadline, wait_for, expects, least_count = self._plan[:PLAN_HEAD]
        if not present:
            return None
        count = (len(self._plan) - PLAN_HEAD) // 2
        samples, forecast = self._plan[PLAN_HEAD : PLAN_HEAD + count], self._plan[PLAN_HEAD + count :]
        return Plan(
            generation=int(generation),
            step=int(step),
            samples=tuple(map(int, samples.tolist())),
            deadline_s=None if deadline < 0 else float(deadline),
            wait_for=int(wait_for) or None,
            expects=None if expects < 0 else int(expects),
            forecast_s=None if np.isnan(forecast).all() else tuple(forecast.tolist()),
            least_count=float(least_count),
        )

    def add(self, slot: int, value: float) -> None:
        if slot >= SUMS:
            raise ValueError(f"step.add can carry {SUMS} different figures; this is one more")
        self._sums[slot] += value, 1

    def sums(self) -> dict[int, float]:
        """By slot: the fleet's sum of each figure that anybody added."""
        added = self._sums[:, 1]
        return {int(slot): float(self._sums[slot, 0]) for slot in np.flatnonzero(added)} if added.any() else {}
