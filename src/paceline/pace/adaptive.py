"""Shares that follow the measured speed step by step (P1's self-adaptive allocation, reconstructed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.cost import Belief, Floats, put
from paceline.pace.forecasting import Forecasting, by_identity, caps, floors, made_to_hold
from paceline.pace.ledger import Ledger
from paceline.pace.pacer import Ask, Traits
from paceline.pace.shares import Ints, fill, level
from paceline.records import Plan, StepRecord

PROBED_PART = 8
"""One in this many units of a step, at most, goes to workers that are only tried."""
FIRST_WAIT = 8.0
"""Steps from the last time a worker was seen to its first turn; also the steps of work that earn a free one."""
RETRY = 2.0
"""Steps until a turn that was not taken comes again: the plan for the next step is already made."""


class Adaptive(Forecasting):
    """Shares with which all finish together: ``min max_i (a_i + b_i * n_i)``, by the costs learned from the records.

    Plans are made from a *held* belief. Every ``every`` steps it is compared with the present one, and replaced when
    that lowers the predicted step time by more than the fraction ``dead_band``; at once when a worker's speed jumped or
    the members changed. So shares rest while there is nothing to gain, whatever the lag between plan and record, and a
    plan for the short tail of an epoch is just another total put to the same belief.

    ``minimum`` and ``maximum`` bound the shares in samples (one number, or one per worker); ``minimum=0`` lets a worker
    too slow to help sit out. ``probe`` is the fraction of time that may be spent on trying such workers again.

    In a fleet whose members change, the i-th bound is that of worker i, and one beyond the list has the loosest of
    them; where the maximums of those that are left hold less than the step, they are raised in proportion.
    """

    name = "adaptive"
    """Name in ``pace=``, the log and checkpoints."""
    traits = Traits(follows_speed=True, if_stalled="joint")
    """Facts of it for reports and the simulator."""

    def __init__(
        self,
        *,
        every: int = 1,
        dead_band: float = 0.02,
        minimum: int | Sequence[int] = 0,
        maximum: int | Sequence[int] | None = None,
        probe: float = 0.01,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        if not 0 <= dead_band < 1 or not 0 <= probe < 1:
            raise ValueError(f"dead_band and probe are fractions from 0 to below 1, not {dead_band} and {probe}")
        self.every, self.dead_band, self.probe = every, dead_band, probe
        self.minimum, self.maximum = _bound("minimum", minimum), None if maximum is None else _bound("maximum", maximum)
        if self.maximum is not None and _crossed(self.minimum, self.maximum):
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}")
        self._probes = Probes(budget=probe)
        self._held: Belief | None = None
        self._total = 0
        self._kept: tuple[Belief, int, NDArray[np.float64]] | None = None
        """The held belief, a number of samples, and their real-valued shares by that belief."""
        self._filled: tuple[Belief, tuple[Any, ...], Ints] | None = None
        """The last shares in which nobody sat out, and what they were made from."""

    def check(self, workers: int) -> None:
        super().check(workers)
        for name, bound in (("minimum", self.minimum), ("maximum", self.maximum)):
            if isinstance(bound, tuple) and len(bound) != workers:
                raise ValueError(
                    f"{name} has {len(bound)} numbers for {workers} workers: give one for each, or one for all"
                )

    def floors(self, ask: Ask) -> Ints:
        """Return everybody's minimum in samples, as far as the step holds them."""
        return floors(ask, _bounds_of(self.minimum, ask.workers, min))

    def caps(self, ask: Ask) -> Ints | None:
        """Return everybody's maximum in samples; None when there is none."""
        high = caps(ask, None if self.maximum is None else _bounds_of(self.maximum, ask.workers, max))
        return made_to_hold(high, ask) if high is not None and self._costs.misses(ask.workers) else high

    def observe(self, record: StepRecord) -> None:
        jumped = self._costs.observe(record)
        self._probes.observe(record)
        # A tail is shorter than a full step; what pays is judged by full steps.
        self._total = max(self._total, sum(record.planned))
        present = self._costs.belief()
        held = self._held
        rearmed = held is None or held.workers != present.workers or bool(jumped.any())
        if rearmed or ((record.step + 1) % self.every == 0 and self._gains(held, present)):
            self._held = present

    def plan(self, ask: Ask) -> Plan:
        """Return the shares with which all are expected to finish together."""
        belief, asked = self._belief(ask.workers), (ask.workers, ask.total, ask.unit, ask.minimum, ask.maximum)
        if self._filled is not None and self._filled[0] is belief and self._filled[1] == asked:
            return self._answer(ask, self._filled[2])
        low, high = self.floors(ask), self.caps(ask)
        high = _within(belief.most, ask, low, high)
        shares = _fill(belief, ask, low, high)
        if shares.all():
            self._filled = belief, asked, shares
            return self._answer(ask, shares)
        tried = self._tried(ask, belief, shares, low, high)
        if tried.any():
            low = np.where(tried, ask.unit, low)
            shares = _fill(belief, ask, low, np.where(tried, ask.unit, ask.total if high is None else high))
        return self._answer(ask, shares)

    def _belief(self, workers: tuple[int, ...]) -> Belief:
        if self._held is not None and (workers is self._held.workers or workers == self._held.workers):
            return self._held
        return self._costs.belief(workers)

    def _gains(self, held: Belief | None, present: Belief) -> bool:
        """Return whether shares by the present belief beat those by the held one by more than the dead-band."""
        assert held is not None
        if self._kept is None or self._kept[0] is not held or self._kept[1] != self._total:
            self._kept = held, self._total, _split(held, self._total)[0]
        _, best_s = _split(present, self._total)
        return best_s < float(present.seconds(self._kept[2]).max()) * (1 - self.dead_band)

    def _tried(self, ask: Ask, belief: Belief, shares: Ints, low: Ints, high: Ints | None) -> NDArray[np.bool_]:
        """Return who is to be tried, one unit each, of those that would sit out.

        These are the workers about whom a single measurement decided that, and those whose turn to be tried again has
        come.
        """
        tried = np.zeros(len(shares), dtype=np.bool_)
        idle = shares == 0 if high is None else (shares == 0) & (high >= ask.unit)
        if not idle.any() or ask.total < self._total:
            return tried
        step_s = float(belief.seconds(shares).max())
        added_s = belief.fixed_s + belief.per_sample_s * ask.unit - step_s
        due = np.flatnonzero(belief.doubtful)
        if self.probe:
            due = np.concatenate([due, self._probes.due(ask.workers, ask.step, added_s, step_s)])
        units = ask.total // ask.unit
        room = min(max(1, units // PROBED_PART), units - int(low.sum()) // ask.unit)
        tried[due[idle[due]][:room]] = True
        return tried

    def state_dict(self) -> dict[str, Any]:
        held = None if self._held is None else _to_state(self._held)
        return {**super().state_dict(), "probes": self._probes.state_dict(), "held": held, "total": self._total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._probes.load_state_dict(state["probes"])
        self._held = None if state["held"] is None else _from_state(state["held"])
        self._total = int(state["total"])

    def __repr__(self) -> str:
        names = ("every", "dead_band", "minimum", "maximum", "probe")
        return f"Adaptive({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _bound(name: str, bound: int | Sequence[int]) -> int | tuple[int, ...]:
    values = (bound,) if isinstance(bound, int) else tuple(bound)
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"{name} must be a whole number of samples, at least 0, or one for each worker, not {bound!r}")
    return bound if isinstance(bound, int) else values


def _crossed(minimum: int | tuple[int, ...], maximum: int | tuple[int, ...]) -> bool:
    """Return whether anybody's minimum is above its maximum."""
    named = max(len(bound) if isinstance(bound, tuple) else 1 for bound in (minimum, maximum))
    workers = tuple(range(named))
    return bool(np.any(_bounds_of(minimum, workers, min) > _bounds_of(maximum, workers, max)))


def _bounds_of(
    bound: int | tuple[int, ...], workers: tuple[int, ...], loosest: Callable[[tuple[int, ...]], int]
) -> Ints:
    if isinstance(bound, int):
        return np.full(len(workers), bound, dtype=np.int64)
    return np.array(by_identity(bound, workers, beyond=loosest(bound)), dtype=np.int64)


def _fill(belief: Belief, ask: Ask, low: Ints, high: Ints | None) -> Ints:
    return fill(belief.fixed_s, belief.per_sample_s, ask.total, unit=ask.unit, minimum=low, maximum=high)


def _within(most: NDArray[np.float64], ask: Ask, low: Ints, high: Ints | None) -> Ints | None:
    """Return the maximum, tightened to parts ``most`` of the step where everything still fits."""
    units = np.ceil(most * (ask.total / ask.unit)).astype(np.int64)
    tight = np.maximum(units * ask.unit if high is None else np.minimum(units * ask.unit, high), low)
    return tight if int((tight // ask.unit).sum()) >= -(-ask.total // ask.unit) else high


def _split(belief: Belief, total: int) -> tuple[NDArray[np.float64], float]:
    """Return the best real-valued shares of ``total`` and the seconds they take."""
    rate = 1 / belief.per_sample_s
    none = np.zeros_like(rate)
    best_s = level(belief.fixed_s, rate, total, none, none + total)
    return np.maximum((best_s - belief.fixed_s) * rate, 0.0), best_s


def _to_state(belief: Belief) -> dict[str, Any]:
    return {
        "workers": list(belief.workers),
        "fixed_s": belief.fixed_s.tolist(),
        "per_sample_s": belief.per_sample_s.tolist(),
        "known": belief.known.tolist(),
        "most": belief.most.tolist(),
        "doubtful": belief.doubtful.tolist(),
    }


def _from_state(state: Mapping[str, Any]) -> Belief:
    return Belief(
        tuple(state["workers"]),
        np.array(state["fixed_s"], dtype=np.float64),
        np.array(state["per_sample_s"], dtype=np.float64),
        np.array(state["known"], dtype=np.bool_),
        np.array(state["most"], dtype=np.float64),
        np.array(state["doubtful"], dtype=np.bool_),
    )


class Probes:
    """The turns of workers that sit out, by stable identity: at waits that double, and never at a price that shows.

    A worker too slow to help gets no samples, so nothing more is learned about it; it may have become fast again. Now
    and then it is therefore given one unit, and let in if that shows it helps. Its first turn comes 8 steps after it
    was last seen, and every turn taken in vain doubles the wait. A turn is taken only when the seconds it is expected
    to add to the step are at most the fraction ``budget`` of the time since the worker was last seen and since anybody
    was last tried, so all tries together cost about that fraction. The exception is the first turn of a worker that had
    been working: it is more likely to have stalled than to have become useless.

    Changed by records alone, so a plan asks without changing anything.
    """

    def __init__(self, *, budget: float) -> None:
        self.budget = budget
        self._ledger = Ledger(seen=-1.0, turn=-1.0, wait=FIRST_WAIT, tenure=0.0)
        self._last_try = -1

    def observe(self, record: StepRecord) -> None:
        """Note who was seen, and set the next turn of those who sat out or had their turn in this step."""
        book, step = self._ledger, float(record.step)
        book.arrange(record.workers)
        worked = np.fromiter(record.samples, dtype=np.float64, count=len(record.workers)) > 0
        tried = worked & (book["turn"] == step)
        regular = worked & ~tried
        if not regular.all():
            self._last_try = record.step if tried.any() else self._last_try
            put(book["wait"], tried, 2 * np.maximum(book["wait"], step - book["seen"]))
            put(book["turn"], tried, step + book["wait"])
            put(book["tenure"], tried, 0.0)
            put(book["turn"], ~worked & (book["turn"] >= 0) & (book["turn"] <= step), step + RETRY)
            put(book["turn"], ~worked & (book["turn"] < 0), step + book["wait"])
        put(book["turn"], regular, -1.0)
        put(book["wait"], regular, FIRST_WAIT)
        put(book["tenure"], regular, book["tenure"] + 1)
        put(book["seen"], worked | (book["seen"] < 0), step)

    def due(self, workers: tuple[int, ...], step: int, added_s: Floats, step_s: float) -> NDArray[np.intp]:
        """Return the indices of those whose turn comes in this step, the longest unseen first.

        ``added_s`` is what each would add to a step of ``step_s`` seconds.
        """
        seen, turn, wait, tenure = (self._ledger.look_up(name, workers) for name in ("seen", "turn", "wait", "tenure"))
        affordable = added_s <= self.budget * step_s * (step - np.maximum(seen, self._last_try))
        free = (tenure >= FIRST_WAIT) & (wait == FIRST_WAIT)
        due = np.flatnonzero((turn == step) & (affordable | free))
        return due[np.argsort(seen[due], kind="stable")]

    def state_dict(self) -> dict[str, Any]:
        return {**self._ledger.state_dict(), "last_try": self._last_try}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state)
        self._last_try = int(state["last_try"])
