"""What `fleet.log` wrote into a run's log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def logged(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """By call: the step, Unix seconds (NaN when the log does not say), and the figures that are numbers."""
    for event in events:
        figures, step, t = event.get("figures"), event.get("step"), event.get("t")
        if event.get("event") == "log" and isinstance(figures, Mapping) and isinstance(step, int):
            known = {str(k): float(v) for k, v in figures.items() if isinstance(v, (int, float)) and math.isfinite(v)}
            yield step, float(t) if isinstance(t, (int, float)) else math.nan, known
