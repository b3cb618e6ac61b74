"""What step records say about speed: pure sums over records, with no words and no clock.

The formulas of a single step are in `steptimes`, what was lost to stalls and deadlines in `lateness`.
Over many steps samples and seconds are summed before they are divided: the limit is sum N_k / sum T_k, with T_k the
seconds of step k at best, so it stays right when machines drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from paceline.observe.analysis.lateness import LostTime, lost_time, usual_s
from paceline.observe.analysis.steptimes import Speeds, StepTimes, step_times
from paceline.observe.analysis.stretches import Floats, Mask, StepStretch, bounded, stretches
from paceline.observe.analysis.worth import StepCost, adds
from paceline.records import StepRecord

HELD = 0.10
"""Of a step, the wait of the others from which the last worker held them up."""


@dataclass(frozen=True)
class WorkerFigures:
    """One worker over the steps looked at. Ratios are between 0 and 1."""

    worker: int
    steps: int = 0
    """Steps in which it was there."""
    samples: int = 0
    seconds: float = 0.0
    """Own compute."""
    speed: float = 0.0
    """Own samples a second, time stuck included; when it did nothing here, what it last showed, or 0."""
    share: float = 0.0
    """Of all samples."""
    waiting: float = 0.0
    """Of the steps it took part in, the part it waited for slower workers."""
    last: float = 0.0
    """Of the steps in which it was there, those in which it was the last to finish."""
    blamed: float = 0.0
    """Of all time, what the others waited on average for this worker."""
    sat_out: int = 0
    """Steps with no samples for it."""
    micro_batches: int = 0
    shortfall: float = 0.0
    """Emulated: seconds the host was too slow by, over the seconds the machine should have taken, in the typical step:
    the median over those with work, for a single freeze is not a slow host."""
    missed: int = 0
    """Rounds that closed without anything from it."""
    stuck: float = 0.0
    """Of the steps it took part in, the part it was at a standstill inside a micro-batch."""
    stalls: int = 0
    stall_s: float = 0.0
    """Seconds of such a standstill, on average."""
    cut: float = 0.0
    """Of the steps it took part in, work that was cut off and done again."""
    held: float = 0.0
    """Of all steps, those in which the others waited for it more than a tenth of the step."""
    held_s: float = 0.0
    """Seconds they waited then, on average."""
    would_hold: float = 0.0
    """Of what waiting for everybody would have cost besides, the part that is due to this worker; an estimate."""
    adds: float = 0.0
    """Samples a second that it adds to those there at the end, with shares by speed and a round that grows as in a ring
    (`worth`); below 0, it costs more than it brings. 0 too when it was never timed."""


@dataclass(frozen=True)
class Figures:
    """The fleet over the steps looked at."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Wall seconds inside the steps."""
    samples_per_s: float = 0.0
    limit: float = 0.0
    """Samples a second: what the workers' own speeds allow, time stuck included; 0 when no worker was timed."""
    of_limit: float = 0.0
    equal: float = 0.0
    """Samples a second with equal shares on the same record."""
    balanced: float = 0.0
    """Samples a second with shares in proportion to speed and the same other time."""
    work: float = 0.0
    """Of the time, what the average worker computed. ``work + stuck + cut + waiting + round + rest`` is 1."""
    stuck: float = 0.0
    """Of the time, what the average worker was at a standstill inside a micro-batch."""
    cut: float = 0.0
    """Of the time, what the average worker did that a deadline cut off."""
    waiting: float = 0.0
    round: float = 0.0
    rest: float = 0.0
    """The update, and whatever else happens between the last gradient and the end of the commit."""
    deadlines: int = 0
    """Rounds that could close without everybody."""
    closed_without: int = 0
    """Of these, the ones that had nothing from a worker with work to do."""
    patient: float = 0.0
    """Samples a second had every round waited for everybody; an estimate, and 0 without deadlines."""
    count: float = 0.0
    """Samples of a step, on average; as ``spread`` without the last step of an epoch, which takes what is left."""
    spread: float = 0.0
    """Standard deviation of that count over its mean."""
    fewest: int = 0
    """Workers that were there in a step, at least,"""
    most: int = 0
    """and at most."""
    workers: tuple[WorkerFigures, ...] = ()


@dataclass
class _WorkerSums:
    steps: int = 0
    samples: int = 0
    timed: int = 0
    """Of these, the samples whose seconds are known."""
    seconds: float = 0.0
    stuck_s: float = 0.0
    """At a standstill, outside of ``seconds``."""
    inside_s: float = 0.0
    """At a standstill, as a part of ``seconds``."""
    cut_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    missed: int = 0
    waited_s: float = 0.0
    wall_s: float = 0.0
    last: int = 0
    blamed_s: float = 0.0
    held: int = 0
    held_s: float = 0.0
    would_hold_s: float = 0.0
    sat_out: int = 0
    micro_batches: int = 0
    shortfalls: list[Floats] = field(default_factory=list)
    """Of each step with work: seconds too slow over seconds asked for."""


