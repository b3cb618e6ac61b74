"""The small facts that travel with every round: one float64 vector, into which each worker writes its own slots.

Summing over the fleet leaves every worker's facts intact, because all others add zeros. The leader's next plan travels
in it too, so a plan costs no wait of its own.
"""

from __future__ import annotations

import math
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
    "factor",
    "divisor",
    "graph",
    "constants",
    "certain",
    "proportion",
    "terms",
    "loss",
    "squares",
    "wants_state",
    "nonfinite",
    "overflow",
    "ended",
    "fingerprint",
    "settings_digest",
    "updates",
    "modes",
    "buffers",
    "leaves",
    "changes",
)
"""The facts that each worker reports of its step: first those that the step's record has, then those for the round.

- ``weight``: how much its losses count in all: samples, or the tokens, pixels or class weights that they were divided
  by.
- ``unit``: items per sample, where weights are counts as they were read; -1 where these vary.
- ``kinds``: bits for how weights came about (step/losses/loss_weights.py).
- ``ratio``: the ratio between the counts of several means.
- ``factor``: a digest of the factors that means are multiplied by.
- ``divisor``: a digest of tensors that means are divided by.
- ``graph``, ``constants``, ``certain``: digests of the shape of a loss's graph and of the script's values in it.
- ``proportion``: the ratio of a count that was read to the weight that was given.
- ``terms``: a digest of the kinds of terms that a loss has.
- ``loss``: the weighted sum of the losses.
- ``squares``: the squared norm of the worker's own mean gradient times its weight, where the learning rate needs it.
- ``wants_state``: whether it is so far behind that it asks for a copy of a peer's state.
- ``nonfinite``: whether its gradients hold NaN or infinities, and no loss scale explains them.
- ``overflow``: whether they do under a GradScaler's loss scale: then all skip the update, and the scale shrinks.
- ``ended``: whether its stream has no more samples. In a local step of averages, what the first member of its group
  decides for all of them, as bits (averaging/combine.py).
- ``fingerprint``: a digest of its parameters, in steps in which replicas are compared; 0 in others.
- ``settings_digest``: a digest of its optimisers' rates and other settings; 0 where it has no optimiser.
- ``updates``: one more than the number of updates it made in the step before; 0 where it has none to report.
- ``modes``: a digest of which of its modules train, where that is compared.
- ``buffers``: a digest of the buffers that were set between the last round and its first micro-batch; 0 where none was.
- ``leaves``: whether it leaves after this step.
- ``changes``: whether it asks for the group to be re-formed after this step.
"""


_COLUMN = {name: number for number, name in enumerate(FIELDS)}

SUMS = 64
"""The number of different figures that ``step.add`` can sum."""
PLAN_HEAD = 8
"""The numbers of a plan before those of each worker; the last one belongs to the open step (`Header.write_count`)."""


def number_of(data: bytes) -> int:
    """Return a digest that a float64 holds exactly, also with 1 added to tell it from nothing.

    >>> number_of(b"the first step") == number_of(b"the first step") < 2**48
    True
    """
    return int.from_bytes(blake2b(data, digest_size=6).digest(), "big")


@dataclass(frozen=True)
class Layout:
    """The sizes and positions of the vector's parts."""

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
        """Return views of the vector: facts (worker x field), plan, sums, used parameters, counters."""
        facts, plan, sums, used, counters = (vector[part] for part in self._slices)
        return [facts.reshape(self.workers, len(FIELDS)), plan, sums.reshape(SUMS, 2), used, counters]


layout_of = lru_cache(maxsize=8)(Layout)
"""Makes a `Layout`; equal arguments give the same object."""


class Header:
    """One round's vector, being written (before the round) or read (after it)."""

    def __init__(self, layout: Layout) -> None:
        self.vector = layout.empty()
        self.facts, self._plan, self._sums, self.used, self.counters = layout.parts(self.vector)
        self._totals: list[float] | None = None

    def tensor(self) -> torch.Tensor:
        """Return the vector as a tensor, which shares memory with this header."""
        self._totals = None
        return torch.from_numpy(self.vector)

    def write(self, rank: int, **facts: float) -> None:
        own, self._totals = self.facts[rank], None
        for name, value in facts.items():
            own[_COLUMN[name]] = value

    def column(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.facts[:, _COLUMN[name]]

    def total(self, name: str) -> float:
        """Return the sum of a fact over the workers, after the round; the sums of all facts are computed once."""
        if self._totals is None:
            self._totals = self.facts.sum(axis=0).tolist()
        return self._totals[_COLUMN[name]]

    def unit(self) -> float:
        """Return the items per sample, by which this round's weights are divided to be samples.

        It is 1 unless weights are counts of items and every sample has as many.
        """
        units = set(self.column("unit").tolist()) - {0.0}
        unit = units.pop() if len(units) == 1 else 1.0
        return max(unit, 1.0)

    def differ(self, what: str = "fingerprint") -> bool:
        """Return whether workers reported unlike fingerprints of what they hold, or of their modes."""
        if not self.total(what):
            return False
        prints = self.column(what)
        return len(set(prints[prints > 0].tolist())) > 1

    @property
    def members_change(self) -> bool:
        """Whether the group is to be re-formed as soon as all workers are at one step boundary."""
        return self.total("leaves") > 0 or self.total("changes") > 0

    def write_plan(self, plan: Plan) -> None:
        count = len(plan.samples)
        forecast = np.full(count, np.nan) if plan.forecast_s is None else np.asarray(plan.forecast_s, dtype=float)
        deadline = -1.0 if plan.deadline_s is None else plan.deadline_s
        wait_for = 0 if plan.wait_for is None else plan.wait_for
        expects = -1 if plan.expects is None else plan.expects
        self._plan[: PLAN_HEAD - 1] = 1, plan.generation, plan.step, deadline, wait_for, expects, plan.least_count
        self._plan[PLAN_HEAD : PLAN_HEAD + count] = plan.samples
        self._plan[PLAN_HEAD + count :] = forecast

    def read_plan(self) -> Plan | None:
        numbers = self._plan.tolist()
        present, generation, step, deadline, wait_for, expects, least_count = numbers[: PLAN_HEAD - 1]
        if not present:
            return None
        count = (len(numbers) - PLAN_HEAD) // 2
        forecast = numbers[PLAN_HEAD + count :]
        return Plan(
            generation=int(generation),
            step=int(step),
            samples=tuple(map(int, numbers[PLAN_HEAD : PLAN_HEAD + count])),
            deadline_s=None if deadline < 0 else deadline,
            wait_for=int(wait_for) or None,
            expects=None if expects < 0 else int(expects),
            forecast_s=None if all(map(math.isnan, forecast)) else tuple(forecast),
            least_count=least_count,
        )

    def write_count(self, count: int) -> None:
        """Write, on the leader, with how many complete shares the open step closes."""
        self._plan[PLAN_HEAD - 1] = count

    @property
    def count(self) -> int | None:
        """The number of complete shares that closed the step, where the leader decided it while the step ran."""
        return int(self._plan[PLAN_HEAD - 1]) or None

    def add(self, slot: int, value: float) -> None:
        if slot >= SUMS:
            raise ValueError(f"step.add can carry {SUMS} different figures; this is one more")
        self._sums[slot] += value, 1

    def sums(self) -> dict[int, float]:
        """Return the fleet's sum of each figure that anybody added, by slot."""
        added = self._sums[:, 1]
        return {int(slot): float(self._sums[slot, 0]) for slot in np.flatnonzero(added)} if added.any() else {}
