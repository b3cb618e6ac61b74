"""Seconds that gave no counted samples: stalls, and micro-batches that a deadline cut off.

A record tells, for each worker, the seconds it had spent on an unfinished micro-batch when the round closed, and later,
when that one ended, by how much it had overrun. Put together they are one `LateMicroBatch`.
One that took more than `STALL` times as long as usual was a stall: the usual time of it was work that was cut off, the
rest the worker was stuck. A shorter one was merely cut off. Stalls in micro-batches that counted are found in the
step's longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paceline.observe.analysis.stretches import Floats, StepStretch
from paceline.records import StepRecord

STALL = 4.0
"""A micro-batch that takes so many usual ones is a stall."""
MOST_READ = 2000
"""Steps from which a worker's usual micro-batch is taken, spread over all."""


@dataclass(frozen=True)
class LostTime:
    """A stretch's lost seconds, by step and worker."""

    stuck_s: Floats
    """Beyond the worker's own seconds: at a standstill in a micro-batch whose round closed without it."""
    inside_s: Floats
    """Of the worker's own seconds: a stall in a micro-batch that counted."""
    cut_s: Floats
    """Beyond the seconds that counted: work that is done again."""
    stall_s: Floats
    """The whole length of a stall that began in this step, however many steps it lasted."""


@dataclass(frozen=True)
class LateMicroBatch:
    """A micro-batch that came too late for its round."""

    pieces: list[tuple[int, float]]
    """Step's row, and seconds of it."""
    took_s: float
    """From its start to its end, the rounds that passed meanwhile included, where the record tells; else 0."""


def usual_s(records: Sequence[StepRecord]) -> dict[int, float]:
    """Each worker's usual seconds for a micro-batch: the lower quartile of its steps' longest, so that stalls in most
    of the steps do not pass for usual; of their means, where the record does not say the longest."""
    read = [record for record in records[:: 1 + len(records) // MOST_READ] if record.micro_batches]
    longest: dict[int, list[float]] = {}
    for workers, steps in groupby(read, key=lambda record: record.workers):
        for worker, seconds in zip(workers, zip(*map(_longest_s, steps))):
            longest.setdefault(worker, []).extend(s for s in seconds if 0 < s < np.inf)
    return {worker: _lower_quartile(found) for worker, found in longest.items() if found}


def _longest_s(record: StepRecord) -> Sequence[float]:
    return record.slowest_s or [s / max(1, m) for s, m in zip(record.seconds, record.micro_batches)]


def _lower_quartile(values: list[float]) -> float:
    """As ``np.percentile(values, 25)``, which takes ten times as long for a few values."""
    values.sort()
    below, part = divmod(len(values) - 1, 4)
    return values[below] + (values[below + 1] - values[below]) * part / 4 if part else values[below]


def lost_time(stretch: StepStretch, usual: Mapping[int, float]) -> LostTime:
    """What the workers lost; ``usual``: their usual seconds for a micro-batch."""
    each = np.array([usual.get(worker, 0.0) for worker in stretch.workers])
    inside = _inside(stretch, each)
    # P3's cut-off: a share that is not whole does not count.
    cut = np.where(stretch.missed, stretch.seconds, 0.0)
    stuck, stall = np.zeros_like(inside), inside.copy()
    for rank in np.flatnonzero(stretch.unfinished_s.any(axis=0)):
        for late in late_micro_batches(stretch, int(rank)):
            _charge_late(late, float(each[rank]), cut[:, rank], stuck[:, rank], stall[:, rank])
    return LostTime(stuck_s=stuck, inside_s=inside, cut_s=cut, stall_s=stall)


def _inside(stretch: StepStretch, usual: Floats) -> Floats:
    """A stall in a micro-batch that counted: far longer than usual, and than the others of the step."""
    slowest, others = np.minimum(stretch.slowest_s, stretch.seconds), stretch.micro_batches - 1
    far_longer = (slowest > STALL * usual) & (usual > 0) & (slowest * others > STALL * (stretch.seconds - slowest))
    return np.where(far_longer & (others > 0) & (stretch.samples > 0), slowest - usual, 0.0)


def late_micro_batches(stretch: StepStretch, rank: int) -> Iterator[LateMicroBatch]:
    """A worker's late micro-batches, each from the round that closed without it to its end."""
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
    """The late micro-batch is over by this row, which begins ``ago_s`` after its deadline."""
    late = float(stretch.late_s[row, rank])
    room = stretch.wall_s[row] - stretch.seconds[row, rank] - stretch.unfinished_s[row, rank]
    carried = float(min(max(0.0, late - ago_s), max(0.0, room)))
    first, seconds = pieces[0]
    # Lateness counts from the deadline; not with P3's cut-off, nor when the records begin in its middle.
    whole = late > 0 and stretch.deadline_s[first] > 0 and not stretch.behind[first, rank]
    return LateMicroBatch([*pieces, (row, carried)], seconds + late if whole else 0.0)


def _charge_late(late: LateMicroBatch, usual: float, cut: Floats, stuck: Floats, stall: Floats) -> None:
    """Charge a late micro-batch: what of it was cut off, and what a standstill."""
    whole = sum(seconds for _, seconds in late.pieces)
    stalled = whole > STALL * usual
    left = usual if stalled else whole
    for row, seconds in late.pieces:
        part = min(left, seconds)
        left -= part
        cut[row] += part
        stuck[row] += seconds - part
    if stalled:
        stall[late.pieces[0][0]] += max(whole, late.took_s) - usual
