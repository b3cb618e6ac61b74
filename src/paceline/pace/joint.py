"""Shares and deadline together: more is dealt than needed, all work until one deadline, all finished work counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.pace.adaptive import Adaptive
from paceline.pace.cost import resized
from paceline.pace.forecast import Floats, Forecast, Learner, Mask, make
from paceline.pace.forecasting import DRAWS, TYPICAL_RATE, Followed, columns, floors, steps_ahead
from paceline.pace.ledger import Ledger
from paceline.pace.pacer import Ask, Pacer, Simulated, Traits
from paceline.pace.shares import Ints, clipped, proportional
from paceline.pace.steering import Gain
from paceline.records import Plan, StepRecord

GENEROUS = 1.25
"""Factor by which more is dealt than a worker would do by the deadline at its best.

Nobody should run out of samples, and what stays undone costs nothing, for it stays in the worker's queue.
"""
REGROW = 1.02
"""A worker's best pace is the fastest one seen, forgotten by this factor per step."""
SLOWEST = 4.0
"""Times the typical pace beyond which no pace is believed: beyond lies a stall."""
FASTEST = 8.0
"""Times below the mean beyond which no pace is believed: a wide belief's fast end is no promise."""
LAST_SLACK = 1.1
"""The deadline of an epoch's last step over the time it should take. What is not done by then is dealt again at once to
those that are free, so nothing is gained by waiting longer, or by guessing who will be stuck."""
YOUNG = 3
"""Steps of every worker before the gain is judged: adaptive needs two to find its shares."""
STALL = 2.0
"""Times a usual micro-batch beyond which an unfinished one is a stall and no mere remainder."""
MOST_WAIT = 2.0
"""Deadlines that count at most as waiting for a late worker: how long it would have taken is not known."""
STRETCH = 2.0
MOST_STRETCH = 64.0
"""Factor of the next deadline after a round in which nobody finished anything, and the most it grows to."""
PASSES = 60
"""The most steps of Newton's towards the deadline."""
KEEP = 0.95
"""Weight of the past in each step in which the group has anybody."""
PRIOR = ((0.99, 1.0), (0.05, 0.1))
"""Samples counted and expected before anything was seen, at work and stuck, in whole fleets' work.

A worker that is at work counts nearly all of its time, a stuck one half of it; the latter is soon forgotten.
"""
RANGE = (0.05, 2.0)
LEAST_S, MOST_S = 1e-6, 1e8
"""A deadline is never shorter or longer than this, whatever the records said."""