def own_speeds(records: Iterable[StepRecord], known: Mapping[int, float] | None = None) -> dict[int, float]:
    """Samples a second that each worker showed last, over what was ``known`` before."""
    speeds = dict(known or {})
    for record in records:
        for worker, samples, seconds in zip(record.workers, record.samples, record.seconds):
            if samples > 0 and _positive(seconds):
                speeds[worker] = samples / seconds
    return speeds


def _first_speeds(records: Iterable[StepRecord]) -> dict[int, float]:
    """Samples a second that each worker showed first."""
    speeds: dict[int, float] = {}
    complete: tuple[int, ...] = ()
    for record in records:
        if record.workers != complete:
            speeds = {**own_speeds((record,)), **speeds}
            complete = record.workers if speeds.keys() >= set(record.workers) else ()
    return speeds


def summarise(records: Sequence[StepRecord], *, known: Mapping[int, float] | None = None) -> Figures:
    """Figures over these records. ``known`` are speeds shown before them (`own_speeds`).

    Steps without any timing are left out, unless there are no others.
    """
    records = [r for r in records if any(map(_positive, (*r.seconds, *r.unfinished_s)))] or list(records)
    batch, usual = _mean([record.total for record in records if bounded(record)]), usual_s(records)
    speeds = Speeds({**_first_speeds(records), **(known or {})})
    sums: dict[int, _WorkerSums] = {}
    whole = _FleetSums()
    for stretch in stretches(records):
        lost = lost_time(stretch, usual)
        times = step_times(stretch, lost, speeds, batch=batch)
        whole.add(stretch, times)
        _charge(stretch, lost, times, sums)
        _blame(stretch, times, sums)
    return _figures(records, whole, sums, speeds.newest)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


@dataclass
class _FleetSums:
    """Seconds of all steps together."""

    wall: float = 0.0
    round: float = 0.0
    other: float = 0.0
    ideal: float = 0.0
    equal: float = 0.0
    waited: float = 0.0
    work: float = 0.0
    stuck: float = 0.0
    cut: float = 0.0
    deadlines: int = 0
    closed_without: int = 0
    sizes: set[int] = field(default_factory=set)

    def add(self, stretch: StepStretch, times: StepTimes) -> None:
        for name in ("wall", "round", "other", "ideal", "equal", "waited"):
            setattr(self, name, getattr(self, name) + float(getattr(times, name).sum()))
        self.work += times.mean(times.work)
        self.stuck += times.mean(times.stuck)
        self.cut += times.mean(times.cut)
        self.deadlines += int(stretch.bounded.sum())
        self.closed_without += int(stretch.missed.any(axis=1).sum())
        self.sizes.add(len(stretch.workers))


def _charge(stretch: StepStretch, lost: LostTime, times: StepTimes, sums: dict[int, _WorkerSums]) -> None:
    """Add the stretch to its workers' sums."""
    told = (stretch.samples > 0) & (stretch.seconds > 0)
    stalled = lost.stall_s > 0
    columns: dict[str, Floats | Mask] = {
        "samples": stretch.samples,
        "timed": np.where(told, stretch.samples, 0.0),
        "seconds": np.where(told, stretch.seconds, 0.0),
        "micro_batches": np.where(told, stretch.micro_batches, 0.0),
        "missed": stretch.missed,
        "sat_out": (stretch.samples == 0) & ~stretch.missed,
        "stalls": stalled,
        "stall_s": lost.stall_s,
        "stuck_s": lost.stuck_s,
        "inside_s": lost.inside_s,
        "cut_s": lost.cut_s,
        "waited_s": times.waiting,
        "wall_s": np.where(times.took_part, times.wall[:, None], 0.0),
        "would_hold_s": np.where(times.last[:, None] == np.arange(len(stretch.workers)), times.longer[:, None], 0.0),
    }
    totals = {name: table.sum(axis=0).tolist() for name, table in columns.items()}
    short = _shortfalls(stretch)
    for rank, worker in enumerate(stretch.workers):
        mine = sums.setdefault(worker, _WorkerSums())
        mine.steps += len(stretch.samples)
        mine.shortfalls.append(short[told[:, rank], rank])
        for name, column in totals.items():
            kind = type(getattr(mine, name))  # counts stay whole numbers
            setattr(mine, name, getattr(mine, name) + kind(column[rank]))


def _shortfalls(stretch: StepStretch) -> Floats:
    """By step and worker: seconds the host was too slow by, over those that the machine should have taken."""
    asked = stretch.seconds - stretch.shortfall_s
    return np.divide(stretch.shortfall_s, asked, out=np.zeros_like(asked), where=asked > 0)


