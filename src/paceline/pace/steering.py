"""How steps with deadlines are steered: what a step should count, the fewest samples it may, and whether deadlines pay.

A plan is made while the step before it is still under way, supposing that what is hoped for gets done; when its step is
opened, it is scaled to what is really wanted (`made_for`). A step whose count is thin moves the parameters as far as a
whole one, by a gradient that is mostly noise; so with too few samples counted, those at work get more of both, time and
samples (`more`). Waiting for the floor costs little, for nobody stands idle: who is not stuck goes on. Runs and the
simulator use the same functions.

A micro-batch that is not finished when the round closes is lost, and delays its worker until it ends. So before each
one a worker asks what still fits, and stops when nothing does (`fit`). Sizes come from a short ladder: every size is a
shape that kernels and caches meet again and again.

>>> ladder(16)
(16, 12, 8, 4, 2)
>>> fit(1.0, 0.1, ladder(16))
8
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace.shares import proportional
from paceline.records import Plan

LEEWAY = 0.5
"""A step makes up for what earlier deadlines left owing by this part of the global batch at most."""
LEAST = 0.7
"""Part of it that every step is asked for at least, however much earlier ones did: thin steps do harm."""
SLACK = 1.1
"""The time given over the time that is missing: a micro-batch is begun only if it fits with a margin of a tenth."""
SHORTEST = 0.05
"""Part of the step so far that an extension takes at least."""
SPARE = 1.25
"""Factor by which more is dealt than is missing: the speeds of the workers at work may change."""
RATE = 0.05
"""Least weight of the newest step in the running means; more while there are few."""


def goal(step: int, *, done: int, batch: int) -> int:
    """Return the samples the step of this number should count when ``done`` were counted before it.

    After step k, ``(k + 1) * batch`` should be done.

    >>> goal(3, done=700, batch=256), goal(3, done=1000, batch=256)
    (324, 179)
    """
    return max(least(batch), min(round(batch * (1 + LEEWAY)), (step + 1) * batch - done))


def least(batch: int) -> int:
    """Return the fewest samples a step is asked for."""
    return max(1, round(batch * LEAST))


def made_for(plan: Plan, expected: int) -> Plan:
    """Return the plan, made to expect ``expected`` samples.

    When it was made, the step before it was still to be done, and may have done more or less than was hoped.

    >>> plan = made_for(Plan(generation=0, step=0, samples=(9, 3), deadline_s=1.0, expects=8), 12)
    >>> plan.samples, plan.deadline_s, plan.expects
    ((14, 4), 1.5, 12)
    """
    if plan.expects is None or plan.expects == expected or not plan.expects:
        return plan
    scale = expected / plan.expects
    return replace(_scaled(plan, round(plan.total * scale), scale), expects=expected)


def scaled_to(plan: Plan, total: int) -> Plan:
    """Return the plan with ``total`` samples dealt in all, and no less time for them.

    >>> scaled_to(Plan(generation=0, step=0, samples=(6, 2), deadline_s=1.0), 12).deadline_s
    1.5
    """
    if plan.total == total or not plan.total:
        return plan
    return _scaled(plan, total, max(1.0, total / plan.total))


def _scaled(plan: Plan, total: int, times: float) -> Plan:
    samples = tuple(proportional(np.asarray(plan.samples, dtype=float), total).tolist())
    deadline_s = None if plan.deadline_s is None else plan.deadline_s * times
    return replace(plan, samples=samples, deadline_s=deadline_s)


def without_singles(plan: Plan) -> Plan:
    """Move shares of one sample to the largest share: batch norm cannot train on a single one.

    >>> without_singles(Plan(generation=0, step=0, samples=(7, 1, 4))).samples
    (8, 0, 4)
    """
    if plan.total < 2 or 1 not in plan.samples:
        return plan
    samples = [0 if share == 1 else share for share in plan.samples]
    samples[int(np.argmax(samples))] += plan.total - sum(samples)
    return replace(plan, samples=tuple(samples))


class More(NamedTuple):
    """Samples and seconds that a thin step gets."""

    shares: tuple[int, ...]
    """Each worker's share of the whole step, never less than before."""
    seconds: float
    """Seconds by which its deadline is moved."""
    recall: bool = False
    """Whether the free workers have nothing left: what stuck ones were dealt is to be dealt again instead."""


def least_samples(part: float, batch: int) -> int:
    """Return the fewest samples a step of this batch may count.

    >>> least_samples(0.7, 128), least_samples(0.0, 128)
    (90, 0)
    """
    return math.ceil(part * batch - 1e-9)


