"""Smoothed: an exponentially weighted normal distribution for each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast.base import Floats, Seen, known, moved, same_workers, to_array, to_list
from paceline.pace.forecast.normal import truncated_moments

FIRST_SPREAD = 0.1
"""Standard deviation over mean that a worker starts with."""
LEAST_SPREAD = 0.005


class Smoothed:
    """``x_i ~ N(m_i, s_i^2)``, workers independent, with ``rate`` r the weight of the newest step:

        e = x - m,    m <- m + r e,    s^2 <- (1 - r) (s^2 + r e^2)

    A worker cut off at t enters with the mean and the variance of ``x | x > t`` under its own distribution, that is as
    the average over all truncated draws: one known to be slow keeps its belief, one believed fast moves beyond t.
    """

    name = "smoothed"

    def __init__(self, *, rate: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate is the weight of the newest step, above 0 and at most 1, not {rate}")
        self.rate = rate
        self._mean: Floats | None = None
        self._variance = np.zeros(0)

    @property
    def mean_s(self) -> Floats:
        """Each worker's expected seconds."""
        return known(self._mean).copy()

    def observe(self, seen: Seen) -> None:
        same_workers(self._mean, seen)
        if self._mean is None:
            self._mean, self._variance = seen.seconds.copy(), (FIRST_SPREAD * seen.seconds) ** 2
        expected, spread_2 = seen.seconds, np.zeros_like(seen.seconds)
        if seen.late.any():
            beyond, unknown_2 = truncated_moments(self._mean, self._sigma(), seen.seconds)
            expected = np.where(seen.late, beyond, seen.seconds)
            spread_2 = np.where(seen.late, unknown_2, 0.0)
        error = expected - self._mean
        self._mean = self._mean + self.rate * error
        self._variance = (1 - self.rate) * (self._variance + self.rate * error**2) + self.rate * spread_2

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        mean = known(self._mean)
        drawn = mean + self._sigma() * rng.standard_normal((rows, len(mean)))
        # Times are positive; a draw below a tenth of the mean is noise of a wide belief.
        return np.maximum(drawn, 0.1 * mean)

    def rearrange(self, sources: Sequence[int], seconds: Floats) -> None:
        if self._mean is not None:
            self._mean = moved(self._mean, sources, seconds)
            self._variance = moved(self._variance, sources, (FIRST_SPREAD * seconds) ** 2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": to_list(self._mean), "variance": self._variance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Its own state, or that of auto, which follows a smoothed forecast too."""
        state = state.get("smoothed", state)
        self._mean = to_array(state["mean"])
        self._variance = np.array(state["variance"], dtype=np.float64)

    def _sigma(self) -> Floats:
        return np.maximum(np.sqrt(self._variance), LEAST_SPREAD * known(self._mean))
