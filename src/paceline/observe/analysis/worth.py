"""What each worker adds to the fleet's speed: is an old machine worth adding? P1 adds one; the formula is derived.

With V the sum of the workers' speeds, N samples a step, r seconds of the round and o other seconds a step, a fleet
whose shares follow speed does ``N / (N / V + r + o)`` samples a second. A worker adds what the others do with it, less
what they do without it. The round of so many workers takes what it was measured to take; of a number that was never
there, what a ring would, where each of n workers sends ``2 (n - 1) / n`` of the model:
``r_n = r_m (1 - 1/n) / (1 - 1/m)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """A step of the fleet, on average."""

    samples: float
    round_s: Mapping[int, float]
    """The typical round as it was measured, by the number of workers: the median, for a few that were held up are not
    what the worker costs."""
    other_s: float

    def speed(self, speeds: Collection[float]) -> float:
        """Samples a second of a fleet of these workers, with shares that follow speed."""
        if not sum(speeds) or not self.samples:
            return 0.0
        return self.samples / (self.samples / sum(speeds) + self._round_s(len(speeds)) + self.other_s)

    def _round_s(self, workers: int) -> float:
        if workers in self.round_s:
            return self.round_s[workers]
        most = max(self.round_s, default=1)
        return self.round_s[most] * (1 - 1 / workers) / (1 - 1 / most) if most > 1 else 0.0


def adds(speeds: Mapping[int, float], present: Collection[int], step: StepCost) -> dict[int, float]:
    """Samples a second that each worker adds to those ``present``; below 0: it costs more than it brings.

    >>> step = StepCost(samples=100, round_s={2: 0.1}, other_s=0.0)
    >>> {worker: round(more) for worker, more in adds({0: 100.0, 1: 5.0}, {0, 1}, step).items()}
    {0: 90, 1: -5}
    """
    known = {worker: speed for worker, speed in speeds.items() if speed > 0}

    def gain(worker: int) -> float:
        others = [known[other] for other in present if other in known and other != worker]
        return step.speed([*others, known[worker]]) - step.speed(others)

    return {worker: gain(worker) for worker in known}
