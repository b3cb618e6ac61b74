"""Whether a deadline pays: what waiting for everybody costs, against all working until one deadline.

Both are running means of seconds per sample, over steps:

    waited    the step with adaptive's shares and nobody left out:  max_i t_i + overhead without a deadline
    together  the step with a deadline:  n / sum_i v_i, over the part of their time that workers are at work, + overhead
              with a deadline

Without a deadline the first is what happened and the second is known in hindsight from every worker's speed; with one
it is the other way round. Sums of seconds, not a forecast, decide: one stall of fifty steps among a hundred calm ones
shows in full, where a normal distribution would call it impossible. The overheads (the round, the update, whatever else
the step's wall clock holds) are measured in either kind of step, so what a deadline itself costs counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

RATE = 0.05
"""Least weight of the newest step in the running means; more while there are few."""


class Gain:
    """Whether deadlines pay: on when waiting costs more than the fraction ``least``, off when no more than ``keep``.

    ``keep`` is below ``least``, so that it does not flap.

    Before the first time ``steps`` are judged, or ``few`` that agree: the mean of their gains, less two standard
    errors, is above ``least``.
    """

    def __init__(self, *, least: float, keep: float = 0.0, steps: int = 1, few: int | None = None) -> None:
        self.least, self.keep, self.steps, self.few = least, keep, steps, steps if few is None else few
        self._gains = self._squares = 0.0
        self.on = False
        self._waited = self._together = 0.0
        self._overhead_s: list[float | None] = [None, None]
        self._steps = 0

    @property
    def value(self) -> float:
        """Seconds of waiting for everybody over those of a deadline, less 1."""
        return self._waited / self._together - 1 if self._together > 0 else 0.0

    def observe(
        self,
        waited_s: float,
        together_s: float,
        samples: int,
        *,
        deadline: bool,
        overhead_s: float = 0.0,
        may_end: bool = True,
    ) -> None:
        """Learn from one step of ``samples`` samples, with or without a ``deadline``, and its own overhead.

        ``may_end``: nobody is stuck now, so waiting for everybody is safe.
        """
        without_s, with_s = self._overheads(deadline, overhead_s)
        self._steps += 1
        rate = max(RATE, 1 / self._steps)
        if self._steps < self.steps:
            gain = (waited_s + without_s) / (together_s + with_s) - 1
            self._gains, self._squares = self._gains + gain, self._squares + gain**2
        self._waited += rate * ((waited_s + without_s) / samples - self._waited)
        self._together += rate * ((together_s + with_s) / samples - self._together)
        if self.on:
            self.on = self.value > self.keep or not may_end
        else:
            self.on = self.value > self.least and self._enough()

    def _enough(self) -> bool:
        if self._steps >= self.steps or self._steps < self.few:
            return self._steps >= self.steps
        mean = self._gains / self._steps
        error = math.sqrt(max(0.0, self._squares / self._steps - mean**2) / max(1, self._steps - 1))
        return mean - 2 * error > self.least

    def _overheads(self, deadline: bool, overhead_s: float) -> tuple[float, float]:
        """Return running means without and with a deadline; the kind never met is taken for the other."""
        last = self._overhead_s[deadline]
        self._overhead_s[deadline] = overhead_s if last is None else last + RATE * (overhead_s - last)
        without_s, with_s = (mean if mean is not None else overhead_s for mean in self._overhead_s)
        return without_s, with_s

    def state_dict(self) -> dict[str, Any]:
        return {
            "on": self.on,
            "waited": self._waited,
            "together": self._together,
            "overhead_s": list(self._overhead_s),
            "steps": self._steps,
            "gains": [self._gains, self._squares],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.on, self._steps = bool(state["on"]), int(state["steps"])
        self._waited, self._together = float(state["waited"]), float(state["together"])
        self._overhead_s = list(state["overhead_s"])
        self._gains, self._squares = state.get("gains", (0.0, 0.0))
