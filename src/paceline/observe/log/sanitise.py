"""Numbers out of a log, as far as a training can have them: what is beyond that counts as missing.

A log may come from elsewhere, or from a computer whose clock or memory went wrong. With these bounds no sum, square or
quotient of a few million figures leaves the range of a float, so that nobody who reads a log has to fear one.
"""

from __future__ import annotations

import math
from typing import Any

MOST = 10**15
"""Samples, steps and whatever else is counted."""
LONGEST_S, SHORTEST_S = 1e10, 1e-9
"""Three centuries, and what no clock here tells from nothing."""
LATEST = 1e11
"""Unix seconds: some time in the year 5138."""
LARGEST = 1e100
"""A loss, a norm, or a figure of the user's own."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count(value: Any) -> int:
    """A number of things, or ValueError.

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
    """Seconds that something took; NaN when the log does not say.

    >>> seconds(0.5), seconds(None), seconds(-1.0), seconds(1e-300)
    (0.5, nan, nan, 0.0)
    """
    number = math.nan if value is None else float(value)
    if not 0 <= number <= LONGEST_S:
        return math.nan
    return number if number >= SHORTEST_S else 0.0


def timestamp(value: Any) -> float:
    """Unix seconds; NaN when the log does not say."""
    return float(value) if is_number(value) and 0 <= value <= LATEST else math.nan


def figure(value: Any) -> float | None:
    """Any number; None when it is missing, or not finite for all that can be done with it."""
    number = math.nan if value is None else float(value)
    return number if abs(number) <= LARGEST else None
