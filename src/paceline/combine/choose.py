"""Which ``combine`` was asked for, and which paces make sense with it."""

from __future__ import annotations

import os

from paceline.combine import NAMES
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.machines.failures import Failures, parse_failures
from paceline.pace import Pacer, may_set_deadlines

Combine = str | Averaging | ElasticAverage
"""``"gradients"``, or the settings of an average."""


def make_combine(asked: Combine) -> Combine:
    """``"gradients"`` stays a name; the averages by name get their usual settings.

    >>> make_combine("average").period_s
    2.0
    """
    if isinstance(asked, (Averaging, ElasticAverage)):
        return asked
    if asked == "average":
        return Averaging()
    if asked == "elastic-average":
        return ElasticAverage()
    if asked != "gradients":
        raise ValueError(f"unknown combine {asked!r}; known: {', '.join(NAMES)}")
    return "gradients"


def check_combine(combine: Combine, pacer: Pacer, workers: int, *, elastic: bool = False) -> None:
    """Raise ValueError when the combine makes no sense for so many workers, who may come and go (``elastic``), or with
    this pace."""
    if isinstance(combine, str):
        return
    if elastic:
        combine.check_elastic()
    combine.check(workers)
    if may_set_deadlines(pacer):
        raise ValueError(
            f"pace {pacer.name!r} sets deadlines for rounds of gradients, and combine {combine.name!r} has none: take "
            "pace adaptive or equal"
        )


def failures_from_env(seed: int) -> Failures | None:
    """The failures that PACELINE_FAILURES asks to emulate."""
    text = os.environ.get("PACELINE_FAILURES", "")
    return parse_failures(text, seed=seed) if text else None
