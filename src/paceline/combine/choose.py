"""Which combines there are, by name; which one was asked for; and which paces make sense with it.

A new combine is a class (base.py says what it must do) and a line: ``register("name", Class)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.combine.averaging.combine import AveragingCombine
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.base import Combine, CombineParts
from paceline.combine.gradients.combine import GradientCombine
from paceline.combine.wire import format_of
from paceline.loop.context import LoopContext
from paceline.machines.failures import Failures, parse_failures
from paceline.pace import Pacer, deadlines_needed

Choice = str | Averaging | ElasticAverage
"""A name, or the settings of an average."""


@dataclass(frozen=True)
class Kind:
    """What is known of a combine before a loop has one."""

    make: Callable[[LoopContext, Any, CombineParts], Combine]
    """From what the parts of the loop share, the settings, and what it is made of."""
    settings: Callable[[], Any] | None = None
    """Gives the usual ones; None: there are none, the name says all."""
    local: bool = False
    """Every worker steps with a gradient of its own, and rounds have no deadline."""


_KINDS: dict[str, Kind] = {}


def register(
    name: str,
    make: Callable[[LoopContext, Any, CombineParts], Combine],
    *,
    settings: Callable[[], Any] | None = None,
    local: bool = False,
) -> None:
    """Make a combine known: from here on ``paceline.join(combine=name)`` finds it."""
    _KINDS[name] = Kind(make, settings, local)


register("gradients", GradientCombine)
register("average", AveragingCombine, settings=Averaging, local=True)
register("elastic-average", AveragingCombine, settings=ElasticAverage, local=True)


def make_combine(asked: Choice) -> Choice:
    """``"gradients"`` stays a name; the averages by name get their usual settings.

    >>> make_combine("average").period_s
    2.0
    """
    if not isinstance(asked, str) and getattr(asked, "name", None) in _KINDS:
        return asked
    if not isinstance(asked, str) or asked not in _KINDS:
        raise ValueError(f"unknown combine {asked!r}; known: {', '.join(names())}")
    settings = _KINDS[name_of(asked)].settings
    return asked if settings is None else settings()


def names() -> tuple[str, ...]:
    """Of all combines that are known."""
    return tuple(_KINDS)


def name_of(combine: Choice) -> str:
    return combine if isinstance(combine, str) else combine.name


def kind_of(combine: Choice) -> Kind:
    return _KINDS[name_of(combine)]


def check_combine(combine: Choice, pacer: Pacer, workers: int, *, elastic: bool = False) -> None:
    """Raise ValueError when the combine makes no sense for so many workers, who may come and go (``elastic``), or with
    this pace."""
    if not isinstance(combine, str):
        if elastic:
            combine.check_elastic()
        combine.check(workers)
    if kind_of(combine).local and deadlines_needed(pacer):
        raise ValueError(
            f"pace {pacer.name!r} sets deadlines for rounds of gradients, and combine {name_of(combine)!r} has none: "
            "take pace adaptive or equal"
        )


def check_groups(combine: Choice, pacer: Pacer) -> None:
    """Raise ValueError when workers of several processes cannot combine so, or at this pace."""
    if kind_of(combine).local:
        raise ValueError(
            f"combine {name_of(combine)!r} averages whole models, and workers started with --group may divide theirs: "
            "use combine 'gradients'"
        )
    if deadlines_needed(pacer):
        raise ValueError(
            f"pace {pacer.name!r} sets deadlines, and the processes of a worker started with --group go through the "
            "model together: use pace 'auto' or 'adaptive'"
        )


def check_wire(wire: str, combine: Choice) -> None:
    """Raise ValueError when this wire is not known, or makes no sense with the combine."""
    form = format_of(wire)
    if form is None:
        return
    if isinstance(combine, ElasticAverage):
        raise ValueError(
            f"wire {wire!r} rounds what workers send, and in combine 'elastic-average' the centre must move by just "
            "what the workers do: leave wire out, or use combine 'average'"
        )
    if form.averages_only and not isinstance(combine, Averaging):
        raise ValueError(
            f"wire {wire!r} is too coarse for single gradients, and is for combine 'average': use wire 'bf16' or "
            f"'fp16', or combine 'average'"
        )
    if form.averages_only and isinstance(combine, Averaging) and combine.once:
        raise ValueError(
            f"wire {wire!r} rounds a whole training's update, and with every='end' no later round makes that good: use "
            "wire 'bf16', or give every_steps= or period_s="
        )


def check_backend(wire: str, backend: str) -> None:
    """Raise ValueError when rounds cross a network on which this wire brings nothing."""
    if backend == "nccl" and format_of(wire) is not None:
        raise ValueError(
            f"wire {wire!r} is for rounds over Gloo, and these go over NCCL: leave wire out, or set "
            "PACELINE_BACKEND=gloo where the network between the GPUs' computers is slow"
        )


def failures_from_env(seed: int) -> Failures | None:
    """The failures that PACELINE_FAILURES asks to emulate."""
    text = os.environ.get("PACELINE_FAILURES", "")
    return parse_failures(text, seed=seed) if text else None
