"""Seconds of steps: as they were, and as they would have been at the limit, with equal shares, or had they waited.

For step k with samples n_i and own seconds t_i of worker i, of which a stall took c_i, and s_i seconds stuck besides
(`paceline.observe.analysis.steptimes`); N samples in all, wall seconds W:

- own speed v_i = n_i / (t_i - c_i); a worker that sat out or finished nothing keeps the speed it last showed (or first
  shows later)
- at best the step takes T with sum_i v_i (T - s_i - c_i) = N: nobody ever waits, nothing is cut off, the round is free,
  and time stuck is lost. Without stalls T = N / sum_i v_i. A worker that is stuck half the time is half as fast
- equal shares would take max_i ((N / n) / v_i + S_i), S_i the whole of a stall that began in the step, plus the step's
  other time: W less the time until the last worker was done or the round closed. Balanced ones would take T plus that
- a worker waits until the last is done, and the wait is charged to that one; not in a round with a deadline, which
  waits for nobody
- had a round with a deadline waited for everybody, it would have taken max_i (share_i / v_i + S_i) plus other time,
  with shares of the mean count by the speeds known before (a running mean, as adaptive keeps one): an estimate. Not of
  N: a deadline counts little in a step in which a machine is slow, and waiting would count the whole batch

Stalls, and micro-batches that a deadline cut off, gave no counted samples. A record holds, for each worker, the seconds
that it had spent on an unfinished micro-batch when the round closed. A later record holds by how many seconds that
micro-batch overran. Together they are one `LateMicroBatch`. One that took more than `STALL` times as long as usual was
a stall: the usual time of it was work that was cut off, and for the rest the worker was stuck. A shorter one was merely
cut off. Stalls in micro-batches that counted are found in the step's longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from paceline.observe.analysis.stretches import Floats, Mask, StepStretch
from paceline.records import StepRecord

STALL = 4.0
"""Multiple of the usual time from which a micro-batch is a stall."""
MOST_READ = 2000
"""Steps from which a worker's usual time is taken, spread over the run."""


@dataclass(frozen=True)
class LostTime:
    """The lost seconds of a stretch, by step and worker."""

    stuck_s: Floats
    """Seconds besides the worker's own: at a standstill in a micro-batch whose round closed without it."""
    inside_s: Floats
    """Part of the worker's own seconds: a stall in a micro-batch that counted."""
    cut_s: Floats
    """Seconds besides those that counted: work that is done again."""
    stall_s: Floats
    """Length of a stall that began in this step, however many steps it lasted."""


@dataclass(frozen=True)
class LateMicroBatch:
    """A micro-batch that came too late for its round."""

    pieces: list[tuple[int, float]]
    """Row of a step, and seconds of the micro-batch in that step."""
    took_s: float
    """Seconds from its start to its end, the rounds that passed meanwhile included; 0 when not recorded."""


