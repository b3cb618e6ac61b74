"""Seconds that gave no counted samples: stalls, and micro-batches that a deadline cut off.

A record holds, for each worker, the seconds that it had spent on an unfinished micro-batch when the round closed. A
later record holds by how many seconds that micro-batch overran. Together they are one `LateMicroBatch`.
One that took more than `STALL` times as long as usual was a stall: the usual time of it was work that was cut off, and
for the rest the worker was stuck. A shorter one was merely cut off. Stalls in micro-batches that counted are found in
the step's longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paceline.observe.analysis.stretches import Floats, StepStretch
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
