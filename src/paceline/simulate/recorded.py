"""A matrix of seconds from a run's log, or from emulated machines, on which every rule can then be played."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.machines import Machine
from paceline.records import StepRecord

logger = logging.getLogger("paceline.simulate")

Floats = NDArray[np.float64]


def longest_stretch(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the longest sequence of steps with the same workers; of two equal ones, the later."""
    best, start = (0, 0), 0
    for stop in range(1, len(records) + 1):
        if stop == len(records) or records[stop].workers != records[start].workers:
            best = max(best, (start, stop), key=lambda span: (span[1] - span[0], span[0]))
            start = stop
    return records[best[0] : best[1]]


def equal_share_seconds(records: Sequence[StepRecord]) -> Floats:
    """Return each worker's seconds for an equal share of a full batch: ``seconds / samples * batch / workers``.

    A worker that sat out or was not measured counts as fast as when last measured (before its first measurement, as
    then). The seconds for which a worker was stuck at a deadline are added: it took at least those. If the run's
    members changed, the longest stretch with the same members is used, with a warning. A worker that was never measured
    raises ValueError.
    """
    if not records:
        raise ValueError("the run has no steps")
    logged, records = records, longest_stretch(records)
    if len(records) < len(logged):
        taken = f"steps {records[0].step} to {records[-1].step} ({len(records)} of {len(logged)})"
        logger.warning("the run's workers came and went: its longest stretch with the same ones is taken, %s", taken)
    samples, seconds, measured = measurements(records)
    each = np.divide(seconds, samples, out=np.zeros_like(seconds), where=measured)
    return _filled(each, measured) * (_full_batch(records) / len(records[0].workers)) + _stuck_s(records)


def measurements(records: Sequence[StepRecord]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return samples and seconds by step and worker, and where both were measured.

    A worker that was never measured raises ValueError.
    """
    samples = np.array([record.samples for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records], dtype=np.float64)
    measured = (samples > 0) & (seconds > 0) & np.isfinite(seconds)
    if not measured.any(axis=0).all():
        worker = records[0].workers[int(np.argmin(measured.any(axis=0)))]
        raise ValueError(f"worker {worker} was never measured in this run")
    return samples, seconds, measured


def emulated_seconds(fleet: Sequence[Machine], steps: int, *, share: int) -> tuple[Floats, Floats]:
    """Return the seconds of emulated machines for an equal share of ``share`` samples, and their constant costs.

    The costs come on top of the seconds. Both matrices have one row per step and one column per machine.
    """
    if steps < 1:
        raise ValueError(f"machines are played for at least one step, not {steps}")
    each = [[machine.seconds(step, share, begins=False) for machine in fleet] for step in range(steps)]
    costs = [[machine.slowness.cost_s(step) for machine in fleet] for step in range(steps)]
    return np.array(each), np.array(costs)


def _full_batch(records: Sequence[StepRecord]) -> float:
    """Return the largest sample count of steps that waited for everybody, or the median count if none did."""
    waited = [record.total for record in records if record.deadline_s is None and record.wait_for is None]
    return float(max(waited)) if waited else float(np.median([record.total for record in records]))


def _stuck_s(records: Sequence[StepRecord]) -> Floats:
    """Return the seconds that workers without a finished micro-batch spent on one; 0 for the others."""
    rows = np.zeros((len(records), len(records[0].workers)))
    for row, record in zip(rows, records):
        if record.unfinished_s:
            row[:] = np.where(np.array(record.samples) == 0, record.unfinished_s, 0.0)
    return np.where(np.isfinite(rows), rows, 0.0)


def _filled(each: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Fill gaps with the value before them, and gaps at the start with the first value."""
    step = np.where(measured, np.arange(len(each))[:, None], -1)
    source = np.maximum.accumulate(step, axis=0)
    source = np.where(source < 0, np.argmax(measured, axis=0), source)
    return np.take_along_axis(each, source, axis=0)
