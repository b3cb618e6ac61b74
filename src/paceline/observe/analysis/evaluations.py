"""What `fleet.evaluate` found and `fleet.log` wrote, as means over samples."""

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
    told = [event for event in events if event.get("event") == "evaluate"]
    return [
        Evaluation(step, t, _means(numbers, event.get("means")))
        for event in told
        for step, t, numbers in _figures([event], "evaluate", "result")
    ]


def logged_figures(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """By call of `fleet.log`: step, Unix seconds (NaN when the log does not say), and the figures that are numbers."""
    return _figures(events, "log", "figures")


def _figures(events: Iterable[Mapping[str, Any]], kind: str, key: str) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Of the events of a ``kind``: step, Unix seconds, and the numbers under ``key``."""
    for event in events:
        told, step = event.get(key), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == kind and isinstance(told, Mapping) and step >= 0:
            yield step, sanitise.timestamp(event.get("t")), _numbers(told)


def _means(numbers: dict[str, float], already: Any) -> dict[str, float]:
    """Divide the sums by the number of samples; ``already`` names those that are means as they are."""
    count, whole = numbers.pop("count", 0.0), already if isinstance(already, list) else []
    if count < 1:
        return numbers
    return {MEANS.get(k, k): v if k in whole else v / count for k, v in numbers.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in ((k, _number(v)) for k, v in values.items()) if v is not None}


def _number(value: Any) -> float | None:
    try:
        return sanitise.figure(value) if sanitise.is_number(value) else None
    except OverflowError:  # a whole number beyond every float
        return None
