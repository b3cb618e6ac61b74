"""Empirical window: the next step is one of the last few, drawn whole, so workers that slow together stay together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast.base import Floats, Mask, Seen, moved, same_workers

TAIL = 0.5
"""Where nothing slower was ever seen, x given x > t is taken as ``t * (1 + TAIL * E)`` with E exponential."""


class Window:
    """Draws rows of the last ``steps`` steps. A worker cut off at t enters its row as a truncated draw, x given x > t:
    from its own times in the window, else from everybody's, else from an exponential tail. What was drawn stays in the
    window, so a worker known to be slow is not forgotten while it is cut off. ``seed`` fixes those draws.
    """

    name = "window"

    def __init__(self, *, steps: int = 20, seed: int = 0) -> None:
        if steps < 1:
            raise ValueError(f"the window holds at least one step, not {steps}")
        self._rows: deque[Floats] = deque(maxlen=steps)
        self._rng = np.random.default_rng(seed)

    def observe(self, seen: Seen) -> None:
        same_workers(self._rows[-1] if self._rows else None, seen)
        row = seen.seconds.copy()
        if seen.late.any():
            row[seen.late] = self._beyond(row[seen.late], seen.late)
        self._rows.append(row)

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        if not self._rows:
            raise ValueError("nothing was observed yet: a forecast needs one step")
        return np.stack(self._rows)[rng.integers(len(self._rows), size=rows)]

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        for step, row in enumerate(self._rows):
            self._rows[step] = moved(row, sources, seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [row.tolist() for row in self._rows], "draws": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows.clear()
        self._rows.extend(np.array(row, dtype=np.float64) for row in state["rows"])
        self._rng.bit_generator.state = state["draws"]

    def _beyond(self, above: Floats, late: Mask) -> Floats:
        tail = above * (1 + TAIL * self._rng.exponential(size=len(above)))
        if not self._rows:
            return tail
        past = np.stack(self._rows)
        own = past[:, late]
        slower = own > above
        pick = np.argmax(slower * (1.0 - self._rng.random(own.shape)), axis=0)
        drawn = np.where(slower.any(axis=0), own[pick, np.arange(own.shape[1])], tail)
        lone = np.flatnonzero(~slower.any(axis=0))
        return self._from_fleet(drawn, lone, above, np.sort(past, axis=None)) if len(lone) else drawn

    def _from_fleet(self, drawn: Floats, lone: np.typing.NDArray[np.intp], above: Floats, pool: Floats) -> Floats:
        first = np.searchsorted(pool, above[lone], side="right")
        place = first + (self._rng.random(len(lone)) * (len(pool) - first)).astype(np.intp)
        some = first < len(pool)
        drawn[lone[some]] = pool[place[some]]
        return drawn
