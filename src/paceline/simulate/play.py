"""Rules played against a matrix of seconds (steps x workers, own compute for an equal share).

A worker's speed is constant within a step. For n of the S samples of an equal share it takes
``cost_s + seconds * n / S``, and nothing for none. ``cost_s`` is a constant cost per step on top of the matrix: one for
all, one per worker, or a matrix like ``seconds``. Every step ends with a round of ``overhead_s``. Rules that decide see
only earlier steps: `arrivals` and `shares` play the same objects as a real run, the first with censored records, the
second with full records and a real run's lag of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace import Ask, Pacer
from paceline.pace.forecast import Seen, Smoothed
from paceline.records import Plan, StepRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tick = Callable[[], None]
"""Function that is called after every step, for a progress bar."""

SHARE = 256
"""Samples per equal share: shares are whole samples, so this is the resolution of shares."""
MICRO_BATCHES = 16
"""Micro-batches per equal share: DropCompute stops at the end of one."""
EPOCH = 20
"""Steps of a simulated epoch, for pacers that re-deal once per epoch."""
CALIBRATION = 20
"""Steps that DropCompute watches before it sets its limit; at most a quarter of all."""


@dataclass(frozen=True)
class Outcome:
    """The result of one rule over a simulation: one row of the table. All arrays have one number per step."""

    name: str
    workers: int
    shares: Floats
    """Work that counted, in equal shares: the number of workers when every worker's complete share counted."""
    seconds: Floats
    """The step's length, the round's own cost included."""
    waiting_s: Floats
    """Seconds that workers stood idle until the round, summed over workers."""
    wasted_s: Floats
    """Seconds that workers spent on work that was thrown away, summed over workers."""
    pace: str = ""
    """The pace that was played, as ``pace=`` takes it; empty for variants and yardsticks, which nobody can choose."""
    shown: bool = False
    """Whether the page draws this rule's line at once; otherwise the legend offers it."""

    @property
    def throughput(self) -> float:
        """Equal shares per second, ``sum(shares) / sum(seconds)``: never a mean of ratios."""
        return float(self.shares.sum() / self.seconds.sum())

    @property
    def waiting(self) -> float:
        """Part of all worker-seconds spent idle."""
        return float(self.waiting_s.sum() / (self.workers * self.seconds.sum()))

    @property
    def wasted(self) -> float:
        """Part of all worker-seconds spent on work that was thrown away."""
        return float(self.wasted_s.sum() / (self.workers * self.seconds.sum()))

    @property
    def count_cv(self) -> float:
        """Standard deviation of a step's work over its mean: how much the batch varies."""
        return float(self.shares.std() / self.shares.mean())

    def with_round(self, round_s: float) -> Outcome:
        """Return this outcome with rounds that take ``round_s`` seconds longer."""
        return replace(self, seconds=self.seconds + round_s)

    def after(self, warm_up: int) -> Outcome:
        """Return this outcome without the first ``warm_up`` steps."""
        columns = ("shares", "seconds", "waiting_s", "wasted_s")
        return replace(self, **{name: getattr(self, name)[warm_up:] for name in columns})


def matrix(seconds: ArrayLike) -> Floats:
    """Return seconds as a steps x workers matrix; raise ValueError, with the position, for anything else."""
    try:
        own = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("seconds are numbers, one row per step, all with the same number of workers") from None
    if own.ndim != 2 or not own.size:
        raise ValueError("seconds have one row per step and one column per worker, at least one of each")
    good = np.isfinite(own) & (own > 0)
    if not good.all():
        step, worker = np.unravel_index(int(np.argmin(good)), own.shape)
        raise ValueError(f"step {step}, worker {worker}: seconds are finite and above 0, not {own[step, worker]}")
    return own


def _nothing() -> None:
    pass


