"""What all pacers share: each follows the workers' costs, so each can say what it expects of its own plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from paceline.pace.cost import Costs
from paceline.pace.pacer import Ask, Pacer
from paceline.pace.shares import Bound, Ints
from paceline.records import Plan, StepRecord

T = TypeVar("T")


class Forecasting(Pacer):
    """Base of the pacers: learns costs from records and puts a forecast beside every plan's shares."""

    def __init__(self) -> None:
        self._costs = Costs()

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for this number of workers."""
        if workers < 1:
            raise ValueError(f"a fleet needs at least one worker, not {workers}")

    def observe(self, record: StepRecord) -> None:
        """Learn each worker's cost per sample from a step's record."""
        self._costs.observe(record)

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data."""
        return {"costs": self._costs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another pacer of this kind had learned."""
        self._costs.load_state_dict(state["costs"])

    def _answer(self, ask: Ask, shares: Ints) -> Plan:
        return Plan(
            generation=ask.generation,
            step=ask.step,
            samples=tuple(shares.tolist()),
            forecast_s=self._costs.forecast_s(ask.workers, shares),
        )


def by_identity(values: Sequence[T], workers: tuple[int, ...], *, beyond: T) -> list[T]:
    """Return the settings of these workers: worker i has the i-th; one beyond the list has ``beyond``.

    >>> by_identity([1, 1, 2], (2, 0, 7), beyond=9)
    [2, 1, 9]
    """
    return [values[worker] if worker < len(values) else beyond for worker in workers]


def floors(ask: Ask, minimum: Bound = 0) -> Ints:
    """Return everybody's minimum, in samples (whole units); cut in proportion where the step is too small for all.

    The tail of an epoch may be shorter than the sum of the minimums, so a minimum is a wish; a maximum is not.
    """
    wanted = np.maximum(
        *(np.broadcast_to(np.asarray(bound, np.int64), len(ask.workers)) for bound in (ask.minimum, minimum))
    )
    units, least = ask.total // ask.unit, -(-wanted // ask.unit)
    if least.sum() > units:
        least = least * units // least.sum()
    return least * ask.unit


def caps(ask: Ask, maximum: Bound | None = None) -> Ints | None:
    """Return everybody's maximum, in samples; None when there is none."""
    bounds = [
        np.broadcast_to(np.asarray(b, np.int64), len(ask.workers)) for b in (ask.maximum, maximum) if b is not None
    ]
    return np.minimum.reduce(bounds) if bounds else None


def made_to_hold(high: Ints, ask: Ask) -> Ints:
    """Return the maximums, raised in proportion, to whole units, where they hold less than the step."""
    if int((high // ask.unit).sum()) >= -(-ask.total // ask.unit):
        return high
    raised = -(-high * ask.total // high.sum()) if high.any() else np.full_like(high, ask.total)
    return -(-raised // ask.unit) * ask.unit
