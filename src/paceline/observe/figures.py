"""What step records say about speed: pure sums over records, with no words and no clock.

For step k with samples n_i and own seconds t_i of worker i, wall seconds W:

- own speed v_i = n_i / t_i; a worker that sat out keeps the speed it last showed (or first shows later)
- limit L = sum_i v_i: what the fleet would do if nobody ever waited and the round were free
- equal shares would take max_i (N / n) / v_i, and balanced ones N / L, plus the step's other time W - max_i t_i
- a worker waits max_j t_j - t_i; the wait is charged to the worker with the longest t

Over many steps samples and seconds are summed before they are divided: the fleet's limit is sum N_k / sum (N_k / L_k),
so it stays right when machines drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.records import StepRecord


@dataclass(frozen=True)
class WorkerFigures:
    """One worker over the steps looked at. Ratios are between 0 and 1."""

    worker: int
    samples: int = 0
    seconds: float = 0.0
    """Own compute."""
    speed: float = 0.0
    """Own samples a second while computing; when it did nothing here, what it last showed, or 0."""
    share: float = 0.0
    """Of all samples."""
    waiting: float = 0.0
    """Of the steps it took part in, the part it waited for slower workers."""
    last: float = 0.0
    """Of all steps, those in which it was the last to finish."""
    blamed: float = 0.0
    """Of all time, what the others waited on average for this worker."""
    sat_out: int = 0
    """Steps with no samples for it."""
    micro_batches: int = 0
    shortfall: float = 0.0
    """Emulated: seconds the host was too slow by, over the seconds the machine should have taken."""


@dataclass(frozen=True)
class Figures:
    """The fleet over the steps looked at."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Wall seconds inside the steps."""
    samples_per_s: float = 0.0
    limit: float = 0.0
    """Samples a second: the sum of the workers' own speeds; 0 when no worker was timed."""
    of_limit: float = 0.0
    equal: float = 0.0
    """Samples a second with equal shares on the same record."""
    balanced: float = 0.0
    """Samples a second with shares in proportion to speed and the same other time."""
    work: float = 0.0
    """Of the time, what the average worker computed. ``work + waiting + round + rest`` is 1."""
    waiting: float = 0.0
    round: float = 0.0
    rest: float = 0.0
    """The update, and whatever else happens between the last gradient and the end of the commit."""
    workers: tuple[WorkerFigures, ...] = ()


@dataclass
class _Sums:
    samples: int = 0
    timed: int = 0
    """Of these, the samples whose seconds are known."""
    seconds: float = 0.0
    waited_s: float = 0.0
    wall_s: float = 0.0
    last: int = 0
    blamed_s: float = 0.0
    sat_out: int = 0
    micro_batches: int = 0
    shortfall_s: float = 0.0


@dataclass(frozen=True)
class _StepTimes:
    """One step in seconds: as it was, and as it would have been."""

    wall: float
    slowest: float
    round: float
    ideal: float
    equal: float

    @property
    def other(self) -> float:
        return max(0.0, self.wall - self.slowest)


def own_speeds(records: Iterable[StepRecord], known: Mapping[int, float] | None = None) -> dict[int, float]:
    """Samples a second that each worker showed last, over what was ``known`` before."""
    speeds = dict(known or {})
    for record in records:
        for worker, samples, seconds in zip(record.workers, record.samples, record.seconds):
            if samples > 0 and _positive(seconds):
                speeds[worker] = samples / seconds
    return speeds


