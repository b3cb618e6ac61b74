"""Order statistics of like workers (P3's baseline, after Elfving): nobody is told apart, only ranks are forecast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast.base import Floats, Seen, same_workers
from paceline.pace.forecast.normal import quantile, truncated_moments

LEAST_SPREAD = 0.001
PASSES = 8
"""Rounds of expectation and maximisation for a step in which workers were cut off."""


def expected_order(workers: int) -> Floats:
    """Expected order statistics of ``workers`` standard normals, smallest first:
    ``E z_(r) = Phi^-1((r - pi/8) / (n - pi/4 + 1))``."""
    if workers < 1:
        raise ValueError(f"order statistics need at least one worker, not {workers}")
    rank = np.arange(1, workers + 1)
    return quantile((rank - math.pi / 8) / (workers - math.pi / 4 + 1))


class OrderStatistics:
    """All workers draw from one ``N(m, s^2)``; the forecast is ``m + s E z_(r)``, one row, sorted.

    The step's m and s are fitted over all workers, those cut off by the moments of ``x | x > cut-off`` (the EM rounds
    of a censored normal), and smoothed over steps with ``rate``.
    """

    name = "Elfving"

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
        """Nobody is told apart: only how many they are matters."""
        if self._order is not None:
            self._order = expected_order(len(sources))

    def state_dict(self) -> dict[str, Any]:
        workers = None if self._order is None else len(self._order)
        return {"workers": workers, "mean": self._mean, "sigma": self._sigma}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order = None if state["workers"] is None else expected_order(int(state["workers"]))
        self._mean, self._sigma = float(state["mean"]), float(state["sigma"])
