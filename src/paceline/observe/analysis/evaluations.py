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
    found = []
    for event in events:
        result, step = event.get("result"), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == "evaluate" and isinstance(result, Mapping) and step >= 0:
            found.append(Evaluation(step, sanitise.timestamp(event.get("t")), _means(result)))
    return found


def logged_figures(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """By call of `fleet.log`: step, Unix seconds (NaN when the log does not say), and the figures that are numbers."""
    for event in events:
        figures, step = event.get("figures"), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == "log" and isinstance(figures, Mapping) and step >= 0:
            yield step, sanitise.timestamp(event.get("t")), _numbers(figures)


def _means(result: Mapping[str, Any]) -> dict[str, float]:
    numbers = _numbers(result)
    count = numbers.pop("count", 0.0)
    return {MEANS.get(k, k): v / count for k, v in numbers.items()} if count >= 1 else numbers


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in ((k, _number(v)) for k, v in values.items()) if v is not None}


def _number(value: Any) -> float | None:
    try:
        return sanitise.figure(value) if sanitise.is_number(value) else None
    except OverflowError:  # a whole number beyond every float
        return None
