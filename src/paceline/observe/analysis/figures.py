"""What step records say about speed: pure sums over records, with no words and no clock.

The formulas of a single step are in `steptimes`, what was lost to stalls and deadlines in `lateness`.
Over many steps samples and seconds are summed before they are divided: the limit is sum N_k / sum T_k, with T_k the
seconds of step k at best, so it stays right when machines drift.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

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
    """Samples a second that it adds to those there at the end, with shares by speed, and with the round's cost as it is
    with and without it (`worth`). Below 0, it costs more than it brings; 0 too when it was never timed."""


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


Sums = defaultdict[str, float]
"""Seconds and counts by name, over all steps."""


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
    whole, sums = Sums(float), defaultdict[int, Sums](lambda: Sums(float))
    shortfalls = defaultdict[int, list[Floats]](list)
    for stretch in stretches(records):
        lost = lost_time(stretch, usual)
        times = step_times(stretch, lost, speeds, batch=batch)
        _add(stretch, times, whole)
        _charge(stretch, lost, times, sums)
        _blame(stretch, times, sums)
        _fall_short(stretch, shortfalls)
    typical = {worker: _median(found) for worker, found in shortfalls.items()}
    return _figures(records, whole, sums, speeds.newest, typical)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _add(stretch: StepStretch, times: StepTimes, whole: Sums) -> None:
    """Add the stretch to the fleet's sums; of each worker's time, that of the average one."""
    for name in ("wall", "round", "other", "ideal", "equal", "waited"):
        whole[name] += float(getattr(times, name).sum())
    for name in ("work", "stuck", "cut"):
        whole[name] += times.mean(getattr(times, name))
    whole["deadlines"] += int(stretch.bounded.sum())
    whole["closed_without"] += int(stretch.missed.any(axis=1).sum())


def _charge(stretch: StepStretch, lost: LostTime, times: StepTimes, sums: Mapping[int, Sums]) -> None:
    """Add the stretch to its workers' sums."""
    told = _told(stretch)
    columns: dict[str, Floats | Mask] = {
        "steps": np.ones_like(told),
        "samples": stretch.samples,
        "timed": np.where(told, stretch.samples, 0.0),
        "seconds": np.where(told, stretch.seconds, 0.0),
        "micro_batches": np.where(told, stretch.micro_batches, 0.0),
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


def _told(stretch: StepStretch) -> Mask:
    """By step and worker: whether there was work, and how long it took."""
    return (stretch.samples > 0) & (stretch.seconds > 0)


def _fall_short(stretch: StepStretch, shortfalls: Mapping[int, list[Floats]]) -> None:
    """Of each step with work: seconds the host was too slow by, over those that the machine should have taken."""
    asked = stretch.seconds - stretch.shortfall_s
    short = np.divide(stretch.shortfall_s, asked, out=np.zeros_like(asked), where=asked > 0)
    for worker, column, told in zip(stretch.workers, short.T, _told(stretch).T):
        shortfalls[worker].append(column[told])


def _blame(stretch: StepStretch, times: StepTimes, sums: Mapping[int, Sums]) -> None:
    """The waiting goes to the account of the one who was last, in rounds that waited for everybody."""
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
    whole: Sums,
    sums: Mapping[int, Sums],
    speeds: Mapping[int, float],
    shortfalls: Mapping[int, float],
) -> Figures:
    samples, steps, sizes = sum(record.total for record in records), len(records), {len(r.workers) for r in records}
    wall, other, ideal = whole["wall"], whole["other"], whole["ideal"]
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
        equal=_over(samples, whole["equal"] + other) if ideal else 0.0,
        balanced=_over(samples, ideal + other) if ideal else 0.0,
        work=_over(whole["work"], wall),
        stuck=_over(whole["stuck"], wall),
        cut=_over(whole["cut"], wall),
        waiting=_over(wall - other - whole["work"] - whole["stuck"] - whole["cut"], wall),
        round=_over(whole["round"], wall),
        rest=_over(other - whole["round"], wall),
        deadlines=int(whole["deadlines"]),
        closed_without=int(whole["closed_without"]),
        patient=_over(samples, whole["waited"] + other) if whole["deadlines"] else 0.0,
        count=count,
        spread=spread,
        fewest=min(sizes, default=0),
        most=max(sizes, default=0),
        workers=_with_worth([worker_figures(worker, sums[worker]) for worker in sorted(sums)], records, whole),
    )


def _with_worth(
    workers: Sequence[WorkerFigures], records: Sequence[StepRecord], whole: Sums
) -> tuple[WorkerFigures, ...]:
    """The workers, with what each adds to those there at the end."""
    if not records:
        return tuple(workers)
    steps, sizes = len(records), {len(record.workers) for record in records}
    step = StepCost(
        samples=sum(record.total for record in records) / steps,
        round_s={size: median(r.round_s for r in records if len(r.workers) == size) for size in sizes},
        other_s=max(0.0, whole["other"] - whole["round"]) / steps,
    )
    found = adds({worker.worker: worker.speed for worker in workers}, records[-1].workers, step)
    return tuple(replace(worker, adds=found.get(worker.worker, 0.0)) for worker in workers)


def _count(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Mean and relative spread of the steps' counts, without those that end an epoch (or the records)."""
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
