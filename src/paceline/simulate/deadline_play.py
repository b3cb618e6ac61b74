"""Steps with a deadline, played micro-batch by micro-batch, as a fleet would follow a pacer's plans.

A worker's seconds for an equal share are given per step. Each of its micro-batches (16 per equal share) takes its part
of them, times noise. Before the first one come ``cost_s`` seconds, which a step costs whatever the share. Before each
micro-batch the worker computes what still fits before the deadline (`paceline.pace.steering`, the function of
real runs) and stops when nothing fits. A micro-batch that is not finished when the round closes does not count, and its
worker is busy with it until it ends, in later steps, as in a real run: nobody can interrupt a micro-batch.

The loop is that of a run, too: plans are made one step ahead, and later steps make up for what earlier steps did too
much or too little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace import Ask, Pacer, steering
from paceline.pace.steering import fit_all, goal, ladder, made_for
from paceline.records import Plan, StepRecord
from paceline.simulate.play import EPOCH, MICRO_BATCHES, SHARE, Outcome, costs

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]
"""Function that draws the factors by which micro-batches take longer than their part of the step."""

NOISE = 0.05
"""Spread (natural log) of micro-batches within a step."""


def within_step(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw lognormal noise of 5 %."""
    return np.asarray(np.exp(NOISE * rng.standard_normal(shape)))


def stalling(probability: float, factor: float) -> Noise:
    """Return noise in which a micro-batch also takes ``factor`` times as long with this ``probability``."""

    def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return within_step(rng, shape) * np.where(rng.random(shape) < probability, factor, 1.0)

    return noise


@dataclass
class _Done:
    """The work of one step, per worker."""

    samples: NDArray[np.int64]
    pieces: NDArray[np.int64]
    busy_s: Floats
    """Seconds spent on micro-batches that count."""
    ends_s: Floats
    """Seconds from the step's start to the end of the worker's last micro-batch."""
    lost: NDArray[np.bool_]
    """Whether the worker's last micro-batch was not finished in time."""
    under_way: NDArray[np.int64]
    """Samples of the lost micro-batch; 0 where it belongs to an earlier step."""
    begun_s: Floats
    """Seconds from the step's start to the beginning of the last micro-batch."""
    cost_s: Floats
    """The step's constant cost, which is part of the busy seconds."""


