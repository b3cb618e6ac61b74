"""Several runs side by side: how fast each was, how near its limit, and how soon it reached a loss that all reached.

A step's loss is noisy, so a run has reached a loss when the mean over its last few steps has: a twentieth of the run, 5
steps at least and 50 at most. Time is wall-clock time from the start of the first step, time between steps included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.observe.analysis.evaluations import evaluations
from paceline.observe.analysis.stretches import Floats
from paceline.observe.analysis.timeline import lay_out
from paceline.observe.log.reader import RunLog
from paceline.observe.words.verdict import Verdict, verdict


@dataclass(frozen=True)
class ComparedRun:
    """One run. Numbers that are not known are NaN."""

    name: str
    log: RunLog
    verdict: Verdict
    clock_s: Floats
    """Seconds from the start of the first step to the end of each step."""
    loss: Floats
    """Mean loss over the last few steps, at each step."""
    time_to_loss_s: float = math.nan
    """Seconds until the loss had come down to the target."""

    @property
    def seconds(self) -> float:
        return float(self.clock_s[-1]) if len(self.clock_s) else math.nan

    @property
    def last_loss(self) -> float:
        return float(self.loss[-1]) if len(self.loss) else math.nan

    @property
    def evaluated(self) -> tuple[str, float] | None:
        """Return name and mean of the last figure that was evaluated."""
        found = [pair for each in evaluations(self.log.others) for pair in each.means.items()]
        return found[-1] if found else None


@dataclass(frozen=True)
class Comparison:
    """Runs, and the loss that they are compared at."""

    runs: tuple[ComparedRun, ...]
    target: float
    """Loss for ``time_to_loss_s``: by default the lowest that every run reached; NaN when a run has no loss."""
    asked: bool = False
    """Whether the target was given, so that a run that never reached it is worth a word."""


def compare(logs: Sequence[RunLog], *, target: float | None = None) -> Comparison:
    """Compare runs, in the order given. ``target`` is the loss to reach."""
    if target is not None and not 0 < target < math.inf:
        raise ValueError(f"the loss to reach must be a number above 0, not {target:g}")
    if len(logs) < 2:
        raise ValueError("name at least two runs to compare")
    if empty := next((log for log in logs if not log.records), None):
        raise ValueError(f"{empty.path} holds no steps, so there is nothing to compare")
    runs = [_read(log, name) for log, name in zip(logs, _names(logs))]
    goal = target if target is not None else max(_lowest(run) for run in runs)
    return Comparison(tuple(_timed(run, goal) for run in runs), goal, asked=target is not None)


def _read(log: RunLog, name: str) -> ComparedRun:
    steps = list(lay_out(log.records, log.times))
    zero = steps[0].start
    losses = np.array([math.nan if record.loss is None else record.loss for record in log.records])
    window = min(50, max(5, len(losses) // 20))
    return ComparedRun(
        name, log, verdict(log), np.array([step.stop - zero for step in steps]), smoothed(losses, window)
    )


def smoothed(values: Floats, window: int) -> Floats:
    """Return, at each index, the mean over the numbers among the last ``window`` values; fewer at the start."""
    good = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(good, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(good)))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    number = count[stop] - count[start]
    means: Floats = np.divide(total[stop] - total[start], number, out=np.full(len(values), math.nan), where=number > 0)
    return means


def _lowest(run: ComparedRun) -> float:
    good = run.loss[np.isfinite(run.loss)]
    return float(good.min()) if len(good) else math.nan


def _timed(run: ComparedRun, goal: float) -> ComparedRun:
    there = np.flatnonzero(run.loss <= goal)
    when = float(run.clock_s[there[0]]) if len(there) else math.nan
    return replace(run, time_to_loss_s=when)


def _names(logs: Sequence[RunLog]) -> list[str]:
    """Return the shortest names that are distinct: name, pace and name, folder, or a number in front."""
    plain = [str(log.run.get("name") or log.path.parent.name or "run") for log in logs]
    paced = [f"{log.run.get('pace') or 'pace unknown'} ({name})" for name, log in zip(plain, logs)]
    folders = [log.path.parent.name for log in logs]
    located = _without_common_front(folders)
    numbered = [f"{index}: {name} ({folder})" for index, (name, folder) in enumerate(zip(plain, folders), start=1)]
    return next(names for names in (plain, paced, located, numbered) if len(set(names)) == len(names))


def _without_common_front(folders: Sequence[str]) -> list[str]:
    """Return folder names without the parts that all share: ``20261115-195719-digits`` as ``195719-digits``."""
    parts = [folder.split("-") for folder in folders]
    while all(len(each) > 1 and each[0] == parts[0][0] for each in parts):
        parts = [each[1:] for each in parts]
    return ["-".join(each) for each in parts]
