"""Down-sampling that keeps the extremes: a run of any length in a bounded number of buckets.

Each bucket stands for a few consecutive steps. Sums (samples, seconds) are added, so that ratios stay exact; the lowest
and the highest speed and loss of a single step are kept, so that one bad step in a million is still on the picture.
When `CAPACITY` buckets are full, neighbours are merged and every bucket holds twice as many steps. Memory depends on
the number of workers, never on the number of steps: the report and the live page read the same buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from paceline.observe.analysis.stretches import Floats, bounded
from paceline.records import StepRecord

CAPACITY = 800
"""The most buckets: about as many as a picture has columns of pixels."""


@dataclass(frozen=True)
class StepBucket:
    """A few consecutive steps. Arrays have one number per worker, in the run's order of workers."""

    first: int
    last: int
    """Step numbers, both included."""
    steps: int
    t: float
    """Unix seconds when the last step was logged; NaN when not known."""
    samples: float
    wall_s: float
    ideal_s: float
    """Seconds the same samples would take at the limit; 0 when no worker was timed."""
    speed: tuple[float, float]
    """Samples per second of the slowest and of the fastest single step."""
    loss: tuple[float, float, float]
    """Lowest, mean and highest loss; NaN when there was none."""
    losses: int
    """Number of steps with a loss."""
    expected_s: float
    """Seconds that the pacer expected of the last worker, summed over the steps with a forecast."""
    took_s: float
    """Seconds that the last worker took, summed over the same steps."""
    undone: float
    """Samples dealt and not counted in their step."""
    sums: Mapping[str, float]
    done: Floats
    busy_s: Floats
    present: Floats
    """Number of steps in which the worker was there."""
    idle: Floats
    """Number of steps in which no samples were dealt to the worker."""
    missed: Floats
    """Number of steps whose round closed without anything from it, as in `paceline.observe.analysis.figures`."""
    stuck_s: Floats
    """Seconds that the worker had spent on micro-batches that were unfinished when a round closed."""


PER_WORKER = [field.name for field in fields(StepBucket) if field.type == "Floats"]
ADDED = ["steps", "samples", "wall_s", "ideal_s", "losses", "expected_s", "took_s", "undone", *PER_WORKER]


@dataclass
class DownsampledRun:
    """A run that grows record by record; `buckets` returns it so far."""

    capacity: int = CAPACITY
    columns: dict[int, int] = field(default_factory=dict)
    """Each worker's index in the arrays, in order of appearance."""
    stride: int = 1
    """Steps per bucket."""
    tail: int = 0
    """Newest steps that stay out of the buckets: those of an elastic run may turn out to be void."""
    _full: list[StepBucket] = field(default_factory=list)
    _new: list[tuple[StepRecord, float]] = field(default_factory=list)
    _speeds: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def from_records(cls, records: Iterable[StepRecord], times: Iterable[float]) -> DownsampledRun:
        run = cls()
        for record, t in zip(records, times):
            run.add(record, t)
        return run

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self.columns)

    def add(self, record: StepRecord, t: float = math.nan) -> None:
        """Add a step that was logged at Unix seconds ``t``."""
        for worker in record.workers:
            self.columns.setdefault(worker, len(self.columns))
        self._new.append((record, t))
        if len(self._new) < self.stride + self.tail:
            return
        steps, self._new = self._new[: self.stride], self._new[self.stride :]
        bucket, self._speeds = bucket_of(steps, self.columns, self._speeds)
        self._full.append(bucket)
        if len(self._full) >= self.capacity:
            self._full = [merge(*pair) for pair in zip(self._full[::2], self._full[1::2], strict=True)]
            self.stride *= 2

    def drop(self, count: int) -> None:
        """Remove the newest ``count`` steps, which turned out to be void; those in a full bucket stay."""
        del self._new[max(0, len(self._new) - count) :]

    def buckets(self) -> list[StepBucket]:
        """Return all steps so far; the newest bucket may not be full yet, and all arrays have one length."""
        newest, speeds = [], self._speeds
        for start in range(0, len(self._new), self.stride):
            bucket, speeds = bucket_of(self._new[start : start + self.stride], self.columns, speeds)
            newest.append(bucket)
        size = len(self.columns)
        return [_widened(bucket, size) for bucket in self._full + newest]


