"""The results of `fleet.evaluate`, as means over samples, and the figures of `fleet.log`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.observe.log import sanitise

MEANS = {"correct": "accuracy"}
"""Name of the mean of a sum over samples, where it has one of its own."""


@dataclass(frozen=True)
class Evaluation:
    """Results after a step, as means over the samples where a count was given."""

    step: int
    t: float
    """Unix seconds; NaN when not logged."""
    means: Mapping[str, float]


def evaluations(events: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return the evaluations among a log's events, in order; results that are no numbers are left out."""
    found = [event for event in events if event.get("event") == "evaluate"]
    return [
        Evaluation(step, t, _means(numbers, event.get("means")))
        for event in found
        for step, t, numbers in _figures([event], "evaluate", "result")
    ]


def logged_figures(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield, per call of `fleet.log`, step, Unix seconds (NaN when not logged), and the figures that are numbers."""
    yield from _figures(events, "log", "figures")


def _figures(events: Iterable[Mapping[str, Any]], kind: str, key: str) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield, for each event of a ``kind``, step, Unix seconds, and the numbers under ``key``."""
    for event in events:
        values, step = event.get(key), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == kind and isinstance(values, Mapping) and step >= 0:
            yield step, sanitise.timestamp(event.get("t")), _numbers(values)


def _means(numbers: dict[str, float], already: Any) -> dict[str, float]:
    """Divide the sums by the number of samples; ``already`` names those that are means already."""
    count, means = numbers.pop("count", 0.0), already if isinstance(already, list) else []
    if count < 1:
        return numbers
    return {MEANS.get(k, k): v if k in means else v / count for k, v in numbers.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in ((k, _number(v)) for k, v in values.items()) if v is not None}


def _number(value: Any) -> float | None:
    try:
        return sanitise.figure(value) if sanitise.is_number(value) else None
    except OverflowError:  # a whole number beyond every float
        return None
