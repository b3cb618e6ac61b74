"""Records as arrays: stretches of steps with the same workers, one row per step, one column per worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from paceline.observe.log.sanitise import PER_WORKER
from paceline.records import StepRecord

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_STEPS = 8192
"""The most steps of a stretch: a longer one is cut, so that a long run needs little memory at a time."""


def bounded(record: StepRecord) -> bool:
    """Return whether the record's round could close without everybody."""
    return record.deadline_s is not None or record.wait_for is not None


def missed(record: StepRecord, rank: int) -> bool:
    """Return whether the round closed without anything from this worker, which had work to do."""
    return bounded(record) and record.samples[rank] == 0 and record.planned[rank] > 0


@dataclass(frozen=True)
class StepStretch:
    """A stretch of steps as arrays. Numbers that are missing or make no sense are 0."""

    workers: tuple[int, ...]
    bounded: Mask
    """Whether the round of each step could close without everybody."""
    planned: Floats
    """Samples by step and worker; the arrays down to ``shortfall_s`` have the same shape."""
    samples: Floats
    seconds: Floats
    micro_batches: Floats
    slowest_s: Floats
    unfinished_s: Floats
    behind: Floats
    late_s: Floats
    shortfall_s: Floats
    wall_s: Floats
    """One number per step, as in the arrays below."""
    round_s: Floats
    deadline_s: Floats

    @property
    def missed(self) -> Mask:
        mask: Mask = self.bounded[:, None] & (self.samples == 0) & (self.planned > 0)
        return mask


FIGURES = [field.name for field in fields(StepStretch) if field.name not in ("workers", "bounded")]
"""Fields of a record that become an array."""


def stretches(records: Sequence[StepRecord]) -> Iterator[StepStretch]:
    start = 0
    for stop in range(1, len(records) + 1):
        if stop == len(records) or stop - start == MOST_STEPS or records[stop].workers != records[start].workers:
            yield _stretch(records[start:stop])
            start = stop


def _stretch(records: Sequence[StepRecord]) -> StepStretch:
    size = len(records[0].workers)

    def table(name: str) -> Floats:
        rows: list[Sequence[float]] = [getattr(record, name) for record in records]
        if not any(rows):  # most runs leave some fields out
            return np.zeros((len(rows), size))
        if any(len(row) != size for row in rows):
            rows = [[*row[:size], *([0.0] * (size - len(row)))] for row in rows]
        return _sound(np.array(rows, dtype=np.float64))

    def column(name: str) -> Floats:
        return _sound(np.array([getattr(record, name) or 0.0 for record in records], dtype=np.float64))

    figures = {name: table(name) if name in PER_WORKER else column(name) for name in FIGURES}
    return StepStretch(records[0].workers, np.array([bounded(record) for record in records]), **figures)


def _sound(values: Floats) -> Floats:
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)
