"""Speed, computed from step records: pure sums over records, with no words and no clock.

The formulas of a single step, and what was lost to stalls and deadlines, are in `steptimes`.
Over many steps samples and seconds are summed before they are divided: the limit is sum N_k / sum T_k, with T_k the
seconds of step k at best, so it stays right when machines drift.

What each worker adds to the fleet's speed, so whether an old machine is worth adding (P1 adds one; the formula is
derived): with V the sum of the workers' speeds, N samples per step, r seconds of the round and o other seconds per
step, a fleet whose shares follow speed does ``N / (N / V + r + o)`` samples per second. A worker adds the speed with it
less the speed without it. The round of a number of workers that was measured takes what it took; of a number that was
never there, what a ring would take, where each of n workers sends ``2 (n - 1) / n`` of the model:
``r_n = r_m (1 - 1/n) / (1 - 1/m)``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from paceline.observe.analysis.steptimes import LostTime, Speeds, StepTimes, lost_time, step_times, usual_s
from paceline.observe.analysis.stretches import Floats, Mask, StepStretch, bounded, stretches
from paceline.records import StepRecord

HELD = 0.10
"""Part of a step that the others must wait for the last worker to have held them up."""


@dataclass(frozen=True)
class WorkerFigures:
    """One worker over a number of steps. Ratios are between 0 and 1."""

    worker: int
    steps: int = 0
    """Steps in which the worker was there."""
    samples: int = 0
    seconds: float = 0.0
    """Seconds of own compute."""
    speed: float = 0.0
    """Samples per second of its own, time stuck included; for a worker that did nothing here, its last speed, or 0."""
    share: float = 0.0
    """Part of all samples."""
    waiting: float = 0.0
    """Part of the time of its steps that the worker waited for slower ones."""
    last: float = 0.0
    """Part of its steps in which the worker was the last to finish."""
    blamed: float = 0.0
    """Part of all time that the others waited on average for this worker."""
    sat_out: int = 0
    """Steps with no samples for this worker."""
    micro_batches: int = 0
    shortfall: float = 0.0
    """Seconds by which the host of an emulated machine was too slow, over the seconds that the machine should take.

    The median over the steps with work, for a single freeze is not a slow host.
    """
    missed: int = 0
    """Rounds that closed without anything from this worker."""
    stuck: float = 0.0
    """Part of the time of its steps that the worker was at a standstill inside a micro-batch."""
    stalls: int = 0
    stall_s: float = 0.0
    """Mean seconds of such a standstill."""
    cut: float = 0.0
    """Part of the time of its steps that was work cut off and done again."""
    held: float = 0.0
    """Part of all steps in which the others waited for it longer than a tenth of the step."""
    held_s: float = 0.0
    """Mean seconds of that wait."""
    would_hold: float = 0.0
    """Part due to this worker of what waiting for everybody would have cost; an estimate."""
    adds: float = 0.0
    """Samples per second that the worker adds to those present at the end; see the top of this file.

    Below 0 it costs more than it brings; 0 also when it was never timed.
    """


@dataclass(frozen=True)
class Figures:
    """The fleet over a number of steps."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Wall seconds inside the steps."""
    samples_per_s: float = 0.0
    limit: float = 0.0
    """Samples per second that the workers' own speeds allow, time stuck included; 0 when no worker was timed."""
    of_limit: float = 0.0
    equal: float = 0.0
    """Samples per second with equal shares on the same record."""
    balanced: float = 0.0
    """Samples per second with shares in proportion to speed and the same other time."""
    work: float = 0.0
    """Part of the time that the average worker computed. ``work + stuck + cut + waiting + round + rest`` is 1."""
    stuck: float = 0.0
    """Part of the time that the average worker was at a standstill inside a micro-batch."""
    cut: float = 0.0
    """Part of the time that the average worker did work which a deadline cut off."""
    waiting: float = 0.0
    round: float = 0.0
    rest: float = 0.0
    """Part for the update, and whatever else happens between the last gradient and the end of the commit."""
    deadlines: int = 0
    """Rounds that could close without everybody."""
    closed_without: int = 0
    """Rounds among these that had nothing from a worker with work to do."""
    patient: float = 0.0
    """Samples per second had every round waited for everybody; an estimate, and 0 without deadlines."""
    count: float = 0.0
    """Mean samples per step; like ``spread`` without the last step of an epoch, which takes what is left."""
    spread: float = 0.0
    """Standard deviation of the samples per step, over their mean."""
    fewest: int = 0
    """Smallest number of workers in a step."""
    most: int = 0
    """Largest number of workers in a step."""
    workers: tuple[WorkerFigures, ...] = ()


