"""A step record's fields by kind, read off `StepRecord` itself: a new measured fact is one line there and none here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from paceline.observe.log import sanitise
from paceline.records import StepRecord

NAMES = ("step", "epoch", "generation", "workers")
"""What a record is about: a reader takes these as they are, or not at all."""
Sanitisers = dict[str, Callable[[Any], Any]]


def measured(kind: type[StepRecord]) -> dict[str, str]:
    """The type of every field that says what happened, by name."""
    return {field.name: str(field.type) for field in fields(kind) if field.name not in NAMES}


PER_WORKER = [name for name, kind in measured(StepRecord).items() if kind.startswith(("tuple[int", "tuple[float"))]
"""A number for each worker, in rank order."""
PER_STEP = [name for name, kind in measured(StepRecord).items() if kind.startswith(("int", "float", "bool"))]
"""A number, or truth, for the whole fleet."""


def sanitisers(kind: type[StepRecord]) -> Sanitisers:
    """For each field of numbers, what makes a log's value one that a training can have."""
    numbers = ("int", "float", "tuple[int", "tuple[float")
    return {name: _sanitiser(name, told) for name, told in measured(kind).items() if told.startswith(numbers)}


def _sanitiser(name: str, kind: str) -> Callable[[Any], Any]:
    """Seconds are known by their names, ``seconds`` and ``…_s``; whole numbers by their type."""
    seconds, optional = name == "seconds" or name.endswith("_s"), kind.endswith(" | None")
    number = sanitise.count if "int" in kind else sanitise.seconds if seconds else sanitise.figure
    if kind.startswith("tuple"):
        return lambda values: None if optional and values is None else tuple(map(number, values))
    return lambda value: _known(None if value is None else number(value), None if optional else 0.0)


def _known(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None or value != value else value


SANITISERS = sanitisers(StepRecord)


def sanitised(record: StepRecord) -> StepRecord:
    """With figures that no training can have as missing: seconds of a worker as NaN, others as None or 0."""
    clean = {name: how(getattr(record, name)) for name, how in SANITISERS.items()}
    sums = dict(record.sums).items()
    known = {str(name): n for name, n in sums if sanitise.is_number(n) and sanitise.figure(n) is not None}
    return replace(record, sums=known, **clean)