def play(
    seconds: Floats,
    pacer: Pacer,
    *,
    name: str = "",
    overhead_s: float = 0.0,
    cost_s: ArrayLike = 0.0,
    cut_to_fit: bool = True,
    share: int = SHARE,
    micro_batches: int = MICRO_BATCHES,
    noise: Noise = within_step,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Play a pacer whose plans may have deadlines; an equal share is ``share`` samples in ``micro_batches`` parts."""
    steps, size = seconds.shape
    workers, batch, micro = tuple(range(size)), share * size, share // micro_batches
    sizes: Sequence[int] = ladder(micro) if cut_to_fit else (micro,)
    fleet = _Fleet(size, sizes, noise, np.random.default_rng((seed, 1)))
    cost, figures, counted = costs(seconds, cost_s), np.zeros((4, steps)), 0
    pacer.check(size)

    def ask(step: int, done: int) -> Plan:
        total = goal(step, done=done, batch=batch)
        return replace(pacer.plan(Ask(step=step, total=total, workers=workers, epoch=step // EPOCH)), expects=total)

    plan = ask(0, 0)
    for step, own in enumerate(seconds):
        plan = made_for(plan, goal(plan.step, done=counted, batch=batch))
        hoped = counted + min(plan.expects or 0, plan.total)
        after = ask(step + 1, hoped) if step else None
        least = steering.least_samples(plan.least_count, batch)
        plan, done, closed_s = fleet.step(own / share, cost[step], plan, least=least)
        record = _record(step, plan, done, closed_s, overhead_s)
        counted += record.total
        pacer.observe(record)
        figures[:, step] = _figures(record, done, closed_s, size)
        fleet.leave(done, closed_s + overhead_s)
        plan = after or ask(step + 1, counted)  # the second plan waits for the first record, as in a run
        tick()
    shares, closed, waiting, wasted = figures
    return Outcome(name or pacer.name, size, shares / share, closed + overhead_s, waiting, wasted)


class _Fleet:
    """The workers' state between steps: the seconds that lost micro-batches still take, and everybody's last pace."""

    def __init__(self, size: int, sizes: Sequence[int], noise: Noise, rng: np.random.Generator) -> None:
        self._sizes, self._noise, self._rng = sizes, noise, rng
        self._busy_s = np.zeros(size)
        self._pace_s = np.full(size, np.nan)

    def step(self, per_sample_s: Floats, cost_s: Floats, plan: Plan, *, least: int = 0) -> tuple[Plan, _Done, float]:
        """Play a step, and return the plan as it was in the end, everybody's work, and when the round closed.

        A round with fewer than ``least`` samples goes on after its deadline.
        """
        shares = np.array(plan.samples, dtype=np.int64)
        starts = self._busy_s + np.where(shares > 0, cost_s, 0.0)
        if plan.deadline_s is None:
            done = self._all(per_sample_s, starts, shares)
        else:
            done = self._until(per_sample_s, starts, shares, plan.deadline_s, self._pace_s)
            plan, done = self._to_floor(done, per_sample_s, plan, least)
        done.cost_s = np.where(done.samples > 0, cost_s, 0.0)
        done.busy_s = done.busy_s + done.cost_s
        if plan.deadline_s is not None and (done.samples < plan.samples).any():
            return plan, done, plan.deadline_s
        return plan, done, float(done.ends_s.max())

    def _to_floor(self, done: _Done, per_sample_s: Floats, plan: Plan, least: int) -> tuple[Plan, _Done]:
        """Extend a round below the floor: workers that are not stuck do more, and so do those that come back."""
        while True:
            closed_s = plan.deadline_s or 0.0
            more = steering.more(
                done.samples, plan.samples, free=~done.lost, busy=done.lost, least=least, so_far_s=closed_s, room=2**40
            )
            if more is None:
                return plan, done
            plan = replace(plan, samples=more.shares, deadline_s=closed_s + more.seconds)
            done = self._go_on(done, per_sample_s, plan, closed_s)

    def _go_on(self, done: _Done, per_sample_s: Floats, plan: Plan, since_s: float) -> _Done:
        """Continue the same step from ``since_s`` to a later deadline."""
        assert plan.deadline_s is not None
        back = done.lost & (done.ends_s <= plan.deadline_s)
        landed = np.where(back, done.under_way, 0)
        busy_s = done.busy_s + np.where(landed > 0, done.ends_s - done.begun_s, 0.0)
        samples, pieces = done.samples + landed, done.pieces + (landed > 0)
        starts = np.where(done.lost, done.ends_s, np.maximum(done.ends_s, since_s))
        pace = np.where(samples > 0, busy_s / np.maximum(samples, 1), self._pace_s)
        stuck = done.lost & ~back
        shares = np.where(stuck, 0, np.array(plan.samples, dtype=np.int64) - samples)
        later = self._until(per_sample_s, starts, shares, plan.deadline_s, pace, tries=samples == 0)
        later.samples += samples
        later.pieces += pieces
        later.busy_s = later.busy_s + busy_s
        later.under_way = np.where(stuck, done.under_way, later.under_way)
        later.begun_s = np.where(stuck, done.begun_s, later.begun_s)
        return later

    def leave(self, done: _Done, length_s: float) -> None:
        """End the step; lost micro-batches go on in the next one."""
        self._busy_s = np.where(done.lost, np.maximum(done.ends_s - length_s, 0.0), 0.0)
        self._pace_s = _pace_s(done, done.busy_s - done.cost_s, self._pace_s)

    def _all(self, per_sample_s: Floats, starts: Floats, shares: NDArray[np.int64]) -> _Done:
        """Play a step without a deadline: everybody does its complete share."""
        pieces = -(-shares // self._sizes[0])
        factors = self._noise(self._rng, (len(shares), int(pieces.max(initial=1))))
        there = np.arange(factors.shape[1]) < pieces[:, None]
        mean = np.where(there, factors, 0.0).sum(axis=1) / np.maximum(pieces, 1)
        busy = per_sample_s * shares * mean
        none = np.zeros(len(shares))
        return _Done(shares, pieces, busy, starts + busy, none > 0, 0 * shares, starts, none)

    def _until(
        self,
        per_sample_s: Floats,
        starts: Floats,
        shares: NDArray[np.int64],
        deadline_s: float,
        pace_s: Floats,
        *,
        tries: NDArray[np.bool_] | None = None,
    ) -> _Done:
        """Play a step up to its deadline.

        ``pace_s`` is the seconds per sample so far. Workers in ``tries`` try the smallest size even if it does not fit.
        """
        full = self._sizes[0]
        most = shares // full
        # Nobody does more full micro-batches than its pace allows, with room for a lucky run.
        possible = (deadline_s - starts) / (per_sample_s * full) * 1.2 + 2
        columns = int(np.minimum(most, possible).max(initial=0.0))
        took = per_sample_s[:, None] * full * self._noise(self._rng, (len(shares), columns))
        ends = starts[:, None] + np.cumsum(took, axis=1)
        begins = np.concatenate([starts[:, None], ends], axis=1)
        known = np.arange(1, columns + 1)
        pace = np.concatenate([pace_s[:, None], (ends - starts[:, None]) / (known * full)], axis=1)
        fits = fit_all(deadline_s - begins, pace, (full,)) > 0
        fits &= np.arange(columns + 1) < np.minimum(most, columns)[:, None]
        begun = np.argmin(fits, axis=1)
        finished = np.minimum(begun, (ends <= deadline_s).sum(axis=1))
        row = np.arange(len(shares))
        done = _Done(
            samples=finished * full,
            pieces=finished.copy(),
            busy_s=begins[row, finished] - starts,
            ends_s=begins[row, begun],
            lost=(begun > finished) | (starts > deadline_s),
            under_way=np.where(begun > finished, full, 0),
            begun_s=begins[row, finished],
            cost_s=np.zeros(len(shares)),
        )
        first = (done.samples == 0) & (True if tries is None else tries)
        return self._pieces(done, per_sample_s, shares, deadline_s, pace_s, first)

    def _pieces(
        self,
        done: _Done,
        per_sample_s: Floats,
        shares: NDArray[np.int64],
        deadline_s: float,
        pace_s: Floats,
        first: NDArray[np.bool_],
    ) -> _Done:
        """Add what still fits after the full micro-batches; workers in ``first`` try the smallest size."""
        for _ in range(2 * len(self._sizes)):
            pace = _pace_s(done, done.busy_s, pace_s)
            size = fit_all(deadline_s - done.ends_s, pace, self._sizes)
            size = np.where(first & (done.ends_s < deadline_s), np.maximum(size, self._sizes[-1]), size)
            size = np.where(done.lost, 0, np.minimum(size, shares - done.samples))
            if not size.any():
                break
            took = per_sample_s * size * self._noise(self._rng, size.shape)
            done.begun_s = np.where(size > 0, done.ends_s, done.begun_s)
            done.ends_s = done.ends_s + took
            in_time = (size > 0) & (done.ends_s <= deadline_s)
            done.lost |= (size > 0) & ~in_time
            done.under_way = np.where((size > 0) & ~in_time, size, done.under_way)
            done.samples = done.samples + np.where(in_time, size, 0)
            done.pieces += in_time
            done.busy_s = done.busy_s + np.where(in_time, took, 0.0)
            first = np.zeros_like(first)
        return done


def _pace_s(done: _Done, busy_s: Floats, before: Floats) -> Floats:
    """Return seconds per sample of workers that did some, and the value before for the others."""
    return np.where(done.samples > 0, busy_s / np.maximum(done.samples, 1), before)


def _record(step: int, plan: Plan, done: _Done, closed_s: float, overhead_s: float) -> StepRecord:
    unfinished = np.where(done.lost, np.maximum(closed_s - np.minimum(done.busy_s, closed_s), 0.0), 0.0)
    return StepRecord(
        step=step,
        epoch=step // EPOCH,
        generation=0,
        workers=tuple(range(len(plan.samples))),
        planned=plan.samples,
        samples=tuple(done.samples.tolist()),
        seconds=tuple(done.busy_s.tolist()),
        micro_batches=tuple(done.pieces.tolist()),
        unfinished_s=tuple(unfinished.tolist()),
        forecast_s=plan.forecast_s,
        deadline_s=plan.deadline_s,
        wall_s=closed_s + overhead_s,
        round_s=overhead_s,
    )


def _figures(record: StepRecord, done: _Done, closed_s: float, size: int) -> tuple[float, float, float, float]:
    """Return samples, the step's length, seconds waited and seconds wasted, over all workers."""
    useful = float(done.busy_s.sum())
    wasted = float(
        np.maximum(np.where(done.lost, closed_s, np.minimum(done.ends_s, closed_s)) - done.busy_s, 0.0).sum()
    )
    return float(record.total), closed_s, size * closed_s - useful - wasted, wasted
