"""The timeline of a run: a step's record as slices of time, for each worker.

A record holds seconds, not moments. They are laid out in the order in which a step runs: the end of a late micro-batch
of an earlier step, own compute, an unfinished micro-batch, waiting until the last worker has arrived, the round, and
the update with whatever else the step holds. The slices of a worker follow one another and end with the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.records import StepRecord

KINDS = {
    "compute": "own compute",
    "late": "late: unfinished when the round closed",
    "waiting": "waiting for the last worker",
    "round": "the round",
    "rest": "update and the rest",
}
"""Kinds of slices, with their descriptions."""


class Slice(NamedTuple):
    """One slice of a worker's time; a tuple, for every message of the live page has thousands of them."""

    worker: int
    kind: str
    """One of `KINDS`."""
    start: float
    """Unix seconds, like ``stop``."""
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class TimedStep:
    """One step with its moments on the clock."""

    record: StepRecord
    start: float
    stop: float
    arrival: float
    """Moment when the last worker had arrived, or the round closed without it."""
    slices: tuple[Slice, ...]

    @property
    def deadline(self) -> float | None:
        seconds = self.record.deadline_s
        return None if seconds is None or not math.isfinite(seconds) else self.start + seconds

    @property
    def last(self) -> int | None:
        """Return the worker that the others waited for, which was busy longest; None when only one was busy."""
        busy: dict[int, float] = {}
        for piece in self.slices:
            if piece.kind in ("compute", "late"):
                busy[piece.worker] = max(busy.get(piece.worker, 0.0), piece.stop)
        return max(busy, key=lambda worker: busy[worker]) if len(busy) > 1 else None


def lay_out(records: Iterable[StepRecord], times: Iterable[float]) -> Iterator[TimedStep]:
    """Yield each step on the clock, from when it was logged (its end); a step without a time follows the one before."""
    clock = 0.0
    overdue: dict[int, float] = {}
    for record, logged in zip(records, times):
        length = _length(record)
        stop = logged if math.isfinite(logged) else clock + length
        start = max(clock, stop - length)
        clock = stop = max(stop, start)
        yield _timed(record, start, stop, overdue)


def _length(record: StepRecord) -> float:
    own = max((s for s in record.seconds if math.isfinite(s)), default=0.0)
    return record.wall_s if math.isfinite(record.wall_s) and record.wall_s > 0 else own + max(0.0, record.round_s)


def _timed(record: StepRecord, start: float, stop: float, overdue: dict[int, float]) -> TimedStep:
    """Return one step on the clock.

    ``overdue``: since when each worker is at work on a micro-batch whose round has closed; kept from step to step.
    """
    latest = max(start, stop - max(0.0, record.round_s))
    begun: list[Slice] = []
    ends: list[float] = []
    for rank, worker in enumerate(record.workers):
        mine = list(_busy(record, rank, worker, start, latest, overdue))
        begun += mine
        ends.append(max((piece.stop for piece in mine), default=start))
    arrival = max(ends, default=start)
    after_round = min(stop, arrival + max(0.0, record.round_s))
    rest = [
        Slice(worker, kind, a, b)
        for worker, end in zip(record.workers, ends)
        for kind, a, b in (("waiting", end, arrival), ("round", arrival, after_round), ("rest", after_round, stop))
    ]
    return TimedStep(record, start, stop, arrival, tuple(piece for piece in begun + rest if piece.seconds > 0))


def _busy(
    record: StepRecord, rank: int, worker: int, start: float, latest: float, overdue: dict[int, float]
) -> Iterator[Slice]:
    """Yield the slices before a worker's arrival, none later than ``latest``."""
    now = start
    unfinished, late = _at(record.unfinished_s, rank), _at(record.late_s, rank)
    since = overdue.pop(worker, None)
    if since is not None and late > 0:  # the late micro-batch ended in this step
        ended = min(latest, max(start, since + late))
        yield Slice(worker, "late", start, ended)
        now = ended
    own = _at(record.seconds, rank)
    if own > 0:
        yield Slice(worker, "compute", now, min(latest, now + own))
        now = min(latest, now + own)
    if unfinished > 0:
        overdue[worker] = since if since is not None and not late else _closes(record, start, latest)
        yield Slice(worker, "late", now, min(latest, now + unfinished))


def _closes(record: StepRecord, start: float, latest: float) -> float:
    return latest if record.deadline_s is None else min(latest, start + record.deadline_s)


def _at(values: Sequence[float], rank: int) -> float:
    value = values[rank] if rank < len(values) else 0.0
    return max(0.0, value) if math.isfinite(value) else 0.0