def more(
    counts: ArrayLike,
    shares: ArrayLike,
    *,
    free: ArrayLike,
    busy: ArrayLike,
    least: int,
    so_far_s: float,
    room: int,
    unit: int = 1,
    smallest: int = 1,
    patience: float = 1.0,
) -> More | None:
    """Return what a step gets that has counted less than ``least`` at its deadline, ``so_far_s`` after its start.

    None when it may close, because enough is counted or because nobody can bring more.

    ``free``: workers that have nothing to do and would take more; ``busy``: those inside a micro-batch, who may be
    stuck. The rest have left. ``room``: samples that nobody was dealt yet. Nobody is dealt more in other than multiples
    of ``unit``, or given fewer than ``smallest``. The free ones do what is missing at their speed of this step. Where
    nobody is free the step waits for the busy ones, each time twice as long.

    >>> more((50, 0), (60, 60), free=(True, False), busy=(False, True), least=70, so_far_s=1.0, room=100).shares
    (75, 60)
    """
    done, dealt = np.asarray(counts, dtype=np.int64), np.asarray(shares, dtype=np.int64)
    missing = least - int(done.sum())
    able = np.asarray(free, dtype=bool) & ((dealt > done) | (room >= max(unit, smallest)))
    if missing <= 0 or not (able.any() or np.asarray(busy, dtype=bool).any()):
        return None
    if not able.any():
        return More(tuple(dealt.tolist()), so_far_s, recall=bool(np.any(free)))
    speed = np.where(able, np.maximum(done, 1), 0) / so_far_s
    missing_s = missing / float(speed.sum())
    seconds = patience * max(SLACK * missing_s, SHORTEST * so_far_s)
    wanted = np.where(able, done + np.maximum(np.ceil(SPARE * missing_s * speed), smallest), 0).astype(np.int64)
    added = -(-np.maximum(wanted - dealt, 0) // unit) * unit
    if added.sum() > room:
        added = proportional(added.astype(np.float64), room // unit * unit, unit=unit)
    added[dealt + added - done < smallest] = 0
    if not (able & (dealt + added > done)).any():  # too little for all of them
        added[int(np.argmax(speed))] = room // unit * unit
    return More(tuple((dealt + added).tolist()), seconds)


class Gain:
    """A judgement whether deadlines pay: on once the gain is above the fraction ``least``, off once at most ``keep``.

    Both are running means of seconds per sample, over steps:

        waited    the step with adaptive's shares and nobody left out:  max_i t_i + overhead without a deadline
        together  the step with a deadline:  n / sum_i v_i, over the part of their time that workers are at work,
                  + overhead with a deadline

    Without a deadline the first is what happened and the second is known in hindsight from every worker's speed; with
    one it is the other way round. Sums of seconds, not a forecast, decide: one stall of fifty steps among a hundred
    calm ones shows in full, where a normal distribution would call it impossible. The overheads (the round, the update,
    whatever else the step's wall clock holds) are measured in either kind of step, so what a deadline itself costs
    counts against it. ``keep`` is below ``least``, so that it does not flap.

    Before the first time ``steps`` are judged, or ``few`` that agree: the mean of their gains, less two standard
    errors, is above ``least``.
    """

    def __init__(self, *, least: float, keep: float = 0.0, steps: int = 1, few: int | None = None) -> None:
        self.least, self.keep, self.steps, self.few = least, keep, steps, steps if few is None else few
        self._gains = self._squares = 0.0
        self.on = False
        self._waited = self._together = 0.0
        self._overhead_s: list[float | None] = [None, None]
        self._steps = 0

    @property
    def value(self) -> float:
        """Seconds of waiting for everybody over those of a deadline, less 1."""
        return self._waited / self._together - 1 if self._together > 0 else 0.0

    def observe(
        self,
        waited_s: float,
        together_s: float,
        samples: int,
        *,
        deadline: bool,
        overhead_s: float = 0.0,
        may_end: bool = True,
    ) -> None:
        """Learn from one step of ``samples`` samples, with or without a ``deadline``, and its own overhead.

        ``may_end``: nobody is stuck now, so waiting for everybody is safe.
        """
        without_s, with_s = self._overheads(deadline, overhead_s)
        self._steps += 1
        rate = max(RATE, 1 / self._steps)
        if self._steps < self.steps:
            gain = (waited_s + without_s) / (together_s + with_s) - 1
            self._gains, self._squares = self._gains + gain, self._squares + gain**2
        self._waited += rate * ((waited_s + without_s) / samples - self._waited)
        self._together += rate * ((together_s + with_s) / samples - self._together)
        if self.on:
            self.on = self.value > self.keep or not may_end
        else:
            self.on = self.value > self.least and self._enough()

    def _enough(self) -> bool:
        if self._steps >= self.steps or self._steps < self.few:
            return self._steps >= self.steps
        mean = self._gains / self._steps
        error = math.sqrt(max(0.0, self._squares / self._steps - mean**2) / max(1, self._steps - 1))
        return mean - 2 * error > self.least

    def _overheads(self, deadline: bool, overhead_s: float) -> tuple[float, float]:
        """Return running means without and with a deadline; the kind never met is taken for the other."""
        last = self._overhead_s[deadline]
        self._overhead_s[deadline] = overhead_s if last is None else last + RATE * (overhead_s - last)
        without_s, with_s = (mean if mean is not None else overhead_s for mean in self._overhead_s)
        return without_s, with_s

    def state_dict(self) -> dict[str, Any]:
        return {
            "on": self.on,
            "waited": self._waited,
            "together": self._together,
            "overhead_s": list(self._overhead_s),
            "steps": self._steps,
            "gains": [self._gains, self._squares],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.on, self._steps = bool(state["on"]), int(state["steps"])
        self._waited, self._together = float(state["waited"]), float(state["together"])
        self._overhead_s = list(state["overhead_s"])
        self._gains, self._squares = state.get("gains", (0.0, 0.0))


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
