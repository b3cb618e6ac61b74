"""P3's decision: how many workers to wait for, when late work is thrown away.

A step that closes with the c-th arrival does c shares in ``x_(c) + T_o`` seconds, with x_(c) the c-th smallest time and
T_o the round's own cost (communication and update). Waiting for everybody is c = n.

>>> best_count(np.array([[1.0, 1.0, 1.0, 9.0]]))
3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.forecast.base import Floats, Forecast, Seen

DRAWS = 32
"""Joint samples a decision is made from."""


def rates(ordered: Floats, *, overhead_s: float = 0.0) -> Floats:
    """Shares a second when closing with the c-th arrival, ``c / (x_(c) + T_o)``; rows are sorted times."""
    return np.arange(1, ordered.shape[-1] + 1) / (ordered + overhead_s)


def best_count(samples: Floats, *, overhead_s: float = 0.0) -> int:
    """``argmax_c mean_s c / (x^s_(c) + T_o)`` over joint samples, a row each; the larger count among equals."""
    gain = rates(np.sort(samples, axis=1), overhead_s=overhead_s).mean(axis=0)
    return best_count_of(gain)


def clairvoyant_counts(ordered: Floats, *, overhead_s: float = 0.0) -> NDArray[np.int64]:
    """The count for each step of somebody who knows its times beforehand; rows are sorted times."""
    gain = rates(ordered, overhead_s=overhead_s)
    return np.asarray(ordered.shape[1] - np.argmax(gain[:, ::-1], axis=1), dtype=np.int64)


def static_count(fraction: float, workers: int) -> int:
    """The nearest whole number of workers to a fraction of them, at least one."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a static cut-off waits for a fraction of the workers, above 0 and at most 1, not {fraction}")
    return max(1, round(fraction * workers))


def best_static_count(ordered: Floats, *, overhead_s: float = 0.0) -> int:
    """The one count that would have done most over all steps, ``argmax_c sum c / sum (x_(c) + T_o)``: hindsight."""
    return best_count_of(np.arange(1, ordered.shape[1] + 1) * len(ordered) / (ordered + overhead_s).sum(axis=0))


def best_count_of(throughput: Floats) -> int:
    """The count with the highest throughput; the larger one among equals."""
    return len(throughput) - int(np.argmax(throughput[::-1]))


class Cutoff:
    """Decides the count from a forecast. The step before anything was seen waits for everybody.

    The count is needed when the first workers arrive, not when the step starts, so it may be decided while the step
    computes, from all steps before it.
    """

    def __init__(self, forecast: Forecast, *, draws: int = DRAWS, overhead_s: float = 0.0, seed: int = 0) -> None:
        if draws < 1:
            raise ValueError(f"a decision needs at least one draw, not {draws}")
        if not (overhead_s >= 0 and np.isfinite(overhead_s)):
            raise ValueError(f"overhead_s is the round's own seconds, finite and at least 0, not {overhead_s}")
        self.forecast, self.draws, self.overhead_s = forecast, draws, overhead_s
        self._rng = np.random.default_rng(seed)
        self._steps = 0

    @property
    def name(self) -> str:
        return self.forecast.name

    def observe(self, seen: Seen) -> None:
        self.forecast.observe(seen)
        self._steps += 1

    def count(self, workers: int) -> int:
        """How many of so many workers the next step waits for."""
        if self._steps == 0:
            return workers
        return best_count(self.forecast.draw(self.draws, self._rng), overhead_s=self.overhead_s)

    def state_dict(self) -> dict[str, Any]:
        draws = self._rng.bit_generator.state
        return {"forecast": self.forecast.state_dict(), "steps": self._steps, "draws": draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forecast.load_state_dict(state["forecast"])
        self._steps = int(state["steps"])
        self._rng.bit_generator.state = state["draws"]
