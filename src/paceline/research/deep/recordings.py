"""What a forecast is learned from: traces and run logs as series of seconds, with who was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from paceline.machines.trace import read_trace
from paceline.observe import read_log
from paceline.pace.forecast import Floats, Mask
from paceline.records import StepRecord

LEAST_STEPS = 30
"""Steps of a series that anything can be learned from."""
NO_BOUND = 1e-6
"""Part of its typical time: nothing is known about a worker known only to be slower than that."""


@dataclass(frozen=True)
class Recording:
    """Steps of one set of workers: seconds for like shares, and ``late`` where they are only a bound."""

    name: str
    seconds: Floats
    late: Mask

    @property
    def steps(self) -> int:
        return len(self.seconds)

    @property
    def workers(self) -> int:
        return int(self.seconds.shape[1])

    def until(self, step: int) -> Recording:
        """Return the steps before ``step``."""
        return Recording(self.name, self.seconds[:step], self.late[:step])


def read(sources: Sequence[Path]) -> list[Recording]:
    """Return the recordings in all sources; ValueError for one that is missing or holds nothing to learn from."""
    if missing := next((source for source in sources if not source.exists()), None):
        raise ValueError(f"there is no {missing}: give runs' folders, event logs or traces")
    return [recorded for source in sources for recorded in recordings(source)]


def recordings(source: Path) -> list[Recording]:
    """Return those in a trace (CSV) or in a run's folder or event log; ValueError for anything else."""
    if source.is_dir() or source.suffix == ".jsonl":
        return from_records(source.name, read_log(source).records)
    return [recording(source.name, read_trace(source).seconds)]


def recording(name: str, seconds: ArrayLike, late: ArrayLike | None = None) -> Recording:
    """Return a recording; ValueError with the reason why nothing can be learned from it."""
    own = np.asarray(seconds, dtype=np.float64)
    if own.ndim != 2:
        raise ValueError(f"{name}: a series has one row per step and one column per worker")
    steps, workers = own.shape
    if workers < 2:
        raise ValueError(f"{name}: one worker has nobody to be late for; a forecast is learned from two or more")
    if steps < LEAST_STEPS:
        raise ValueError(f"{name}: too short to learn from: {steps} steps, at least {LEAST_STEPS} are needed")
    good = np.isfinite(own) & (own > 0)
    if not good.all():
        step, worker = np.unravel_index(int(np.argmin(good)), own.shape)
        raise ValueError(
            f"{name}: step {step}, worker {worker}: seconds are finite and above 0, not {own[step, worker]}"
        )
    cut = np.zeros(own.shape, dtype=np.bool_) if late is None else np.asarray(late, dtype=np.bool_)
    if cut.shape != own.shape:
        raise ValueError(f"{name}: late says for every worker in every step whether it was cut off")
    return Recording(name, own, cut)


def from_records(name: str, records: Sequence[StepRecord]) -> list[Recording]:
    """Return a run's steps as seconds per sample: one recording per set of workers that was long enough together."""
    if not records:
        raise ValueError(f"{name}: the run has no steps")
    stretches = [list(steps) for _, steps in groupby(records, key=lambda record: record.workers)]
    found = [_per_sample(steps) for steps in stretches if len(steps) >= LEAST_STEPS and len(steps[0].workers) > 1]
    if not found:
        longest = max(stretches, key=len)
        return [recording(name, *_per_sample(longest))]
    return [recording(name, seconds, late) for seconds, late in found]


def _per_sample(records: Sequence[StepRecord]) -> tuple[Floats, Mask]:
    """Return seconds per sample; a share not done is a bound, a worker that sat out or was not timed an empty one."""
    planned, samples, seconds, unfinished = (
        np.array([_row(getattr(record, field), len(record.workers)) for record in records])
        for field in ("planned", "samples", "seconds", "unfinished_s")
    )
    timed = (samples > 0) & (seconds > 0)
    each = np.divide(seconds, samples, out=np.zeros_like(seconds), where=timed)
    bound = np.divide(seconds + unfinished, planned, out=np.zeros_like(seconds), where=(planned > 0) & ~timed)
    measured = timed.any(axis=0)
    if not measured.any():
        raise ValueError("nobody was ever measured in this run")
    low = NO_BOUND * float(np.median(each[timed]))
    return np.where(timed, each, np.maximum(bound, low))[:, measured], ~timed[:, measured]


def _row(values: Sequence[float], count: int) -> Floats:
    row = np.array(values if len(values) == count else [0.0] * count, dtype=np.float64)
    return np.where(np.isfinite(row) & (row > 0), row, 0.0)