def _blame(stretch: StepStretch, times: StepTimes, sums: Mapping[int, _WorkerSums]) -> None:
    """The waiting goes to the account of the one who was last, in rounds that waited for everybody."""
    waiting, count = times.waiting, times.took_part.sum(axis=1)
    last = np.where(times.took_part, waiting, np.inf).argmin(axis=1)
    others_s = waiting.sum(axis=1) / np.maximum(1, count - 1)
    counts = (count > 1) & ~stretch.bounded
    for rank in np.unique(last[counts]).tolist():
        here = counts & (last == rank)
        held = here & (others_s > HELD * times.wall)
        mine = sums[stretch.workers[rank]]
        mine.last += int(here.sum())
        mine.blamed_s += float(others_s[here].sum())
        mine.held += int(held.sum())
        mine.held_s += float(others_s[held].sum())


def _figures(
    records: Sequence[StepRecord], whole: _FleetSums, sums: Mapping[int, _WorkerSums], speeds: Mapping[int, float]
) -> Figures:
    samples = sum(record.total for record in records)
    wall, other = whole.wall, whole.other
    count, spread = _count(records)
    would_hold_s = sum(each.would_hold_s for each in sums.values())
    workers = tuple(
        _worker(
            worker,
            sums[worker],
            speed=speeds.get(worker, 0.0),
            samples=samples,
            steps=len(records),
            wall=wall,
            would_hold_s=would_hold_s,
        )
        for worker in sorted(sums)
    )
    return Figures(
        steps=len(records),
        samples=samples,
        seconds=wall,
        samples_per_s=_over(samples, wall),
        limit=_over(samples, whole.ideal),
        of_limit=_over(whole.ideal, wall),
        equal=_over(samples, whole.equal + other) if whole.ideal else 0.0,
        balanced=_over(samples, whole.ideal + other) if whole.ideal else 0.0,
        work=_over(whole.work, wall),
        stuck=_over(whole.stuck, wall),
        cut=_over(whole.cut, wall),
        waiting=_over(wall - other - whole.work - whole.stuck - whole.cut, wall),
        round=_over(whole.round, wall),
        rest=_over(other - whole.round, wall),
        deadlines=whole.deadlines,
        closed_without=whole.closed_without,
        patient=_over(samples, whole.waited + other) if whole.deadlines else 0.0,
        count=count,
        spread=spread,
        fewest=min(whole.sizes, default=0),
        most=max(whole.sizes, default=0),
        workers=_with_worth(workers, records, whole),
    )


def _with_worth(
    workers: Sequence[WorkerFigures], records: Sequence[StepRecord], whole: _FleetSums
) -> tuple[WorkerFigures, ...]:
    """The workers, with what each adds to those there at the end; the round is that of steps with most workers."""
    if not records:
        return tuple(workers)
    steps, most = len(records), max(whole.sizes)
    step = StepCost(
        samples=sum(record.total for record in records) / steps,
        round_s=_mean([r.round_s for r in records if len(r.workers) == most and _positive(r.round_s)]),
        other_s=max(0.0, whole.other - whole.round) / steps,
        size=most,
    )
    found = adds({worker.worker: worker.speed for worker in workers}, records[-1].workers, step)
    return tuple(replace(worker, adds=found.get(worker.worker, 0.0)) for worker in workers)


def _count(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Mean and relative spread of the steps' counts, without those that end an epoch (or the records)."""
    counts = [record.total for record, after in pairwise(records) if record.epoch == after.epoch]
    mean = _mean(counts)
    squares = sum((count - mean) ** 2 for count in counts)
    return mean, _over(math.sqrt(_over(squares, len(counts))), mean)


def _worker(
    worker: int, sums: _WorkerSums, *, speed: float, samples: int, steps: int, wall: float, would_hold_s: float
) -> WorkerFigures:
    return WorkerFigures(
        worker=worker,
        steps=sums.steps,
        samples=sums.samples,
        seconds=sums.seconds,
        speed=_over(sums.timed, sums.seconds + sums.stuck_s) or speed,
        share=_over(sums.samples, samples),
        waiting=_over(sums.waited_s, sums.wall_s),
        last=_over(sums.last, sums.steps),
        blamed=_over(sums.blamed_s, wall),
        sat_out=sums.sat_out,
        micro_batches=sums.micro_batches,
        shortfall=_median(sums.shortfalls),
        missed=sums.missed,
        stuck=_over(sums.stuck_s + sums.inside_s, sums.wall_s),
        stalls=sums.stalls,
        stall_s=_over(sums.stall_s, sums.stalls),
        cut=_over(sums.cut_s, sums.wall_s),
        held=_over(sums.held, steps),
        held_s=_over(sums.held_s, sums.held),
        would_hold=_over(sums.would_hold_s, would_hold_s),
    )


def _median(pieces: Sequence[Floats]) -> float:
    values = np.concatenate(pieces)
    return float(np.median(values)) if values.any() else 0.0


def _mean(values: Sequence[float]) -> float:
    return _over(sum(values), len(values))


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