Sums = defaultdict[str, float]
"""Seconds and counts by name, over all steps."""


def own_speeds(records: Iterable[StepRecord], known: Mapping[int, float] | None = None) -> dict[int, float]:
    """Return each worker's last samples per second; ``known`` for those who were not timed."""
    speeds = dict(known or {})
    for record in records:
        for worker, samples, seconds in zip(record.workers, record.samples, record.seconds):
            if samples > 0 and _positive(seconds):
                speeds[worker] = samples / seconds
    return speeds


def _first_speeds(records: Iterable[StepRecord]) -> dict[int, float]:
    """Return each worker's first samples per second."""
    speeds: dict[int, float] = {}
    complete: tuple[int, ...] = ()
    for record in records:
        if record.workers != complete:
            speeds = {**own_speeds((record,)), **speeds}
            complete = record.workers if speeds.keys() >= set(record.workers) else ()
    return speeds


def summarise(records: Sequence[StepRecord], *, known: Mapping[int, float] | None = None) -> Figures:
    """Return the figures over these records. ``known`` are the speeds before them (`own_speeds`).

    Steps without any timing are left out, unless there are no others.
    """
    records = [r for r in records if any(map(_positive, (*r.seconds, *r.unfinished_s)))] or list(records)
    batch, usual = _mean([record.total for record in records if bounded(record)]), usual_s(records)
    speeds = Speeds({**_first_speeds(records), **(known or {})})
    fleet, sums = Sums(float), defaultdict[int, Sums](lambda: Sums(float))
    shortfalls = defaultdict[int, list[Floats]](list)
    for stretch in stretches(records):
        lost = lost_time(stretch, usual)
        times = step_times(stretch, lost, speeds, batch=batch)
        _add(stretch, times, fleet)
        _charge(stretch, lost, times, sums)
        _blame(stretch, times, sums)
        _fall_short(stretch, shortfalls)
    typical = {worker: _median(found) for worker, found in shortfalls.items()}
    return _figures(records, fleet, sums, speeds.newest, typical)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _add(stretch: StepStretch, times: StepTimes, fleet: Sums) -> None:
    """Add the stretch to the fleet's sums, with the times of the average worker."""
    for name in ("wall", "round", "other", "ideal", "equal", "waited"):
        fleet[name] += float(getattr(times, name).sum())
    for name in ("work", "stuck", "cut"):
        fleet[name] += times.mean(getattr(times, name))
    fleet["deadlines"] += int(stretch.bounded.sum())
    fleet["closed_without"] += int(stretch.missed.any(axis=1).sum())


