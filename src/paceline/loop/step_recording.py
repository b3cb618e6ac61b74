"""What a summed header says of a step, in a record's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.combine import Header
from paceline.loop.step_state import Turn
from paceline.records import StepRecord


def said(header: Header, name: Callable[[int], str]) -> dict[str, Any]:
    """Everybody's work. ``name``: of the figure in a slot."""
    weight = float(header.column("weight").sum())
    return {
        "samples": _ints(header.column("samples")),
        "seconds": tuple(header.column("seconds").tolist()),
        "micro_batches": _ints(header.column("micro_batches")),
        "weight": weight,
        "loss": float(header.column("loss").sum()) / weight if weight else None,
        "sums": {name(slot): value for slot, value in header.sums().items()},
    }


def record_of(turn: Turn, header: Header, name: Callable[[int], str], *, round_s: float, emulated: bool) -> StepRecord:
    """The record of a step whose round is over."""
    bounded = turn.bounded
    return StepRecord(
        **_dealt(turn),
        **said(header, name),
        slowest_s=tuple(header.column("slowest_s").tolist()),
        unfinished_s=tuple(header.column("unfinished_s").tolist()) if bounded else (),
        behind=_ints(header.column("behind")) if bounded else (),
        late_s=tuple(header.column("late_s").tolist()),
        forecast_s=turn.plan.forecast_s,
        deadline_s=turn.plan.deadline_s,
        wait_for=turn.plan.wait_for,
        round_s=round_s,
        applied=has_gradient(header),
        shortfall_s=tuple(header.column("shortfall_s").tolist()) if emulated else (),
    )


def void_record(turn: Turn) -> StepRecord:
    """Of a step that does not count: the fleet went on without this worker."""
    nobody = (0,) * len(turn.shares)
    return StepRecord(**_dealt(turn), samples=nobody, seconds=tuple(map(float, nobody)), applied=False)


def _dealt(turn: Turn) -> dict[str, Any]:
    """Which step it is, and what was dealt to whom."""
    return {
        "step": turn.index,
        "epoch": turn.epoch,
        "generation": turn.generation,
        "workers": turn.workers,
        "planned": turn.shares,
    }


def has_gradient(header: Header) -> bool:
    """Whether the round gave something to apply."""
    bad = header.column("nonfinite").any() or header.column("overflow").any()
    return not bad and bool(header.column("weight").sum() > 0)


def _ints(column: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, ...]:
    return tuple(int(value) for value in column)
