"""What `fleet.evaluate` found, and what sums are called as means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
        result, step, t = event.get("result"), event.get("step"), event.get("t")
        if event.get("event") == "evaluate" and isinstance(result, Mapping) and isinstance(step, int):
            stamp = float(t) if isinstance(t, (int, float)) else math.nan
            found.append(Evaluation(step, stamp, _means(result)))
    return found


def _means(result: Mapping[str, Any]) -> dict[str, float]:
    numbers = {str(k): float(v) for k, v in result.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    count = numbers.pop("count", 0.0)
    return {MEANS.get(k, k): v / count for k, v in numbers.items()} if count > 0 else numbers