def _charge(stretch: StepStretch, lost: LostTime, times: StepTimes, sums: Mapping[int, Sums]) -> None:
    """Add the stretch to its workers' sums."""
    timed = _timed(stretch)
    columns: dict[str, Floats | Mask] = {
        "steps": np.ones_like(timed),
        "samples": stretch.samples,
        "timed": np.where(timed, stretch.samples, 0.0),
        "seconds": np.where(timed, stretch.seconds, 0.0),
        "micro_batches": np.where(timed, stretch.micro_batches, 0.0),
        "missed": stretch.missed,
        "sat_out": (stretch.samples == 0) & ~stretch.missed,
        "stalls": lost.stall_s > 0,
        "stall_s": lost.stall_s,
        "stuck_s": lost.stuck_s,
        "inside_s": lost.inside_s,
        "cut_s": lost.cut_s,
        "waited_s": times.waiting,
        "wall_s": np.where(times.took_part, times.wall[:, None], 0.0),
        "would_hold_s": np.where(times.last[:, None] == np.arange(len(stretch.workers)), times.longer[:, None], 0.0),
    }
    for name, table in columns.items():
        for worker, total in zip(stretch.workers, table.sum(axis=0).tolist()):
            sums[worker][name] += total


def _timed(stretch: StepStretch) -> Mask:
    """Return, by step and worker, whether there was work whose time is known."""
    return (stretch.samples > 0) & (stretch.seconds > 0)


def _fall_short(stretch: StepStretch, shortfalls: Mapping[int, list[Floats]]) -> None:
    """Add, for each step with work, the seconds by which the host was too slow, over those the machine should take."""
    asked = stretch.seconds - stretch.shortfall_s
    short = np.divide(stretch.shortfall_s, asked, out=np.zeros_like(asked), where=asked > 0)
    for worker, column, timed in zip(stretch.workers, short.T, _timed(stretch).T):
        shortfalls[worker].append(column[timed])


def _blame(stretch: StepStretch, times: StepTimes, sums: Mapping[int, Sums]) -> None:
    """Charge the waiting to the worker that was last, in rounds that waited for everybody."""
    waiting, count = times.waiting, times.took_part.sum(axis=1)
    last = np.where(times.took_part, waiting, np.inf).argmin(axis=1)
    others_s = waiting.sum(axis=1) / np.maximum(1, count - 1)
    counts = (count > 1) & ~stretch.bounded
    for rank in np.unique(last[counts]).tolist():
        here = counts & (last == rank)
        held = here & (others_s > HELD * times.wall)
        mine = sums[stretch.workers[rank]]
        mine["last"] += int(here.sum())
        mine["blamed_s"] += float(others_s[here].sum())
        mine["held"] += int(held.sum())
        mine["held_s"] += float(others_s[held].sum())


def _figures(
    records: Sequence[StepRecord],
    fleet: Sums,
    sums: Mapping[int, Sums],
    speeds: Mapping[int, float],
    shortfalls: Mapping[int, float],
) -> Figures:
    samples, steps, sizes = sum(record.total for record in records), len(records), {len(r.workers) for r in records}
    wall, other, ideal = fleet["wall"], fleet["other"], fleet["ideal"]
    count, spread = _count(records)
    would_hold_s = sum(mine["would_hold_s"] for mine in sums.values())

    def worker_figures(worker: int, mine: Sums) -> WorkerFigures:
        return WorkerFigures(
            worker=worker,
            seconds=mine["seconds"],
            speed=_over(mine["timed"], mine["seconds"] + mine["stuck_s"]) or speeds.get(worker, 0.0),
            share=_over(mine["samples"], samples),
            waiting=_over(mine["waited_s"], mine["wall_s"]),
            last=_over(mine["last"], mine["steps"]),
            blamed=_over(mine["blamed_s"], wall),
            shortfall=shortfalls[worker],
            stuck=_over(mine["stuck_s"] + mine["inside_s"], mine["wall_s"]),
            stall_s=_over(mine["stall_s"], mine["stalls"]),
            cut=_over(mine["cut_s"], mine["wall_s"]),
            held=_over(mine["held"], steps),
            held_s=_over(mine["held_s"], mine["held"]),
            would_hold=_over(mine["would_hold_s"], would_hold_s),
            **{name: int(mine[name]) for name in ("steps", "samples", "sat_out", "micro_batches", "missed", "stalls")},
        )

    return Figures(
        steps=steps,
        samples=samples,
        seconds=wall,
        samples_per_s=_over(samples, wall),
        limit=_over(samples, ideal),
        of_limit=_over(ideal, wall),
        equal=_over(samples, fleet["equal"] + other) if ideal else 0.0,
        balanced=_over(samples, ideal + other) if ideal else 0.0,
        work=_over(fleet["work"], wall),
        stuck=_over(fleet["stuck"], wall),
        cut=_over(fleet["cut"], wall),
        waiting=_over(wall - other - fleet["work"] - fleet["stuck"] - fleet["cut"], wall),
        round=_over(fleet["round"], wall),
        rest=_over(other - fleet["round"], wall),
        deadlines=int(fleet["deadlines"]),
        closed_without=int(fleet["closed_without"]),
        patient=_over(samples, fleet["waited"] + other) if fleet["deadlines"] else 0.0,
        count=count,
        spread=spread,
        fewest=min(sizes, default=0),
        most=max(sizes, default=0),
        workers=_with_worth([worker_figures(worker, sums[worker]) for worker in sorted(sums)], records, fleet),
    )


