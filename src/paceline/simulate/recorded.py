"""A run's own log, or emulated machines, as a matrix of seconds: every rule can be tried on what really happened, or
on the very machines of an experiment."""

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
    """The longest run of steps with the same workers; the later of two."""
    best, start = (0, 0), 0
    for stop in range(1, len(records) + 1):
        if stop == len(records) or records[stop].workers != records[start].workers:
            best = max(best, (start, stop), key=lambda span: (span[1] - span[0], span[0]))
            start = stop
    return records[best[0] : best[1]]


def equal_share_seconds(records: Sequence[StepRecord]) -> Floats:
    """Each worker's seconds for an equal share of a full batch: ``seconds / samples * batch / workers``.

    Where a worker sat out or was not measured it is as fast as when last measured (before its first time: as then). One
    that a deadline found stuck took the seconds it was stuck besides, at least. Of a run whose members changed the
    longest stretch with the same ones is taken, and said so. A worker that never worked is refused.
    """
    if not records:
        raise ValueError("the run has no steps")
    whole, records = records, longest_stretch(records)
    if len(records) < len(whole):
        taken = f"steps {records[0].step} to {records[-1].step} ({len(records)} of {len(whole)})"
        logger.warning("the run's workers came and went: its longest stretch with the same ones is taken, %s", taken)
    workers = records[0].workers
    samples = np.array([record.samples for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records], dtype=np.float64)
    told = (samples > 0) & (seconds > 0) & np.isfinite(seconds)
    if not told.any(axis=0).all():
        raise ValueError(f"worker {workers[int(np.argmin(told.any(axis=0)))]} was never measured in this run")
    each = np.divide(seconds, samples, out=np.zeros_like(seconds), where=told)
    return _filled(each, told) * (_full_batch(records) / len(workers)) + _stuck_s(records)


def emulated_seconds(fleet: Sequence[Machine], steps: int, *, share: int) -> tuple[Floats, Floats]:
    """What emulated machines take for an equal share of ``share`` samples, and their constant costs on top of it; both
    have a row a step and a column a machine."""
    if steps < 1:
        raise ValueError(f"machines are played for at least one step, not {steps}")
    each = [[machine.seconds(step, share, begins=False) for machine in fleet] for step in range(steps)]
    costs = [[machine.slowness.cost_s(step) for machine in fleet] for step in range(steps)]
    return np.array(each), np.array(costs)


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