class Joint(Pacer):
    """Shares and a deadline D with ``sum_i a_i mean_s min(share_i, D / r_i^s) = total``.

    Shares are a little above what is expected by D; ``r_i^s`` are draws of seconds per sample from ``forecast`` (a name
    or a forecast).

    A deadline is planned while it pays by more than the fraction ``least_gain`` against waiting for everybody; until
    then, and again when it no longer pays, the plan is that of ``adaptive`` (`Adaptive` by default), to the letter. A
    round closes at its deadline only once the part ``least_count`` of the global batch is counted; 0 for at any count.
    ``draws`` is how many joint samples of the forecast a plan is made from, ``seed`` that of drawing them. See
    docs/shares-and-deadlines.md.
    """

    name = "joint"
    """Name in ``pace=``, the log and checkpoints."""
    deadlines = True
    """Whether its plans may close a round without everybody."""
    traits = Traits(follows_speed=True)
    """Facts of it for reports and the simulator."""

    def __init__(
        self,
        forecast: str | Forecast = "smoothed",
        *,
        least_gain: float = 0.01,
        least_count: float = 0.7,
        adaptive: Adaptive | None = None,
        draws: int = DRAWS,
        seed: int = 0,
    ) -> None:
        if not 0 <= least_gain < 1:
            raise ValueError(f"least_gain is a fraction from 0 to below 1, not {least_gain}")
        if not 0 <= least_count <= 1:
            raise ValueError(f"least_count is a part of the global batch from 0 to 1, not {least_count}")
        if draws < 1:
            raise ValueError(f"a plan needs at least one draw, not {draws}")
        chosen = make(forecast)
        if not chosen.tells_apart:
            raise ValueError(
                f"the forecast {chosen.name.lower()!r} tells no worker from another, which joint must: take 'smoothed'"
            )
        self.least_gain, self.least_count, self.draws, self.seed = least_gain, least_count, draws, seed
        self.adaptive = Adaptive() if adaptive is None else adaptive
        self._followed = Followed(chosen)
        self._gain = Gain(least=least_gain)
        self._at_work = Availability()
        self._ledger = Ledger(steps=0.0, speed=0.0, best=np.inf, stuck=0.0, stuck_before=0.0, size=0.0)
        self._stretch = 1.0
        self._observed = 0
        self._generation: int | None = None
        self._step = -1
        self._drawn: tuple[tuple[int, ...], int, Floats | None] | None = None

    @classmethod
    def simulated(cls, *, seed: int, forecast: Forecast | None = None) -> Sequence[Simulated]:
        """Return the simulator's rows: with whole micro-batches, and with micro-batches cut to fit, as it is."""
        uncut = Simulated(f"{cls.name}, whole", cls(seed=seed), as_chosen=False, cut_to_fit=False)
        return uncut, Simulated(cls.name, cls(seed=seed))

    @property
    def forecast(self) -> Forecast:
        """What foretells the workers' times."""
        return self._followed.forecast

    def learner(self) -> Learner | None:
        """Return what learns the forecast from the run, where the forecast wants that."""
        return self.forecast.learner()

    @property
    def gain(self) -> float:
        """What waiting for everybody costs over a deadline, as a fraction, by the recent steps."""
        return self._gain.value

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for this number of workers."""
        self.adaptive.check(workers)

    # -- learning --------------------------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Learn from a step: who was how fast, and who was late."""
        work = _Work(record)
        book = self._ledger
        book.arrange(record.workers)
        book.everybody("stuck")[len(record.workers) :] = 0.0  # who left comes back afresh
        # Who was dealt nothing may be stuck still; a step without a deadline waited for everybody.
        stuck = np.where(work.planned > 0, work.stuck, book["stuck"]) if record.deadline_s is not None else 0.0
        before, book["stuck_before"][:], book["stuck"][:] = book["stuck_before"] > 0, book["stuck"], stuck
        # While sizes of micro-batches are tried, shares cannot fit: such a step says nothing of what a deadline brings.
        other_size = resized(record.micro_size, work.measured, book["size"])
        book["steps"][other_size] = 0
        # The first step of new members may have lost somebody in the middle, or waited for newcomers: it says nothing.
        same_members, self._generation = self._generation in (None, record.generation), record.generation
        if record.deadline_s is not None and same_members:
            self._judge_deadline(record, work, before)
        elif record.wait_for is None and same_members:
            self._judge_waiting(work)
        book["speed"][other_size], book["best"][other_size] = 0.0, np.inf
        self._follow(record, work)
        book["steps"][:] += work.measured
        book["best"][:] = np.where(work.measured, np.minimum(work.pace_s, REGROW * book["best"]), book["best"])
        nobody = record.deadline_s is not None and not work.measured.any() and bool(work.planned.any())
        self._stretch = min(self._stretch * STRETCH, MOST_STRETCH) if nobody else 1.0
        self.adaptive.observe(
            record if record.deadline_s is None else replace(record, planned=(0,) * len(work.measured))
        )
        self._observed += 1
        self._step, self._drawn = record.step, None

    def _follow(self, record: StepRecord, work: _Work) -> None:
        """Tell the forecast each worker's pace; who finished nothing was at a standstill, which is no pace."""
        if self._observed == 1:
            self._followed.restart()  # the first step is often slowed by warming up
        typical = self._followed.typical(record.workers)
        pace_s = np.where(typical > 0, np.minimum(work.pace_s, SLOWEST * typical), work.pace_s)
        seconds = np.where(work.measured, pace_s, 0.0)
        self._followed.observe(record.workers, seconds, ~work.measured, sizes=record.micro_size)
        speed = self._ledger["speed"]
        newest = np.divide(1.0, pace_s, out=speed.copy(), where=work.measured)
        speed += np.where(speed > 0, TYPICAL_RATE, 1.0) * (newest - speed)

    def _judge_waiting(self, work: _Work) -> None:
        """Judge a step that waited for everybody: what it took, and what a deadline would have made of it."""
        if self._young(work):
            return
        together_s = work.total / float(work.speed.sum()) / self._at_work.working
        overhead_s = work.overhead_s(work.slowest_s)
        self._gain.observe(work.slowest_s, together_s, work.total, deadline=False, overhead_s=overhead_s)

    def _judge_deadline(self, record: StepRecord, work: _Work, stuck_before: Mask) -> None:
        """Judge a step with a deadline: what it took, what was expected of it, and what adaptive would have waited."""
        # By the running mean and not by draws: those are the leader's alone, made while a step computes.
        expected = np.minimum(work.planned, work.closed_s * self._ledger["speed"])
        self._at_work.observe(work.samples, expected, stuck_before)
        if self._young(work):
            return
        shares = self.adaptive.plan(Ask(step=record.step, total=work.total, workers=record.workers)).samples
        wanted = np.fromiter(shares, dtype=np.float64, count=len(shares))
        needed_s = np.where(wanted > 0, np.where(work.measured, wanted * work.stalled_pace_s, np.inf), 0.0)
        waited_s = min(float(needed_s.max()), MOST_WAIT * work.closed_s)
        self._gain.observe(
            waited_s,
            work.closed_s,
            work.total,
            deadline=True,
            overhead_s=work.overhead_s(work.closed_s),
            may_end=not self._ledger["stuck"].any(),
        )

    def _young(self, work: _Work) -> bool:
        return work.total == 0 or bool((self._ledger["steps"][work.measured] < YOUNG).any())

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, ask: Ask) -> Plan:
        """Return adaptive's shares or, where it pays, larger ones and a deadline."""
        calm = self.adaptive.plan(ask)
        if not self._gain.on or ask.total < 1 or len(ask.workers) < 2:
            return calm
        if (pace_s := self._draws(ask.workers, steps_ahead(ask.step, self._step))) is None:
            return calm
        stuck = self._ledger.look_up("stuck", ask.workers) > 0
        return self._last(ask, pace_s) if ask.last else self._until_deadline(ask, pace_s, stuck, calm.samples)

    def _until_deadline(self, ask: Ask, pace_s: Floats, stuck: Mask, least: tuple[int, ...]) -> Plan:
        most, at_work = _most(ask, self.adaptive.caps(ask)), self._at_work.factors(stuck)
        deadline_s = _bounded(solve(pace_s, ask.total, most=most, at_work=at_work) * self._stretch)
        mean_s, best_s = pace_s.mean(axis=0), self._ledger.look_up("best", ask.workers)
        best_s = clipped(np.minimum(best_s, pace_s.min(axis=0)), mean_s / FASTEST, mean_s)
        shares = GENEROUS * np.maximum(at_work, 1.0) * deadline_s / best_s
        shares = np.maximum(shares, self.adaptive.floors(ask))
        units = np.ceil(np.minimum(shares, most) / ask.unit).astype(np.int64)
        dealt = np.minimum(np.maximum(units, 1) * ask.unit, most.astype(np.int64))
        if dealt.sum() < ask.total:  # a deadline at its bound, or tight maximums
            dealt = np.maximum(dealt, least)
        return replace(self._answer(ask, dealt, deadline_s, pace_s), least_count=self.least_count)

    def _last(self, ask: Ask, pace_s: Floats) -> Plan:
        """Return the plan of the last step of an epoch: what is left, by speed, and time enough for those at work."""
        speed, high = (1 / pace_s).mean(axis=0), self.adaptive.caps(ask)
        shares = proportional(speed, ask.total, unit=ask.unit, minimum=floors(ask), maximum=high)
        expected_s = float((shares * pace_s.mean(axis=0)).max())
        return self._answer(ask, shares, _bounded(LAST_SLACK * expected_s * self._stretch), pace_s)

    def _answer(self, ask: Ask, shares: Ints, deadline_s: float, pace_s: Floats) -> Plan:
        expected_s = np.minimum(shares * pace_s.mean(axis=0), deadline_s)
        known = self._followed.typical(ask.workers) > 0
        return Plan(
            generation=ask.generation,
            step=ask.step,
            samples=tuple(shares.tolist()),
            deadline_s=deadline_s,
            forecast_s=tuple(np.where(known | (shares == 0), expected_s, np.nan).tolist()),
        )

    def _draws(self, workers: tuple[int, ...], ahead: int = 1) -> Floats | None:
        """Return seconds per sample, drawn once for each observed step: a function of what was observed alone."""
        if self._drawn is None or self._drawn[:2] != (workers, ahead):
            rng = np.random.default_rng((self.seed, self._observed))
            drawn = self._followed.draws(workers, self.draws, rng, ahead=ahead)
            self._drawn = workers, ahead, None if drawn is None else np.maximum(drawn, drawn.mean(axis=0) / FASTEST)
        return self._drawn[2]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data."""
        return {
            "adaptive": self.adaptive.state_dict(),
            "followed": self._followed.state_dict(),
            "gain": self._gain.state_dict(),
            "at_work": self._at_work.state_dict(),
            "workers": self._ledger.state_dict(),
            "stretch": self._stretch,
            "observed": self._observed,
            "generation": self._generation,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another pacer of this kind had learned."""
        self.adaptive.load_state_dict(state["adaptive"])
        self._followed.load_state_dict(state["followed"])
        self._gain.load_state_dict(state["gain"])
        self._at_work.load_state_dict(state["at_work"])
        self._ledger.load_state_dict(state["workers"])
        self._stretch, self._observed, self._drawn = float(state["stretch"]), int(state["observed"]), None
        self._generation, self._step = state.get("generation"), int(state.get("step", -1))

    def __repr__(self) -> str:
        parts = f"least_gain={self.least_gain}, least_count={self.least_count}"
        settings = f"{parts}, adaptive={self.adaptive!r}, draws={self.draws}, seed={self.seed}"
        return f"Joint({self.forecast.name!r}, {settings})"


