"""What all pacers share: each follows the workers' costs, so each can say what it expects of its own plan.

Those that plan by a forecast share how it is fed. Forecasts know workers by their column. `Followed` keeps them by
stable identity: when workers come or go it tells the forecast who went where. A worker that returns starts from what
was typical of it, a newcomer from the median of the others. A newcomer's first two times replace what is believed of
it: the first is often slowed by warming up. So does each time of a worker that looks for the size of its micro-batches,
and the first with another size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.pace.cost import SECONDS_RANGE, Costs, filled, median, resized
from paceline.pace.forecast import Floats, Forecast, Mask, Seen
from paceline.pace.ledger import Ledger
from paceline.pace.pacer import Ask, Pacer
from paceline.pace.shares import Bound, Ints, clipped, each
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
    wanted = np.maximum(each(ask.minimum, len(ask.workers)), each(minimum, len(ask.workers)))
    units, least = ask.total // ask.unit, -(-wanted // ask.unit)
    if least.sum() > units:
        least = least * units // least.sum()
    return least * ask.unit


def caps(ask: Ask, maximum: Bound | None = None) -> Ints | None:
    """Return everybody's maximum, in samples; None when there is none."""
    bounds = [each(bound, len(ask.workers)) for bound in (ask.maximum, maximum) if bound is not None]
    return np.minimum.reduce(bounds) if bounds else None


def made_to_hold(high: Ints, ask: Ask) -> Ints:
    """Return the maximums, raised in proportion, to whole units, where they hold less than the step."""
    if int((high // ask.unit).sum()) >= -(-ask.total // ask.unit):
        return high
    raised = -(-high * ask.total // high.sum()) if high.any() else np.full_like(high, ask.total)
    return -(-raised // ask.unit) * ask.unit


DRAWS = 32
"""Joint samples of a forecast that a plan is made from."""
NO_BOUND = 1e-6
"""Part of what is believed: nothing was learned about a worker known only to be slower than that."""
SETTLING = 2
"""Times of a newcomer that say all there is to know about it."""
TYPICAL_RATE = 0.3
"""Weight of the newest step in what is typical of a worker."""


Numbers = tuple[float, ...] | tuple[int, ...]


def column(values: Numbers, count: int) -> Floats:
    """Return a record's numbers as an array, within what is possible; 0 where it has none, or no numbers."""
    return np.asarray(columns((values,), count)[0])


def columns(facts: Sequence[Numbers], count: int) -> Floats:
    """Return several facts of a record likewise, one row for each."""
    found = np.array([values if len(values) == count else (0.0,) * count for values in facts], dtype=np.float64)
    return np.where(np.isfinite(found) & (found > 0), clipped(found, *SECONDS_RANGE), 0.0)


def steps_ahead(planned: int, observed: int) -> int:
    """Return how far ahead of the last observed step a plan looks: 2 at most, and 1 where that is not known."""
    return 2 if 0 <= observed < planned - 1 else 1


class Followed:
    """A forecast, and the workers whose columns it has."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.workers: tuple[int, ...] = ()
        self._blank = forecast.state_dict()
        self._ledger = _new_ledger()

    def typical(self, workers: tuple[int, ...]) -> Floats:
        """Return each worker's running mean of what was seen of it; 0 for one never seen."""
        return self._ledger.look_up("typical", workers)

    def observe(self, workers: tuple[int, ...], seconds: Floats, late: Mask, *, sizes: tuple[int, ...] = ()) -> None:
        """Learn from a step: each worker's seconds; where ``late``, a bound it exceeded, 0 when nothing was learned.

        ``sizes`` are those of the micro-batches, where the record has them.
        """
        measured = ~late
        if not self.workers and not measured.any():
            return
        self._ledger.arrange(workers)
        typical, settling = self._ledger["typical"], self._ledger["settling"]
        if not self.workers:
            settling[:] = 0.0  # they all begin together, so nobody looks slow beside the others
        np.copyto(settling, 1.0, where=resized(sizes, measured, self._ledger["size"]) & (settling == 0))
        anew = measured & (settling > 0)
        known = (typical > 0) & ~anew
        if workers == self.workers and known.all() and measured.all():  # as mostly
            self.forecast.observe(Seen(seconds, late))
            typical += TYPICAL_RATE * (seconds - typical)
            return
        believed = filled(np.where(known, typical, np.where(measured, seconds, 0.0)))
        self._regroup(workers, believed, anew)
        # One never measured stands at the others' median, so that no forecast starts from a bound that says nothing.
        low = np.where(typical > 0, NO_BOUND * believed, believed)
        bound = late & ((typical > 0) | (seconds > low))
        self.forecast.observe(Seen(np.where(late, np.maximum(seconds, low), seconds), bound))
        np.copyto(typical, np.where(known, typical + TYPICAL_RATE * (seconds - typical), seconds), where=measured)
        settling -= anew

    def draws(self, workers: tuple[int, ...], rows: int, rng: np.random.Generator, *, ahead: int = 1) -> Floats | None:
        """Draw joint samples for any workers, in their order; None before anything was observed.

        They are of the step ``ahead`` steps after the last one observed, or of the next, from a forecast that looks no
        further.
        """
        if not self.workers:
            return None
        self.forecast.look_ahead(ahead)
        drawn = self.forecast.draw(rows, rng)
        if workers == self.workers:
            return drawn
        middle = median(drawn)[:, None]
        typical = self.typical(workers)
        absent = middle * np.where(typical > 0, typical / middle.mean(), 1.0)
        known = self._columns(workers)
        return np.where(known < 0, absent, drawn[:, known])

    def restart(self) -> None:
        """Forget everything."""
        self.workers = ()
        self.forecast.load_state_dict(self._blank)
        self._ledger = _new_ledger()

    def _regroup(self, workers: tuple[int, ...], believed: Floats, anew: Mask) -> None:
        """Rearrange the forecast for these workers; those ``anew`` start from what is believed of them."""
        if self.workers and (workers != self.workers or anew.any()):
            self.forecast.rearrange(np.where(anew, -1, self._columns(workers)).tolist(), believed)
        self.workers = workers

    def _columns(self, workers: tuple[int, ...]) -> NDArray[np.intp]:
        """Return the forecast's column of each worker; -1 where it has none."""
        position = {worker: index for index, worker in enumerate(self.workers)}
        return np.array([position.get(worker, -1) for worker in workers], dtype=np.intp)

    def state_dict(self) -> dict[str, Any]:
        return {
            "workers": list(self.workers),
            "forecast": self.forecast.state_dict(),
            "typical": self._ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; from one that another kind of forecast saved, what was typical of each worker."""
        self.workers = tuple(int(worker) for worker in state["workers"])
        self._ledger.load_state_dict(state["typical"])
        try:
            self.forecast.load_state_dict(state["forecast"])
        except (KeyError, TypeError):
            self.forecast.load_state_dict(self._blank)
            if self.workers:
                self.forecast.observe(Seen.whole(filled(self.typical(self.workers))))


def _new_ledger() -> Ledger:
    return Ledger(typical=0.0, settling=float(SETTLING), size=0.0)