def summarise(records: Sequence[StepRecord], *, known: Mapping[int, float] | None = None) -> Figures:
    """Figures over these records. ``known`` are speeds shown before them (`own_speeds`).

    Steps without any timing are left out, unless there are no others.
    """
    records = [r for r in records if any(map(_positive, r.seconds))] or list(records)
    speeds = {**own_speeds(reversed(records)), **(known or {})}
    sums: dict[int, _Sums] = {}
    times = []
    for record in records:
        speeds = own_speeds((record,), speeds)
        step = _step_times(record, speeds)
        times.append(step)
        _charge(record, step, sums)
    return _figures(records, times, sums, speeds)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _step_times(record: StepRecord, speeds: Mapping[int, float]) -> _StepTimes:
    slowest = max((s for s in record.seconds if _positive(s)), default=0.0)
    round_s = record.round_s if _positive(record.round_s) else 0.0
    wall = record.wall_s if _positive(record.wall_s) else slowest + round_s
    here = [speeds[worker] for worker in record.workers if worker in speeds]
    equal_share = record.total / len(record.workers)
    return _StepTimes(
        wall=wall,
        slowest=min(slowest, wall),
        round=min(round_s, max(0.0, wall - slowest)),
        ideal=record.total / sum(here) if here else 0.0,
        equal=equal_share / min(here) if here else 0.0,
    )


def _charge(record: StepRecord, step: _StepTimes, sums: dict[int, _Sums]) -> None:
    """Add the step to each worker's sums; the waiting goes to the account of the one who was last."""
    took_part = []
    for rank, (worker, samples, seconds) in enumerate(zip(record.workers, record.samples, record.seconds)):
        mine = sums.setdefault(worker, _Sums())
        mine.samples += samples
        mine.sat_out += samples == 0
        if samples == 0 or not _positive(seconds):
            continue
        waited = max(0.0, step.slowest - seconds)
        mine.timed += samples
        mine.seconds += seconds
        mine.waited_s += waited
        mine.wall_s += step.wall
        mine.micro_batches += int(_at(record.micro_batches, rank))
        mine.shortfall_s += max(0.0, _at(record.shortfall_s, rank))
        took_part.append((waited, mine))
    if len(took_part) > 1:
        last = min(took_part, key=lambda pair: pair[0])[1]
        last.last += 1
        last.blamed_s += sum(waited for waited, _ in took_part) / (len(took_part) - 1)


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) and math.isfinite(values[index]) else 0


def _figures(
    records: Sequence[StepRecord], times: Sequence[_StepTimes], sums: Mapping[int, _Sums], speeds: Mapping[int, float]
) -> Figures:
    samples = sum(record.total for record in records)
    wall = sum(step.wall for step in times)
    ideal = sum(step.ideal for step in times)
    other = sum(step.other for step in times)
    work = sum(_mean_seconds(record, step) for record, step in zip(records, times))
    round_s = sum(step.round for step in times)
    return Figures(
        steps=len(records),
        samples=samples,
        seconds=wall,
        samples_per_s=_over(samples, wall),
        limit=_over(samples, ideal),
        of_limit=_over(ideal, wall),
        equal=_over(samples, sum(step.equal for step in times) + other) if ideal else 0.0,
        balanced=_over(samples, ideal + other) if ideal else 0.0,
        work=_over(work, wall),
        waiting=_over(wall - other - work, wall),
        round=_over(round_s, wall),
        rest=_over(other - round_s, wall),
        workers=tuple(
            _worker(worker, sums[worker], speed=speeds.get(worker, 0.0), samples=samples, steps=len(records), wall=wall)
            for worker in sorted(sums)
        ),
    )


def _worker(worker: int, sums: _Sums, *, speed: float, samples: int, steps: int, wall: float) -> WorkerFigures:
    return WorkerFigures(
        worker=worker,
        samples=sums.samples,
        seconds=sums.seconds,
        speed=_over(sums.timed, sums.seconds) or speed,
        share=_over(sums.samples, samples),
        waiting=_over(sums.waited_s, sums.wall_s),
        last=_over(sums.last, steps),
        blamed=_over(sums.blamed_s, wall),
        sat_out=sums.sat_out,
        micro_batches=sums.micro_batches,
        shortfall=_over(sums.shortfall_s, sums.seconds - sums.shortfall_s),
    )


def _mean_seconds(record: StepRecord, step: _StepTimes) -> float:
    """Own seconds of the average worker that took part, no longer than the step itself."""
    own = [min(s, step.slowest) for n, s in zip(record.samples, record.seconds) if n > 0 and _positive(s)]
    return sum(own) / len(own) if own else step.slowest


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