class _Work:
    """A record's numbers as arrays."""

    def __init__(self, record: StepRecord) -> None:
        count = len(record.workers)
        self.planned, self.samples, seconds, unfinished, pieces = columns(
            (record.planned, record.samples, record.seconds, record.unfinished_s, record.micro_batches), count
        )
        self.measured: Mask = (self.samples > 0) & (seconds > 0)
        self.stuck: Mask = (self.samples == 0) & (self.planned > 0)
        self.total = int(self.samples[self.measured].sum())
        each = np.maximum(self.samples, 1.0)
        self.pace_s = np.where(self.measured, np.maximum(seconds, LEAST_S) / each, 0.0)
        usual = seconds / np.maximum(pieces, 1.0)
        stalled = unfinished > STALL * usual
        self.stalled_pace_s = self.pace_s + np.where(stalled, unfinished, 0.0) / each
        self.speed = np.divide(1.0, self.pace_s, out=np.zeros(count), where=self.measured)
        self.slowest_s = float(seconds.max(initial=0.0))
        times = columns(((record.wall_s,), (record.deadline_s or 0.0,)), 1)
        self.wall_s, limit_s = map(float, times[:, 0])
        busy = float(np.max(seconds + unfinished, initial=0.0))
        cut = bool((self.samples < self.planned).any())
        self.closed_s = max(LEAST_S, limit_s if limit_s and cut else busy)

    def overhead_s(self, worked_s: float) -> float:
        """Return what the step took beyond its work; at most as much again, for a late leader's clock is no measure."""
        return min(max(self.wall_s - worked_s, 0.0), worked_s)


