"""Last value: every worker takes as long again as it just did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast.base import Floats, Seen, known, moved, same_workers, to_array, to_list
from paceline.pace.forecast.normal import truncated_draws

LEAST_CHANGE = 0.02
"""Least spread of a step's change (natural log) that is believed."""
FIRST_CHANGE = 0.2
RATE = 0.05
"""Weight of the newest step in the running mean square of changes."""


class LastValue:
    """The worker's last seen seconds. A worker cut off since then is a draw of

        log x ~ N(log last, change^2)   given   x > the latest cut-off

    with ``change`` the fleet's running root mean square of ``log(x_t / x_(t-1))``: one known to be slow stays as slow
    as it was, one that was fast lies a little above the cut-off and is tried again.
    """

    name = "last value"

    def __init__(self) -> None:
        self._seconds: Floats | None = None
        self._above = np.zeros(0)
        self._change_2 = FIRST_CHANGE**2

    def observe(self, seen: Seen) -> None:
        same_workers(self._seconds, seen)
        if self._seconds is None:
            # Nothing better is known of a worker cut off in its first step than its cut-off, as a bound.
            self._seconds, self._above = seen.seconds.copy(), np.where(seen.late, seen.seconds, 0.0)
            return
        told = ~seen.late & (self._above == 0)
        if told.any():
            newest = float(np.mean(np.log(seen.seconds[told] / self._seconds[told]) ** 2))
            self._change_2 += RATE * (newest - self._change_2)
        self._seconds = np.where(seen.late, self._seconds, seen.seconds)
        self._above = np.where(seen.late, seen.seconds, 0.0)

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        seconds = known(self._seconds)
        late = np.flatnonzero(self._above)
        if not len(late):
            return seconds[None, :].copy()
        drawn = np.repeat(seconds[None, :], rows, axis=0)
        change = max(self._change_2**0.5, LEAST_CHANGE)
        drawn[:, late] = np.exp(truncated_draws(rng, np.log(seconds[late]), change, np.log(self._above[late]), rows))
        return drawn

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        if self._seconds is not None:
            self._seconds, self._above = moved(self._seconds, sources, seconds), moved(self._above, sources, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": to_list(self._seconds), "above": self._above.tolist(), "change_2": self._change_2}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._change_2 = to_array(state["seconds"]), float(state["change_2"])
        self._above = np.array(state["above"], dtype=np.float64)
