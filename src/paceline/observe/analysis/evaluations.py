"""What `fleet.evaluate` found and `fleet.log` wrote, and what sums are called as means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.observe.log import sanitise

MEANS = {"correct": "accuracy"}
"""What the mean of a sum over samples is called, where it has a name."""


@dataclass(frozen=True)
class Evaluation:
    """Results after a step, as means over the samples where a count was given."""

    step: int
    t: float
    """Unix seconds; NaN when the log does not say."""
    means: Mapping[str, float]


def evaluations(events: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """The evaluations among a log's events, in order; results that are no numbers are left out."""
    return [Evaluation(step, t, _means(numbers)) for step, t, numbers in _figures(events, "evaluate", "result")]


def logged_figures(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """By call of `fleet.log`: step, Unix seconds (NaN when the log does not say), and the figures that are numbers."""
    return _figures(events, "log", "figures")


def _figures(events: Iterable[Mapping[str, Any]], kind: str, key: str) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Of the events of a ``kind``: step, Unix seconds, and the numbers under ``key``."""
    for event in events:
        told, step = event.get(key), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == kind and isinstance(told, Mapping) and step >= 0:
            yield step, sanitise.timestamp(event.get("t")), _numbers(told)


def _means(numbers: dict[str, float]) -> dict[str, float]:
    count = numbers.pop("count", 0.0)
    return {MEANS.get(k, k): v / count for k, v in numbers.items()} if count >= 1 else numbers


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in ((k, _number(v)) for k, v in values.items()) if v is not None}


def _number(value: Any) -> float | None:
    try:
        return sanitise.figure(value) if sanitise.is_number(value) else None
    except OverflowError:  # a whole number beyond every float
        return None