def bucket_of(
    steps: Sequence[tuple[StepRecord, float]], columns: Mapping[int, int], speeds: Floats
) -> tuple[StepBucket, Floats]:
    """Return steps as one bucket, and the workers' last speeds; ``speeds`` are those before the steps (0: none)."""
    records = [record for record, _ in steps]
    present, done, planned, busy_s, unfinished_s, forecast_s = _tables(records, columns)
    timed = (done > 0) & (busy_s > 0)
    own = np.divide(done, busy_s, out=np.zeros_like(done), where=timed)
    shown = _carried(own, np.pad(speeds, (0, len(columns) - len(speeds))))
    total, limit = done.sum(axis=1), (shown * present).sum(axis=1)
    wall = np.array([r.wall_s if r.wall_s > 0 else max(busy.max(), 0.0) for r, busy in zip(records, busy_s)])
    speed = np.divide(total, wall, out=np.zeros_like(wall), where=wall > 0)
    closes_without = np.array([bounded(record) for record in records])[:, None]
    losses = np.array([r.loss for r in records if r.loss is not None and math.isfinite(r.loss)])
    expected = np.where(np.isfinite(forecast_s) & timed, forecast_s, 0.0).max(axis=1)
    bucket = StepBucket(
        first=records[0].step,
        last=records[-1].step,
        steps=len(records),
        t=steps[-1][1],
        samples=float(total.sum()),
        wall_s=float(wall.sum()),
        ideal_s=float(np.divide(total, limit, out=np.zeros_like(total), where=limit > 0).sum()),
        speed=(float(speed.min()), float(speed.max())),
        loss=(float(losses.min()), float(losses.mean()), float(losses.max())) if len(losses) else (math.nan,) * 3,
        losses=len(losses),
        expected_s=float(expected.sum()),
        took_s=float(busy_s.max(axis=1, initial=0.0)[expected > 0].sum()),
        undone=float(np.maximum(planned - done, 0.0).sum()),
        sums=_summed(record.sums for record in records),
        done=done.sum(axis=0),
        busy_s=busy_s.sum(axis=0),
        present=present.sum(axis=0),
        idle=((present > 0) & (planned == 0) & (done == 0)).sum(axis=0).astype(np.float64),
        missed=(closes_without & (planned > 0) & (done == 0)).sum(axis=0).astype(np.float64),
        stuck_s=np.minimum(unfinished_s, wall[:, None]).sum(axis=0),
    )
    return bucket, shown[-1]


def merge(a: StepBucket, b: StepBucket) -> StepBucket:
    """Return two neighbours as one: sums are added, extremes kept."""
    a, losses = _widened(a, len(b.done)), a.losses + b.losses
    means = [bucket.loss[1] * bucket.losses for bucket in (a, b) if bucket.losses]
    added = {name: getattr(a, name) + getattr(b, name) for name in ADDED}
    # fmin and fmax ignore the NaN of a bucket without a loss
    lowest, highest = float(np.fmin(a.loss[0], b.loss[0])), float(np.fmax(a.loss[2], b.loss[2]))
    return StepBucket(
        first=a.first,
        last=b.last,
        t=b.t,
        speed=(min(a.speed[0], b.speed[0]), max(a.speed[1], b.speed[1])),
        loss=(lowest, sum(means) / losses if losses else math.nan, highest),
        sums=_summed((a.sums, b.sums)),
        **added,
    )


def _widened(bucket: StepBucket, size: int) -> StepBucket:
    """Return the bucket with zeros for the workers that came later."""
    missing = size - len(bucket.done)
    if not missing:
        return bucket
    wider = {name: np.pad(getattr(bucket, name), (0, missing)) for name in PER_WORKER}
    return StepBucket(**{**vars(bucket), **wider})


def _tables(records: Sequence[StepRecord], columns: Mapping[int, int]) -> tuple[Floats, ...]:
    """Return steps x workers: present (1 or 0), samples, planned, seconds, unfinished seconds, forecast (NaN: none)."""
    columns_of: list[tuple[list[Sequence[float]], float]] = [
        ([(1.0,) * len(r.workers) for r in records], 0.0),
        ([r.samples for r in records], 0.0),
        ([_or_else(r.planned, r.samples) for r in records], 0.0),
        ([r.seconds for r in records], 0.0),
        ([_or_else(r.unfinished_s, (0.0,) * len(r.workers)) for r in records], 0.0),
        ([_or_else(r.forecast_s or (), (math.nan,) * len(r.workers)) for r in records], math.nan),
    ]
    alike = all(record.workers == records[0].workers for record in records)
    tables = []
    for rows, empty in columns_of:
        table = np.full((len(records), len(columns)), empty)
        if alike:
            table[:, [columns[worker] for worker in records[0].workers]] = rows
        else:
            for row, record in enumerate(records):
                table[row, [columns[worker] for worker in record.workers]] = rows[row]
        tables.append(np.nan_to_num(table, nan=empty, posinf=empty, neginf=empty))
    return tuple(tables)


def _or_else(values: Sequence[float], otherwise: Sequence[float]) -> Sequence[float]:
    """Return the values when there is one per worker, else the others: a log from elsewhere may lack values."""
    return values if len(values) == len(otherwise) else otherwise


def _carried(own: Floats, before: Floats) -> Floats:
    """Return speeds with every gap (0) filled by the value above it; ``before`` is above the first row."""
    rows = np.vstack((before, own))
    source = np.maximum.accumulate(np.where(rows > 0, np.arange(len(rows))[:, None], 0), axis=0)
    return np.take_along_axis(rows, source, axis=0)[1:]


def _summed(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in figures:
        for name, value in each.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                total[name] = total.get(name, 0.0) + value
    return total
