"""The registry of combines, the choice of one, and the checks of the paces and wire formats that fit it.

A new combine is a class (step/combine.py has its methods) and a line: ``register("name", Class)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.averaging.combine import AveragingCombine
from paceline.averaging.merge import MERGES, MergeSettings
from paceline.machines.failures import Failures, parse_failures
from paceline.pace import Pacer, deadlines_needed
from paceline.step.combine import Combine, CombineParts, GradientCombine
from paceline.step.context import LoopContext
from paceline.transport.formats import for_gradients, format_of

Choice = str | MergeSettings
"""A name, or the settings of an average."""


@dataclass(frozen=True)
class Kind:
    """Properties of a combine that are known before a loop has one."""

    make: Callable[[LoopContext, Any, CombineParts], Combine]
    """Maker, from what the parts of the loop share, the settings, and the combine's parts."""
    settings: Callable[[], Any] | None = None
    """Maker of the default settings; None where the name is enough."""
    local: bool = False
    """Whether every worker steps with a gradient of its own, and rounds have no deadline."""
    merges: bool = False
    """Whether parameters are merged: the settings are `MergeSettings`."""


_KINDS: dict[str, Kind] = {}


def register(
    name: str,
    make: Callable[[LoopContext, Any, CombineParts], Combine],
    *,
    settings: Callable[[], Any] | None = None,
    local: bool = False,
) -> None:
    """Register a combine: from here on ``paceline.join(combine=name)`` finds it."""
    _KINDS[name] = Kind(make, settings, local)


register("gradients", GradientCombine)


def make_combine(asked: Choice) -> Choice:
    """Return the combine, with default settings for an average by name; ``"gradients"`` stays a name.

    >>> make_combine("average").period_s
    2.0
    """
    if not isinstance(asked, str) and getattr(asked, "name", None) in names():
        return asked
    if not isinstance(asked, str) or asked not in names():
        raise ValueError(f"unknown combine {asked!r}; known: {', '.join(names())}")
    settings = kind_of(asked).settings
    return asked if settings is None else settings()


def names() -> tuple[str, ...]:
    """Return the names of all combines: the registered ones, and every merge of parameters."""
    return tuple(dict.fromkeys(["gradients", *MERGES.names(), *_KINDS]))


def name_of(combine: Choice) -> str:
    return combine if isinstance(combine, str) else combine.name


def kind_of(combine: Choice) -> Kind:
    """Return what is known of the combine."""
    name = name_of(combine)
    if name not in _KINDS and (settings := MERGES.get(name)) is not None:
        return Kind(AveragingCombine, settings, local=True, merges=True)
    return _KINDS[name]


def merge_settings(combine: Choice) -> MergeSettings:
    """Return what a merge of parameters asks of the loop; for other combines, the defaults."""
    return combine if kind_of(combine).merges and not isinstance(combine, str) else MergeSettings()


def check_combine(combine: Choice, pacer: Pacer, workers: int, *, elastic: bool = False) -> None:
    """Raise ValueError when the combine does not fit this number of workers, an ``elastic`` fleet, or this pace."""
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
    """Raise ValueError when workers of several processes cannot use this combine or pace."""
    if kind_of(combine).local:
        raise ValueError(
            f"combine {name_of(combine)!r} averages whole models, and workers started with --procs-per-worker may "
            "divide theirs: use combine 'gradients'"
        )
    if deadlines_needed(pacer):
        raise ValueError(
            f"pace {pacer.name!r} sets deadlines, and the processes of a worker started with --procs-per-worker go "
            "through the model together: use pace 'auto' or 'adaptive'"
        )


def check_wire(wire: str, combine: Choice) -> None:
    """Raise ValueError when this wire format is unknown or does not fit the combine."""
    wire_format = format_of(wire)
    if wire_format is None:
        return
    if kind_of(combine).merges:
        merge_settings(combine).check_wire(wire, coarse=wire_format.averages_only)
    elif wire_format.averages_only:
        raise ValueError(
            f"comm_dtype {wire!r} is too coarse for single gradients, and is for combine 'average': use comm_dtype "
            f"{' or '.join(map(repr, for_gradients()))}, or combine 'average'"
        )


def check_backend(wire: str, backend: str) -> None:
    """Raise ValueError when rounds cross a network on which this wire format brings nothing."""
    if backend == "nccl" and format_of(wire) is not None:
        raise ValueError(
            f"comm_dtype {wire!r} is for rounds over Gloo, and these go over NCCL: leave comm_dtype out, or set "
            "PACELINE_BACKEND=gloo where the network between the GPUs' computers is slow"
        )


def failures_from_env(seed: int) -> Failures | None:
    """Return the failures that PACELINE_FAILURES asks to emulate."""
    text = os.environ.get("PACELINE_FAILURES", "")
    return parse_failures(text, seed=seed) if text else None
