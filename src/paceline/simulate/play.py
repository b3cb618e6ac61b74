"""Playing a rule against a matrix of seconds (steps x workers, own compute for an equal share).

A worker's speed is constant within a step. With n of an equal share of S samples it takes ``cost_s + seconds * n / S``,
and nothing with none: ``cost_s`` is a constant cost a step, one for all, one a worker, or a matrix like ``seconds``, on
top of the matrix. Every step ends with a round of ``overhead_s``. Rules that decide see only steps before: `arrivals`
and `shares` play the very objects that would run, the first with the censored view, the second with the records and the
one step of lag of a real run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace import Ask, Pacer
from paceline.pace.forecast import Seen, Smoothed
from paceline.records import Plan, StepRecord
from paceline.simulate.outcome import Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tick = Callable[[], None]
"""Called after every step, for a progress bar."""

SHARE = 256
"""Samples of an equal share: shares are whole samples, so this is how finely they are cut."""
MICRO_BATCHES = 16
"""Micro-batches of an equal share, the grain at which DropCompute stops."""
EPOCH = 20
"""Steps of a simulated epoch, for pacers that re-deal once an epoch."""
CALIBRATION = 20
"""Steps DropCompute watches before it sets its limit; at most a quarter of all."""


def _nothing() -> None:
    pass


def costs(seconds: Floats, cost_s: ArrayLike) -> Floats:
    """The constant cost of every worker in every step, as a matrix like ``seconds``."""
    try:
        cost = np.broadcast_to(np.asarray(cost_s, dtype=np.float64), seconds.shape)
    except (TypeError, ValueError):
        raise ValueError(
            f"a constant cost a step is one number, or one for each of {seconds.shape[1]} workers, not {cost_s!r}"
        ) from None
    if not np.all(np.isfinite(cost) & (cost >= 0)):
        raise ValueError("a constant cost a step is finite and at least 0 seconds")
    return cost


def counts(name: str, seconds: Floats, first: Ints | int, *, overhead_s: float = 0.0) -> Outcome:
    """Close every step with its ``first`` arrivals, given beforehand; who is late starts the next step with the others.

    A late worker's seconds up to the cut-off are wasted; who arrived earlier waits for the last one that counts.
    """
    steps, workers = seconds.shape
    first = np.broadcast_to(np.asarray(first, dtype=np.int64), (steps,))
    ordered = np.sort(seconds, axis=1)
    cut = ordered[np.arange(steps), first - 1]
    done = np.cumsum(ordered, axis=1)[np.arange(steps), first - 1]
    return Outcome(
        name, workers, first.astype(np.float64), cut + overhead_s, first * cut - done, (workers - first) * cut
    )


def arrivals(
    seconds: Floats, pacer: Pacer, *, name: str = "", overhead_s: float | None = None, tick: Tick = _nothing
) -> Outcome:
    """A pacer that says how many arrivals to wait for (P3), and gets the step's record with the late ones censored.

    The count is needed when the first workers arrive, not when the step starts, so it is decided from all steps before:
    P3's own reading. ``overhead_s`` is the pacer's own when left out.
    """
    steps, size = seconds.shape
    workers, first = tuple(range(size)), np.empty(steps, dtype=np.int64)
    round_s = float(getattr(pacer, "overhead_s", None) or 0.0) if overhead_s is None else overhead_s
    pacer.check(size)
    for step, own in enumerate(seconds):
        plan = pacer.plan(Ask(step=step, total=SHARE * size, workers=workers))
        first[step] = plan.wait_for or size
        # Nothing is censored among ties with the last arrival: they were in time to be measured.
        late = own > np.partition(own, first[step] - 1)[first[step] - 1]
        pacer.observe(_whole_shares(step, plan, own, late, round_s))
        tick()
    return counts(name or pacer.name, seconds, first, overhead_s=round_s)


def _whole_shares(step: int, plan: Plan, own: Floats, late: NDArray[np.bool_], round_s: float) -> StepRecord:
    """The record of a step whose late shares were thrown away when the last one that counts came in."""
    closed_s = float(own[~late].max())
    return StepRecord(
        step=step,
        epoch=0,
        generation=0,
        workers=tuple(range(len(own))),
        planned=plan.samples,
        samples=tuple(np.where(late, 0, SHARE).tolist()),
        seconds=tuple(np.where(late, 0.0, own).tolist()),
        unfinished_s=tuple(np.where(late, closed_s, 0.0).tolist()),
        wait_for=plan.wait_for,
        wall_s=closed_s + round_s,
        round_s=round_s,
    )


def shares(
    seconds: Floats,
    pacer: Pacer,
    *,
    name: str = "",
    overhead_s: float = 0.0,
    cost_s: ArrayLike = 0.0,
    share: int = SHARE,
    tick: Tick = _nothing,
) -> Outcome:
    """A pacer of real runs, with its records: the plan for step k is made from the records up to k - 2.

    The second step is the exception, as in a run: it waits for the first one's record. ``share`` is the samples of an
    equal share.
    """
    steps, size = seconds.shape
    workers, pending = tuple(range(size)), None
    pacer.check(size)
    cost, busy = costs(seconds, cost_s), np.empty_like(seconds)
    for step, own in enumerate(seconds):
        if pending is not None and step == 1:
            pacer.observe(pending)
            pending = None
        plan = pacer.plan(Ask(step=step, total=share * size, workers=workers, epoch=step // EPOCH))
        part = np.fromiter(plan.samples, dtype=np.float64, count=size) / share
        busy[step] = np.where(part > 0, cost[step], 0.0) + own * part
        if pending is not None:
            pacer.observe(pending)
        pending = StepRecord(
            step=step,
            epoch=step // EPOCH,
            generation=0,
            workers=workers,
            planned=plan.samples,
            samples=plan.samples,
            seconds=tuple(busy[step].tolist()),
        )
        tick()
    return _together(name or pacer.name, busy, np.full(steps, float(size)), overhead_s)


def smoothed_shares(
    seconds: Floats, *, rate: float = 0.2, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0, tick: Tick = _nothing
) -> Outcome:
    """Shares in proportion to smoothed speeds, of any fineness and without lag: a yardstick for `shares`."""
    size, believed, busy = seconds.shape[1], Smoothed(rate=rate), np.empty_like(seconds)
    for step, (own, cost) in enumerate(zip(seconds, costs(seconds, cost_s))):
        speed = 1 / believed.mean_s if step else np.ones(size)
        part = speed * (size / speed.sum())
        busy[step] = cost + own * part
        believed.observe(Seen.whole(cost / part + own))
        tick()
    return _together("proportional", busy, np.full(len(seconds), float(size)), overhead_s)


def drop_compute(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """DropCompute: whoever passes a local time limit stops after the micro-batch it is in; what it finished counts.

    No prediction: the limit is set once, to what would have done most in the first steps, which wait for everybody.
    """
    watched = max(1, min(CALIBRATION, len(seconds) // 4))
    limit_s = np.full((len(seconds), 1), np.inf)
    cost = costs(seconds, cost_s)
    limit_s[watched:] = _best_limit(seconds[:watched], cost[:watched], overhead_s)
    done, busy = _limited(seconds, cost, limit_s)
    return _together("DropCompute", busy, done.sum(axis=1) / MICRO_BATCHES, overhead_s)


def limit(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """Everybody works all the time: n shares in ``(n + sum_i c_i / x_i) / sum_i (1 / x_i)`` seconds, the sums over
    those whose constant cost c_i is below that.

    In no step can any rule do more work a second. A rule whose slow steps are short still weighs them less in its sum.
    """
    steps, workers = seconds.shape
    none = np.zeros(steps)
    length = all_busy_s(seconds, costs(seconds, cost_s))
    return Outcome("limit", workers, np.full(steps, float(workers)), length + overhead_s, none, none)


def all_busy_s(seconds: Floats, cost: Floats) -> Floats:
    """Each step's shortest length. Of the prefixes of the workers in the order of their cost, one is who should work;
    any other would need longer for its n shares."""
    order = np.argsort(cost, axis=1, kind="stable")
    rate, owed = (np.take_along_axis(values, order, axis=1) for values in (1 / seconds, cost / seconds))
    return np.asarray(((seconds.shape[1] + np.cumsum(owed, axis=1)) / np.cumsum(rate, axis=1)).min(axis=1))


def _limited(seconds: Floats, cost: Floats, limit_s: Floats | float) -> tuple[Floats, Floats]:
    """Micro-batches that each worker finished, and the seconds they took it."""
    each = seconds / MICRO_BATCHES
    done = np.clip(np.ceil((limit_s - cost) / each), 1, MICRO_BATCHES)
    return done, cost + done * each


def _best_limit(seconds: Floats, cost: Floats, overhead_s: float) -> float:
    """The limit with the most work a second over these steps; the slowest time seen when nothing is gained by less."""
    tried = np.quantile(cost + seconds, np.linspace(0, 1, 65)).tolist()
    gains = []
    for limit_s in tried:
        done, busy = _limited(seconds, cost, limit_s)
        gains.append(done.sum() / (busy.max(axis=1) + overhead_s).sum())
    return float(tried[len(tried) - 1 - int(np.argmax(gains[::-1]))])


def _together(name: str, busy: Floats, done: Floats, overhead_s: float) -> Outcome:
    """All finished work counts and the round waits for the slowest."""
    last = busy.max(axis=1)
    waiting = busy.shape[1] * last - busy.sum(axis=1)
    return Outcome(name, busy.shape[1], done, last + overhead_s, waiting, np.zeros(len(busy)))
