"""Values out of a log, as far as a training can have them: what is beyond that counts as missing.

A log may come from elsewhere, or from a computer whose clock or memory went wrong. With these bounds no sum, square or
quotient of a few million figures leaves the range of a float, so that the code that reads a log need not check.

The fields of a step record are taken from `StepRecord` itself: a new measured fact is one line there and none here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from paceline.records import StepRecord

MOST = 10**15
"""Largest count, of samples, steps or anything else."""
LONGEST_S, SHORTEST_S = 1e10, 1e-9
"""Three centuries, and a time that no clock here can measure."""
LATEST = 1e11
"""Largest timestamp, in Unix seconds: in the year 5138."""
LARGEST = 1e100
"""Largest loss, norm, or figure of the user's own."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count(value: Any) -> int:
    """Return a value as a count, or raise ValueError.

    >>> count(8), count(8.0)
    (8, 8)
    """
    number = int(value)
    if not 0 <= number <= MOST:
        raise ValueError(f"{value} is no number of things")
    return number


def count_or(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value <= MOST else otherwise


def seconds(value: Any) -> float:
    """Return the seconds that something took; NaN when the log has no such value.

    >>> seconds(0.5), seconds(None), seconds(-1.0), seconds(1e-300)
    (0.5, nan, nan, 0.0)
    """
    number = math.nan if value is None else float(value)
    if not 0 <= number <= LONGEST_S:
        return math.nan
    return number if number >= SHORTEST_S else 0.0


def timestamp(value: Any) -> float:
    """Return a value as Unix seconds; NaN when it is none."""
    return float(value) if is_number(value) and 0 <= value <= LATEST else math.nan


def figure(value: Any) -> float | None:
    """Return a value as a float; None when it is missing, not finite, or too large to calculate with."""
    number = math.nan if value is None else float(value)
    return number if abs(number) <= LARGEST else None


NAMES = ("step", "epoch", "generation", "workers")
"""Fields that identify a record: a reader takes them unchanged, or refuses the record."""
Sanitisers = dict[str, Callable[[Any], Any]]


def measured(kind: type[StepRecord]) -> dict[str, str]:
    """Return the type of every field that holds a measurement, by name."""
    return {field.name: str(field.type) for field in fields(kind) if field.name not in NAMES}


PER_WORKER = [name for name, kind in measured(StepRecord).items() if kind.startswith(("tuple[int", "tuple[float"))]
"""Fields with one number per worker, in rank order."""
PER_STEP = [name for name, kind in measured(StepRecord).items() if kind.startswith(("int", "float", "bool"))]
"""Fields with one number or boolean for the fleet."""


def sanitisers(kind: type[StepRecord]) -> Sanitisers:
    """Return, for each field of numbers, the function that makes a log's value one that a training can have."""
    numbers = ("int", "float", "tuple[int", "tuple[float")
    return {name: _sanitiser(name, type_) for name, type_ in measured(kind).items() if type_.startswith(numbers)}


def _sanitiser(name: str, kind: str) -> Callable[[Any], Any]:
    """Return the function for one field: seconds are recognised by name (``seconds``, ``…_s``), counts by type."""
    timed, optional = name == "seconds" or name.endswith("_s"), kind.endswith(" | None")
    number: Callable[[Any], float | None] = count if "int" in kind else seconds if timed else figure
    if kind.startswith("tuple"):
        return lambda values: None if optional and values is None else tuple(map(number, values))
    return lambda value: _known(None if value is None else number(value), None if optional else 0.0)


def _known(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None or value != value else value


SANITISERS = sanitisers(StepRecord)


def sanitised(record: StepRecord) -> StepRecord:
    """Return the record without figures that no training can have: a worker's seconds become NaN, others None or 0."""
    clean = {name: how(getattr(record, name)) for name, how in SANITISERS.items()}
    sums = dict(record.sums).items()
    known = {str(name): n for name, n in sums if is_number(n) and figure(n) is not None}
    return replace(record, sums=known, **clean)
