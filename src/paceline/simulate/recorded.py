"""A run's own log as a matrix of seconds, so that every rule can be tried on what really happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.records import StepRecord

Floats = NDArray[np.float64]


def equal_share_seconds(records: Sequence[StepRecord]) -> Floats:
    """Each worker's seconds for an equal share of a full batch: ``seconds / samples * batch / workers``.

    Where a worker sat out or was not measured it is as fast as when last measured (before its first time: as then). One
    that a deadline found stuck took the seconds it was stuck besides, at least. A run whose members changed, or with a
    worker that never worked, is refused.
    """
    if not records:
        raise ValueError("the run has no steps")
    workers = records[0].workers
    if changed := next((record for record in records if record.workers != workers), None):
        raise ValueError(
            f"the run's workers changed at step {changed.step}: only a fleet that stays the same is simulated"
        )
    samples = np.array([record.samples for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records], dtype=np.float64)
    told = (samples > 0) & (seconds > 0) & np.isfinite(seconds)
    if not told.any(axis=0).all():
        raise ValueError(f"worker {workers[int(np.argmin(told.any(axis=0)))]} was never measured in this run")
    each = np.divide(seconds, samples, out=np.zeros_like(seconds), where=told)
    return _filled(each, told) * (_full_batch(records) / len(workers)) + _stuck_s(records)


def _full_batch(records: Sequence[StepRecord]) -> float:
    """The largest count of the steps that waited for everybody; with deadlines counts vary, so then the median."""
    waited = [record.total for record in records if record.deadline_s is None and record.wait_for is None]
    return float(max(waited)) if waited else float(np.median([record.total for record in records]))


def _stuck_s(records: Sequence[StepRecord]) -> Floats:
    """Seconds spent on a micro-batch by workers that finished none; 0 for the others."""
    rows = np.zeros((len(records), len(records[0].workers)))
    for row, record in zip(rows, records):
        if record.unfinished_s:
            row[:] = np.where(np.array(record.samples) == 0, record.unfinished_s, 0.0)
    return np.where(np.isfinite(rows), rows, 0.0)


def _filled(each: Floats, told: NDArray[np.bool_]) -> Floats:
    """Gaps take the value before them; those at the start take the first one."""
    step = np.where(told, np.arange(len(each))[:, None], -1)
    source = np.maximum.accumulate(step, axis=0)
    source = np.where(source < 0, np.argmax(told, axis=0), source)
    return np.take_along_axis(each, source, axis=0)