def _most(ask: Ask, high: Ints | None) -> Floats:
    """Return the most that each is dealt: its maximum, or what one that does nearly everything alone should have."""
    alone = np.full(len(ask.workers), float(int(GENEROUS * ask.total)))
    return alone if high is None else np.minimum(alone, high)


def _bounded(deadline_s: float) -> float:
    return min(max(deadline_s, LEAST_S), MOST_S) if math.isfinite(deadline_s) else MOST_S


def solve(per_sample_s: Floats, total: int, *, most: Floats, at_work: Floats | float = 1.0) -> float:
    """Return the deadline in seconds by which ``total`` samples are expected, nobody doing more than ``most``.

    From joint draws ``r_i^s`` of every worker's seconds per sample, worker i is expected to finish
    ``min(most_i, D / r_i^s)`` samples by D, and the deadline is the D with

        sum_i a_i * mean_s min(most_i, D / r_i^s) = total

    where ``a_i`` is the part of its time that worker i is expected to be at work at all (`Availability`).

    >>> solve(np.array([[1.0, 2.0]]), 30, most=np.array([100.0, 100.0]))
    20.0

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
    """The part of its time that a worker is at work: one ratio for those at work, one for those stuck.

    A worker's pace says what it does while it works. A stall of one micro-batch, a piece lost at the deadline, a worker
    that starts late because it was stuck before: all of these lower the count and none of them is pace. So this learns
    from the steps with a deadline

        a_g = sum of samples counted / sum of samples expected    (both exponentially weighted; g: a group of workers)

    for two groups: workers that finished something when last seen before the plan, and workers that were *stuck*, that
    is, finished nothing. So a fleet learns how likely a stuck worker is to come back in time, and any bias of the
    forecast is taken out on the way.
    """

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
        return clipped(self._counted / np.maximum(self._expected, 1e-9), *RANGE)

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self._counted.tolist(), "expected": self._expected.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counted = np.array(state["counted"], dtype=np.float64)
        self._expected = np.array(state["expected"], dtype=np.float64)