def _with_worth(
    workers: Sequence[WorkerFigures], records: Sequence[StepRecord], fleet: Sums
) -> tuple[WorkerFigures, ...]:
    """Return the workers, with what each adds to those present at the end."""
    if not records:
        return tuple(workers)
    steps, sizes = len(records), {len(record.workers) for record in records}
    step = StepCost(
        samples=sum(record.total for record in records) / steps,
        round_s={size: median(r.round_s for r in records if len(r.workers) == size) for size in sizes},
        other_s=max(0.0, fleet["other"] - fleet["round"]) / steps,
    )
    found = adds({worker.worker: worker.speed for worker in workers}, records[-1].workers, step)
    return tuple(replace(worker, adds=found.get(worker.worker, 0.0)) for worker in workers)


def _count(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Return mean and relative spread of the steps' counts, without steps that end an epoch (or the records)."""
    counts = [record.total for record, after in pairwise(records) if record.epoch == after.epoch]
    mean = _mean(counts)
    squares = sum((count - mean) ** 2 for count in counts)
    return mean, _over(math.sqrt(_over(squares, len(counts))), mean)


def _median(pieces: Sequence[Floats]) -> float:
    values = np.concatenate(pieces)
    return float(np.median(values)) if values.any() else 0.0


def _mean(values: Sequence[float]) -> float:
    return _over(sum(values), len(values))


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class StepCost:
    """The average step of the fleet."""

    samples: float
    round_s: Mapping[int, float]
    """Median seconds of the rounds by number of workers: a few that were held up are not what a worker costs."""
    other_s: float

    def speed(self, speeds: Collection[float]) -> float:
        """Return samples per second of a fleet of workers with these speeds, with shares that follow speed."""
        if not sum(speeds) or not self.samples:
            return 0.0
        return self.samples / (self.samples / sum(speeds) + self._round_s(len(speeds)) + self.other_s)

    def _round_s(self, workers: int) -> float:
        if workers in self.round_s:
            return self.round_s[workers]
        most = max(self.round_s, default=1)
        return self.round_s[most] * (1 - 1 / workers) / (1 - 1 / most) if most > 1 else 0.0


def adds(speeds: Mapping[int, float], present: Collection[int], step: StepCost) -> dict[int, float]:
    """Return the samples per second that each worker adds to those ``present``; below 0 it costs more than it brings.

    >>> step = StepCost(samples=100, round_s={2: 0.1}, other_s=0.0)
    >>> {worker: round(more) for worker, more in adds({0: 100.0, 1: 5.0}, {0, 1}, step).items()}
    {0: 90, 1: -5}
    """
    known = {worker: speed for worker, speed in speeds.items() if speed > 0}

    def gain(worker: int) -> float:
        others = [known[other] for other in present if other in known and other != worker]
        return step.speed([*others, known[worker]]) - step.speed(others)

    return {worker: gain(worker) for worker in known}