def usual_s(records: Sequence[StepRecord]) -> dict[int, float]:
    """Return each worker's usual seconds for a micro-batch: the lower quartile of its steps' longest.

    So stalls in most of the steps do not pass for usual. The steps' means are used where the longest is not recorded.
    """
    read = [record for record in records[:: 1 + len(records) // MOST_READ] if record.micro_batches]
    longest: dict[int, list[float]] = {}
    for workers, steps in groupby(read, key=lambda record: record.workers):
        for worker, seconds in zip(workers, zip(*map(_longest_s, steps))):
            longest.setdefault(worker, []).extend(s for s in seconds if 0 < s < np.inf)
    return {worker: _lower_quartile(found) for worker, found in longest.items() if found}


def _longest_s(record: StepRecord) -> Sequence[float]:
    return record.slowest_s or [s / max(1, m) for s, m in zip(record.seconds, record.micro_batches)]


def _lower_quartile(values: list[float]) -> float:
    """Return ``np.percentile(values, 25)``, which takes ten times as long for a few values."""
    values.sort()
    below, part = divmod(len(values) - 1, 4)
    return values[below] + (values[below + 1] - values[below]) * part / 4 if part else values[below]


def lost_time(stretch: StepStretch, usual: Mapping[int, float]) -> LostTime:
    """Return the workers' lost seconds; ``usual``: each worker's usual seconds for a micro-batch."""
    each = np.array([usual.get(worker, 0.0) for worker in stretch.workers])
    inside = _inside(stretch, each)
    # P3's cut-off: a share that is not complete does not count.
    cut = np.where(stretch.missed, stretch.seconds, 0.0)
    stuck, stall = np.zeros_like(inside), inside.copy()
    for rank in np.flatnonzero(stretch.unfinished_s.any(axis=0)):
        for late in late_micro_batches(stretch, int(rank)):
            _charge_late(late, float(each[rank]), cut[:, rank], stuck[:, rank], stall[:, rank])
    return LostTime(stuck_s=stuck, inside_s=inside, cut_s=cut, stall_s=stall)


def _inside(stretch: StepStretch, usual: Floats) -> Floats:
    """Return stalls in micro-batches that counted: far longer than usual, and than the others of the step."""
    slowest, others = np.minimum(stretch.slowest_s, stretch.seconds), stretch.micro_batches - 1
    far_longer = (slowest > STALL * usual) & (usual > 0) & (slowest * others > STALL * (stretch.seconds - slowest))
    return np.where(far_longer & (others > 0) & (stretch.samples > 0), slowest - usual, 0.0)


def late_micro_batches(stretch: StepStretch, rank: int) -> Iterator[LateMicroBatch]:
    """Yield a worker's late micro-batches, each from the round that closed without it to its end."""
    unfinished, late = stretch.unfinished_s[:, rank], stretch.late_s[:, rank]
    began = np.concatenate(([0.0], np.cumsum(stretch.wall_s)))
    open_since, pieces = -1, list[tuple[int, float]]()
    for row in np.flatnonzero((unfinished > 0) | (late > 0)).tolist():
        goes_on = pieces and row == pieces[-1][0] + 1 and not late[row] and not stretch.samples[row, rank]
        if pieces and not goes_on:
            yield _ended(stretch, rank, pieces, row, began[row] - began[open_since] - stretch.deadline_s[open_since])
            pieces = []
        if unfinished[row]:
            open_since = open_since if pieces else row
            pieces.append((row, float(unfinished[row])))
    if pieces:
        yield LateMicroBatch(pieces, 0.0)


def _ended(stretch: StepStretch, rank: int, pieces: list[tuple[int, float]], row: int, ago_s: float) -> LateMicroBatch:
    """Return the late micro-batch that is over by this row, which begins ``ago_s`` after its deadline."""
    late = float(stretch.late_s[row, rank])
    room = stretch.wall_s[row] - stretch.seconds[row, rank] - stretch.unfinished_s[row, rank]
    carried = float(min(max(0.0, late - ago_s), max(0.0, room)))
    first, seconds = pieces[0]
    # Lateness counts from the deadline; not known with P3's cut-off, nor when the records begin in the middle of it.
    complete = late > 0 and stretch.deadline_s[first] > 0 and not stretch.behind[first, rank]
    return LateMicroBatch([*pieces, (row, carried)], seconds + late if complete else 0.0)


def _charge_late(late: LateMicroBatch, usual: float, cut: Floats, stuck: Floats, stall: Floats) -> None:
    """Add a late micro-batch to the columns: the part that was cut off, and the part at a standstill."""
    total = sum(seconds for _, seconds in late.pieces)
    stalled = total > STALL * usual
    left = usual if stalled else total
    for row, seconds in late.pieces:
        part = min(left, seconds)
        left -= part
        cut[row] += part
        stuck[row] += seconds - part
    if stalled:
        stall[late.pieces[0][0]] += max(total, late.took_s) - usual


FOLLOWED = 0.3
"""Part of the way that the running mean of a worker's speed moves towards the newest."""


@dataclass
class Speeds:
    """The workers' samples per second, as far as the stretches read so far have shown."""

    newest: dict[int, float]
    followed: dict[int, float] = field(default_factory=dict)
    """Running means, by which shares would be dealt."""

    def shown(self, stretch: StepStretch, lost: LostTime) -> Floats:
        """Return each worker's speed in each step (NaN before its first), and keep the last for the next stretch."""
        own_s = stretch.seconds - lost.inside_s
        timed = (stretch.samples > 0) & (own_s > 0)
        before = _known(self.newest, stretch.workers)
        speed = np.vstack([before, np.divide(stretch.samples, own_s, out=np.zeros_like(own_s), where=timed)])
        row = np.where(np.vstack([np.ones_like(timed[:1]), timed]), np.arange(len(speed))[:, None], 0)
        filled: Floats = np.take_along_axis(speed, np.maximum.accumulate(row, axis=0), axis=0)
        self.newest |= _finite(stretch.workers, filled[-1])
        return filled[1:]

    def expected(self, stretch: StepStretch, speed: Floats) -> Floats:
        """Return each worker's running mean before each step."""
        mean = _known(self.followed, stretch.workers)
        means = np.empty_like(speed)
        for row, newest in enumerate(speed):
            means[row] = mean = np.where(np.isnan(mean), newest, mean)
            mean = mean + FOLLOWED * (newest - mean)
        self.followed |= _finite(stretch.workers, mean)
        return means


def _known(speeds: dict[int, float], workers: Sequence[int]) -> Floats:
    return np.array([speeds.get(worker, np.nan) for worker in workers])


def _finite(workers: Sequence[int], speeds: Floats) -> dict[int, float]:
    return {worker: float(speed) for worker, speed in zip(workers, speeds) if np.isfinite(speed)}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a stretch's steps; by step and worker in the arrays of two dimensions."""

    wall: Floats
    closed: Floats
    """Seconds until the last worker was done, or the round closed."""
    round: Floats
    ideal: Floats
    """Seconds at the limit; 0 when no speed is known."""
    equal: Floats
    """Seconds with equal shares, without other time."""
    waited: Floats
    """Seconds had the round waited for everybody, without other time."""
    longer: Floats
    """Seconds of ``waited`` beyond what the batch would have taken had nobody waited."""
    last: Floats
    """Rank that the round would have waited for."""
    work: Floats
    stuck: Floats
    cut: Floats
    waiting: Floats
    """Seconds until the last worker was done; 0 where a worker did not take part."""
    took_part: Mask

    @property
    def other(self) -> Floats:
        return np.maximum(0.0, self.wall - self.closed)

    def mean(self, spent: Floats) -> float:
        """Return the seconds of the average worker that took part, summed over the steps."""
        return float(
            (np.where(self.took_part, spent, 0.0).sum(axis=1) / np.maximum(1, self.took_part.sum(axis=1))).sum()
        )


def step_times(stretch: StepStretch, lost: LostTime, speeds: Speeds, *, batch: float) -> StepTimes:
    """Return the times of a stretch; ``batch``: samples that a step with a deadline would have had to wait for."""
    work = np.where(stretch.samples > 0, stretch.seconds, 0.0) - lost.inside_s
    stuck, cut = lost.inside_s + lost.stuck_s, lost.cut_s
    busy = (work + stuck + cut).max(axis=1)
    wall = np.where(stretch.wall_s > 0, stretch.wall_s, busy + stretch.round_s)
    closed = np.minimum(busy, wall)
    took_part = work + stuck + cut > 0
    # A worker's times are no longer than the step.
    work = np.minimum(work, closed[:, None])
    stuck = np.minimum(stuck, closed[:, None] - work)
    cut = np.minimum(cut, closed[:, None] - work - stuck)
    speed = speeds.shown(stretch, lost)
    waited, longer, last = closed, np.zeros_like(closed), np.full_like(closed, -1)
    if stretch.bounded.any():
        would = _had_it_waited(lost, speed, speeds.expected(stretch, speed), batch)
        waited, longer, last = (np.where(stretch.bounded, a, b) for a, b in zip(would, (waited, longer, last)))
    ideal, equal = _at_best(stretch, lost, speed)
    return StepTimes(
        wall=wall,
        closed=closed,
        round=np.minimum(stretch.round_s, np.maximum(0.0, wall - busy)),
        ideal=ideal,
        equal=equal,
        waited=waited,
        longer=longer,
        last=last,
        work=work,
        stuck=stuck,
        cut=cut,
        waiting=np.where(took_part, np.maximum(0.0, closed[:, None] - work - stuck - cut), 0.0),
        took_part=took_part,
    )


def _at_best(stretch: StepStretch, lost: LostTime, speed: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of each step at the limit, and with equal shares."""
    count, together = stretch.samples.sum(axis=1), np.nansum(speed, axis=1)
    idle = np.nansum(speed * (lost.stuck_s + lost.inside_s), axis=1)
    ideal = np.divide(count + idle, together, out=np.zeros_like(count), where=together > 0)
    each = count[:, None] / len(stretch.workers) / speed + lost.stall_s
    return ideal, np.where(np.isnan(each), 0.0, each).max(axis=1)


def _had_it_waited(lost: LostTime, speed: Floats, expected: Floats, batch: float) -> tuple[Floats, Floats, Floats]:
    """Return seconds, those beyond the least possible, and the rank waited for, with shares by the speeds expected."""
    together = np.nansum(expected, axis=1, keepdims=True)
    share = batch * np.divide(expected, together, out=np.zeros_like(expected), where=together > 0)
    done = share / speed + lost.stall_s
    done = np.where(np.isnan(done), 0.0, done)
    waited, at_best = done.max(axis=1), np.nansum(speed, axis=1)
    least = np.divide(batch, at_best, out=np.zeros_like(waited), where=at_best > 0)
    return waited, np.maximum(0.0, waited - least), done.argmax(axis=1).astype(np.float64)
