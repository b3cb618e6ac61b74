"""Schedules that know how many steps there are: whether that is the loop's own number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def check_length(name: str, schedule: LRScheduler, *, steps: int | None, micro_batches: int | None) -> None:
    """Raise ValueError when a schedule is made for another number of steps than the loop has, as far as that shows.

    Args:
        name: that it is tracked by.
        steps: of the whole loop; None where workers make as many as they find time for.
        micro_batches: what ``epochs * len(loader)`` gives.
    """
    for part in _parts(schedule):
        kind = type(part).__name__
        ends: Any = getattr(part, "total_steps", None)
        if steps is None and ends is not None:
            raise ValueError(
                f"{kind} ({name}) ends after {ends} steps, but with rounds by the clock a fast worker makes more steps "
                "than a slow one: let the schedule follow step.progress (LambdaLR, see docs/averaging.md), or give "
                "paceline.Averaging(every_steps=...)"
            )
        counted = ends if ends is not None else getattr(part, "T_max", None)
        if counted is not None and counted == micro_batches != steps and steps is not None:
            raise ValueError(
                f"{kind} ({name}) is made for {counted} steps, which is epochs * len(loader): that counts micro-"
                f"batches, and the loop has {steps} steps; use len(steps) of steps = fleet.steps(...), or epochs * "
                "math.ceil(len(dataset) / global_batch)"
            )


def _parts(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """A schedule, and those it is made of."""
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)
