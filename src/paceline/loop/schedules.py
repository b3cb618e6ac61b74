"""Schedules that know how many steps there are: whether that is the loop's own number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def check_length(name: str, schedule: LRScheduler, *, steps: int | None, micro_batches: int | None) -> None:
    """Raise ValueError when a schedule is made for another number of steps than the loop has, as far as that shows.

    One that ends, as OneCycleLR does, is refused; others may count epochs as well.

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
        if ends is not None and ends == micro_batches != steps:
            raise ValueError(
                f"{kind} ({name}) is made for {ends} steps, which is epochs * len(loader): that counts micro-"
                f"batches, and the loop has {steps} steps; use len(steps) of steps = fleet.steps(...), or epochs * "
                "math.ceil(len(dataset) / global_batch)"
            )


def unfinished(name: str, schedule: LRScheduler) -> str:
    """What to say of a schedule that ends, when the training does and it has not; else nothing."""
    for part in _parts(schedule):
        ends: Any = getattr(part, "total_steps", None)
        if ends is not None and part.last_epoch < ends - 1:
            return (
                f"{type(part).__name__} ({name}) had made {part.last_epoch} of its {ends} steps when training ended: "
                "it counts steps of the fleet, of which an epoch has ceil(samples / global_batch), not micro-batches"
            )
    return ""


@contextmanager
def held_at_their_end(things: Iterable[Any]) -> Iterator[None]:
    """A step more than ``len(steps)``, because workers were lost in the very last one: a schedule among ``things`` that
    has made all of its steps stays there, where torch would raise."""
    ended = [part for thing in things if isinstance(thing, LRScheduler) for part in _parts(thing) if _has_ended(part)]
    kinds = [type(schedule) for schedule in ended]
    for schedule, kind in zip(ended, kinds, strict=True):  # not an attribute: those are a schedule's state
        schedule.__class__ = type(kind.__name__, (kind,), {"step": lambda self, *args, **kwargs: None})
    try:
        yield
    finally:
        for schedule, kind in zip(ended, kinds, strict=True):
            schedule.__class__ = kind


def _has_ended(schedule: LRScheduler) -> bool:
    ends: Any = getattr(schedule, "total_steps", None)
    return ends is not None and schedule.last_epoch >= ends


def _parts(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """A schedule, and those it is made of."""
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)
