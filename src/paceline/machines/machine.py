"""One emulated machine: the time that it takes for its samples, and the sleep that makes a worker take that time.

The time of a step's samples is::

    seconds = cost_s(step) + samples * sample_s * factor(step) * jitter(step)

``sample_s`` is the reference machine's time for a sample and ``factor`` how many times slower this one is. ``cost_s``
is a constant cost of every step in which the machine works (kernel launches, a slow loader, P0's artificial delay): it
does not depend on the samples, and neither factor nor jitter changes it. ``jitter`` is lognormal with mean 1,
``exp(sigma * z - sigma**2 / 2)`` with z standard normal, and depends on nothing but the seed, the rank and the step, so
a replay is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist
from typing import Protocol

from paceline import concurrency

CARRY_S = 0.05
"""The most oversleeping that later pads make up for.

Anything beyond (the process was stopped, the host was overloaded) is a shortfall: catching up would make the machine
look fast for a while.
"""


class Slowness(Protocol):
    """A machine's slowness against the reference machine, and its constant cost, step by step."""

    def factor(self, step: int) -> float: ...

    def cost_s(self, step: int) -> float: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Changing:
    """A factor and a cost that change at given steps.

    ``factors[i]`` and ``costs_s[i]`` hold from ``steps[i]`` on; ``steps[0]`` is 0.
    """

    steps: tuple[int, ...]
    factors: tuple[float, ...]
    costs_s: tuple[float, ...]

    def factor(self, step: int) -> float:
        return self.factors[bisect_right(self.steps, step) - 1]

    def cost_s(self, step: int) -> float:
        return self.costs_s[bisect_right(self.steps, step) - 1]

    def describe(self) -> str:
        words, before = [], 0.0
        for step, factor, cost_s in zip(self.steps, self.factors, self.costs_s):
            from_step = f" from step {step}" if step else ""
            words.append(f"{factor:g}x{from_step or ' slower'}")
            if cost_s != before:
                words.append(f"{_milliseconds(cost_s)} per step{from_step}")
            before = cost_s
        return ", ".join(words)


@dataclass(frozen=True)
class Recorded:
    """A factor per recorded step, repeated after the last one, and the constant cost of each step."""

    factors: tuple[float, ...]
    source: str
    constant_s: float = 0.0

    def factor(self, step: int) -> float:
        return self.factors[step % len(self.factors)]

    def cost_s(self, step: int) -> float:
        return self.constant_s

    def describe(self) -> str:
        slower = f"{self.source}, {min(self.factors):.2g}x to {max(self.factors):.2g}x slower"
        return slower + (f", {_milliseconds(self.constant_s)} per step" if self.constant_s else "")


@dataclass
class Machine:
    """A worker's emulated machine."""

    slowness: Slowness
    rank: int
    sample_s: float
    """Seconds per sample on the reference machine."""
    jitter: float = 0.0
    """Sigma of the lognormal jitter from step to step."""
    memory_samples: int | None = None
    """Emulated memory: more samples than this in one micro-batch do not fit."""
    seed: int = 0
    _ahead_s: float = field(default=0.0, init=False, repr=False, compare=False)

    def seconds(self, step: int, samples: int, *, begins: bool = True) -> float:
        """Return the seconds that this machine takes for ``samples`` samples at step ``step``; 0 for none.

        With ``begins`` the samples are its first in this step, so the step's constant cost is included.
        """
        cost_s = self.slowness.cost_s(step) if begins and samples else 0.0
        return cost_s + samples * self.sample_s * self.slowness.factor(step) * self._jitter(step)

    def pad(self, step: int, samples: int, started: float, *, begins: bool = True) -> float:
        """Sleep until ``started + seconds(step, samples, begins=begins)`` on the clock of `concurrency.perf_counter`.

        Every sleep lasts a little too long; the next sleep is shorter by the excess, so that the average is right.
        Returns the seconds by which the host was too slow to emulate this machine, else 0.
        """
        owed = self._ahead_s
        due = started + self.seconds(step, samples, begins=begins) - owed
        left = due - concurrency.perf_counter()
        if left > 0:
            concurrency.sleep(left)
            over = max(0.0, concurrency.perf_counter() - due)
            self._ahead_s = min(over, CARRY_S)
            return over - self._ahead_s
        self._ahead_s = min(-left, owed)
        return -left - self._ahead_s

    def check_memory(self, samples: int) -> None:
        """Raise torch.OutOfMemoryError when a micro-batch of ``samples`` does not fit this machine."""
        if self.memory_samples is not None and samples > self.memory_samples:
            import torch

            raise torch.OutOfMemoryError(
                f"emulated out of memory: a micro-batch of {samples} samples on a machine that holds "
                f"{self.memory_samples}"
            )

    def describe(self) -> str:
        """Return one line for the log and the view, such as ``2x slower, 8x from step 40, jitter 0.2``."""
        jitter = [f"jitter {self.jitter:g}"] if self.jitter else []
        memory = [f"memory for {self.memory_samples} samples"] if self.memory_samples is not None else []
        return ", ".join([self.slowness.describe(), *jitter, *memory])

    def _jitter(self, step: int) -> float:
        if not self.jitter:
            return 1.0
        return math.exp(self.jitter * _standard_normal(self.seed, self.rank, step) - self.jitter**2 / 2)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:g} ms"


def _standard_normal(seed: int, rank: int, step: int) -> float:
    """Return a normal number that is the same on every system and version, since it is drawn from a hash."""
    digest = blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # strictly between 0 and 1
    return NormalDist().inv_cdf(uniform)
