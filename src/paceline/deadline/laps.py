"""Laps: a part of a step is over, and what late workers left of it is dealt again to those that are done."""

from __future__ import annotations

import numpy as np

from paceline import concurrency
from paceline.loop.step_state import StepState
from paceline.pace.forecast.base import Mask
from paceline.pace.shares import Ints, proportional

PATIENT = 1.2
"""A further lap may take so many times the expected seconds."""


def lap_shares(step_state: StepState, undone: int, counted: int, idle: Mask, *, smallest: int) -> Ints:
    """What each idle worker gets of the epoch's ``undone`` samples, by its first share: all of them in the last step,
    else what a step that has ``counted`` so many lacks. Nobody gets fewer than ``smallest``, and no such rest stays."""
    lacks = undone if step_state.last else min(undone, max(0, step_state.least - counted))
    if not lacks or not idle.any():
        return np.zeros(len(idle), dtype=np.int64)
    speeds = np.where(idle, np.maximum(step_state.plan.samples, 1.0), 0.0)
    if step_state.last or smallest == 1:
        return proportional(speeds, lacks)
    lacks = max(lacks, smallest)
    one = np.zeros(len(idle), dtype=np.int64)
    one[int(np.argmax(speeds))] = undone if undone - lacks < smallest else lacks
    return one


def lap_seconds(step_state: StepState, shares: Ints) -> float:
    """A lap's deadline: the step's own, by the part of its first share that a worker has again, and room for chance."""
    whole = step_state.plan.deadline_s or concurrency.perf_counter() - step_state.opened
    first = np.maximum(step_state.plan.samples, 1)
    return step_state.patience * PATIENT * whole * max(float((shares / first).max()), 0.05)