def costs(seconds: Floats, cost_s: ArrayLike) -> Floats:
    """Return the constant cost of every worker in every step, as a matrix like ``seconds``."""
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
    """Close every step with its ``first`` arrivals; late workers start the next step together with the others.

    The counts are given in advance. A late worker's seconds up to the cut-off are wasted. Workers that arrived earlier
    wait for the last one that counts.
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
    seconds: Floats,
    pacer: Pacer,
    *,
    name: str = "",
    overhead_s: float | None = None,
    share: int = SHARE,
    micro_batches: int | None = None,
    tick: Tick = _nothing,
) -> Outcome:
    """Play a pacer that decides how many arrivals to wait for (P3); late workers are censored in its records.

    The count is decided while the step runs, from all earlier steps, as in a run and as P3 reads it. ``overhead_s`` is
    the pacer's own unless given. ``share`` is the number of samples of an equal share.

    A late worker drops its work at once, as P3's does. With ``micro_batches``, the number in a share, it ends the one
    that it is in, as in a run, and begins the next step late where that takes longer than the round.
    """
    steps, size = seconds.shape
    workers, late_s = tuple(range(size)), np.zeros(size)
    first, length, waiting, wasted = np.empty(steps, dtype=np.int64), *(np.empty(steps) for _ in range(3))
    round_s = float(pacer.overhead_s or 0.0) if overhead_s is None else overhead_s
    pacer.check(size)
    for step, own in enumerate(seconds):
        plan = pacer.plan(Ask(step=step, total=share * size, workers=workers))
        first[step] = plan.wait_for or size
        ends = late_s + own
        closed_s = float(np.partition(ends, first[step] - 1)[first[step] - 1])
        late = ends > closed_s  # ties with the last arrival were in time to be measured
        spent_s = np.where(late, np.maximum(closed_s - late_s, 0.0), own)
        pacer.observe(_whole_shares(step, plan, spent_s, late, closed_s, round_s, share))
        length[step], wasted[step] = closed_s + round_s, spent_s[late].sum()
        waiting[step] = (closed_s - ends[~late]).sum()
        if micro_batches is not None:
            late_s = np.maximum(_micro_batch_ends(late_s, own / micro_batches, late, closed_s) - length[step], 0.0)
        tick()
    return Outcome(name or pacer.name, size, first.astype(np.float64), length, waiting, wasted)


def _micro_batch_ends(began_s: Floats, micro_batch_s: Floats, late: NDArray[np.bool_], closed_s: float) -> Floats:
    """Return when the micro-batch ends that each late worker is in as the round closes; 0 for the others."""
    begun = np.ceil(np.maximum(closed_s - began_s, 0.0) / micro_batch_s)
    return np.where(late, began_s + begun * micro_batch_s, 0.0)


def _whole_shares(
    step: int, plan: Plan, spent_s: Floats, late: NDArray[np.bool_], closed_s: float, round_s: float, share: int
) -> StepRecord:
    """Return the record of a step whose late shares were thrown away when the last share that counts came in."""
    return StepRecord(
        step=step,
        epoch=0,
        generation=0,
        workers=tuple(range(len(spent_s))),
        planned=plan.samples,
        samples=tuple(np.where(late, 0, share).tolist()),
        seconds=tuple(np.where(late, 0.0, spent_s).tolist()),
        unfinished_s=tuple(np.where(late, spent_s, 0.0).tolist()),
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
    """Play a pacer as in a real run, where the plan for step k is made from the records up to step k - 2.

    The second step is the exception, as in a run: it waits for the first step's record. ``share`` is the number of
    samples of an equal share.
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
    """Play shares in proportion to smoothed speeds, unrounded and without lag: a yardstick for `shares`."""
    size, believed, busy = seconds.shape[1], Smoothed(rate=rate), np.empty_like(seconds)
    for step, (own, cost) in enumerate(zip(seconds, costs(seconds, cost_s))):
        speed = 1 / believed.mean_s if step else np.ones(size)
        part = speed * (size / speed.sum())
        busy[step] = cost + own * part
        believed.observe(Seen.whole(cost / part + own))
        tick()
    return _together("proportional", busy, np.full(len(seconds), float(size)), overhead_s)


def drop_compute(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """Play DropCompute: a worker past its local time limit stops after the current micro-batch; its work counts.

    Nothing is predicted: the limit is set once, to the one that would have done most work per second in the first
    steps, which wait for everybody.
    """
    watched = max(1, min(CALIBRATION, len(seconds) // 4))
    limit_s = np.full((len(seconds), 1), np.inf)
    cost = costs(seconds, cost_s)
    limit_s[watched:] = _best_limit(seconds[:watched], cost[:watched], overhead_s)
    done, busy = _limited(seconds, cost, limit_s)
    return _together("DropCompute", busy, done.sum(axis=1) / MICRO_BATCHES, overhead_s)


def limit(seconds: Floats, *, overhead_s: float = 0.0, cost_s: ArrayLike = 0.0) -> Outcome:
    """Return the limit, where everybody works all the time and no step can do more work per second.

    A step of n shares takes ``(n + sum_i c_i / x_i) / sum_i (1 / x_i)`` seconds, the sums over the workers whose
    constant cost c_i is below that. A rule whose slow steps are short still weighs them less in its sum.
    """
    steps, workers = seconds.shape
    none = np.zeros(steps)
    length = all_busy_s(seconds, costs(seconds, cost_s))
    return Outcome("limit", workers, np.full(steps, float(workers)), length + overhead_s, none, none)


def all_busy_s(seconds: Floats, cost: Floats) -> Floats:
    """Return each step's shortest length.

    In the order of their cost, the workers that should work are a prefix; any other prefix needs longer for n shares.
    """
    order = np.argsort(cost, axis=1, kind="stable")
    rate, owed = (np.take_along_axis(values, order, axis=1) for values in (1 / seconds, cost / seconds))
    return np.asarray(((seconds.shape[1] + np.cumsum(owed, axis=1)) / np.cumsum(rate, axis=1)).min(axis=1))


def _limited(seconds: Floats, cost: Floats, limit_s: Floats | float) -> tuple[Floats, Floats]:
    """Return the micro-batches that each worker finished within the limit, and the seconds that they took."""
    each = seconds / MICRO_BATCHES
    done = np.clip(np.ceil((limit_s - cost) / each), 1, MICRO_BATCHES)
    return done, cost + done * each


def _best_limit(seconds: Floats, cost: Floats, overhead_s: float) -> float:
    """Return the limit with the most work per second over these steps: the slowest time seen if no other gains."""
    tried = np.quantile(cost + seconds, np.linspace(0, 1, 65)).tolist()
    gains = []
    for limit_s in tried:
        done, busy = _limited(seconds, cost, limit_s)
        gains.append(done.sum() / (busy.max(axis=1) + overhead_s).sum())
    return float(tried[len(tried) - 1 - int(np.argmax(gains[::-1]))])


def _together(name: str, busy: Floats, done: Floats, overhead_s: float) -> Outcome:
    """Return the outcome of steps in which all finished work counts and the round waits for the slowest."""
    last = busy.max(axis=1)
    waiting = busy.shape[1] * last - busy.sum(axis=1)
    return Outcome(name, busy.shape[1], done, last + overhead_s, waiting, np.zeros(len(busy)))
