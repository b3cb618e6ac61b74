"""Simple forecasts beside smoothed: last value, order statistics (P3's baseline) and an empirical window."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.forecast import (
    Floats,
    Forecast,
    Mask,
    Seen,
    known,
    moved,
    quantile,
    register,
    same_workers,
    to_array,
    to_list,
    truncated_draws,
    truncated_moments,
)

LEAST_CHANGE = 0.02
"""Least spread of a step's change (natural log) that is believed."""
FIRST_CHANGE = 0.2
CHANGE_RATE = 0.05
"""Weight of the newest step in the running mean square of changes."""
LEAST_SPREAD = 0.001
"""Least standard deviation over mean of the order statistics."""
PASSES = 8
"""Rounds of expectation and maximisation for a step in which workers were cut off."""
TAIL = 0.5
"""Factor of the tail ``t * (1 + TAIL * E)``, E exponential, that x given x > t has where nothing slower was seen."""


class LastValue(Forecast):
    """Every worker takes as long again as it just did.

    A worker cut off since it was last seen is a draw of

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
        twice = ~seen.late & (self._above == 0)
        if twice.any():
            newest = float(np.mean(np.log(seen.seconds[twice] / self._seconds[twice]) ** 2))
            self._change_2 += CHANGE_RATE * (newest - self._change_2)
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


def expected_order(workers: int) -> Floats:
    """Return the expected order statistics of ``workers`` standard normals, smallest first.

    ``E z_(r) = Phi^-1((r - pi/8) / (n - pi/4 + 1))``.
    """
    if workers < 1:
        raise ValueError(f"order statistics need at least one worker, not {workers}")
    rank = np.arange(1, workers + 1)
    return quantile((rank - math.pi / 8) / (workers - math.pi / 4 + 1))


class OrderStatistics(Forecast):
    """Order statistics of like workers (P3's baseline, after Elfving): only ranks are forecast.

    All workers draw from one ``N(m, s^2)``; the forecast is ``m + s E z_(r)``, one row, sorted. The step's m and s are
    fitted over all workers, those cut off by the moments of ``x | x > cut-off`` (the EM rounds of a censored normal),
    and smoothed over steps with ``rate``.
    """

    name = "Elfving"
    tells_apart = False

    def __init__(self, *, rate: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate is the weight of the newest step, above 0 and at most 1, not {rate}")
        self.rate = rate
        self._order: Floats | None = None
        self._mean = self._sigma = 0.0

    def observe(self, seen: Seen) -> None:
        same_workers(self._order, seen)
        rate = self.rate
        if self._order is None:
            self._order, rate = expected_order(len(seen.seconds)), 1.0
            self._mean, self._sigma = float(seen.seconds.mean()), float(seen.seconds.std())
        mean, sigma = self._fit(seen)
        self._mean += rate * (mean - self._mean)
        self._sigma += rate * (sigma - self._sigma)

    def _fit(self, seen: Seen) -> tuple[float, float]:
        mean, sigma = self._mean, max(self._sigma, LEAST_SPREAD * self._mean)
        if not seen.late.any():
            return float(seen.seconds.mean()), float(seen.seconds.std())
        for _ in range(PASSES):
            beyond, unknown_2 = truncated_moments(mean, sigma, seen.seconds[seen.late])
            expected = seen.seconds.copy()
            expected[seen.late] = beyond
            mean = float(expected.mean())
            variance = float(np.mean((expected - mean) ** 2)) + float(unknown_2.sum()) / len(expected)
            sigma = max(math.sqrt(variance), LEAST_SPREAD * mean)
        return mean, sigma

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        if self._order is None:
            raise ValueError("nothing was observed yet: a forecast needs one step")
        row = self._mean + self._sigma * self._order
        return np.maximum(row, 0.1 * self._mean)[None, :]

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        """Follow the number of workers, which is all that matters here."""
        if self._order is not None:
            self._order = expected_order(len(sources))

    def state_dict(self) -> dict[str, Any]:
        workers = None if self._order is None else len(self._order)
        return {"workers": workers, "mean": self._mean, "sigma": self._sigma}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order = None if state["workers"] is None else expected_order(int(state["workers"]))
        self._mean, self._sigma = float(state["mean"]), float(state["sigma"])


class Window(Forecast):
    """One of the last ``steps`` steps, drawn as a row, so that workers that slow together stay together.

    A worker cut off at t enters its row as a truncated draw, x given x > t: from its own times in the window, else from
    everybody's, else from an exponential tail. What was drawn stays in the window, so a worker known to be slow is not
    forgotten while it is cut off. ``seed`` fixes those draws.
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

    def _from_fleet(self, drawn: Floats, lone: NDArray[np.intp], above: Floats, pool: Floats) -> Floats:
        first = np.searchsorted(pool, above[lone], side="right")
        position = first + (self._rng.random(len(lone)) * (len(pool) - first)).astype(np.intp)
        some = first < len(pool)
        drawn[lone[some]] = pool[position[some]]
        return drawn


register("last", LastValue)
register("elfving", OrderStatistics)
register("window", Window)
