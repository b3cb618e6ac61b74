"""What a rule did over a simulation, step by step, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """One row of the table. All arrays have one number a step."""

    name: str
    workers: int
    shares: Floats
    """Work that counted, in equal shares: as many as workers when everybody's whole share did."""
    seconds: Floats
    """The step's length, the round's own cost included."""
    waiting_s: Floats
    """Seconds workers stood idle until the round, summed over workers."""
    wasted_s: Floats
    """Seconds workers spent on work that was thrown away, summed over workers."""
    pace: str = ""
    """The pace that this is, as ``pace=`` takes it; empty for variants and yardsticks, which nobody can choose."""
    shown: bool = False
    """Its line is drawn at once; otherwise it waits in the legend."""

    @property
    def throughput(self) -> float:
        """Equal shares a second, ``sum(shares) / sum(seconds)``: never a mean of ratios."""
        return float(self.shares.sum() / self.seconds.sum())

    @property
    def waiting(self) -> float:
        """Part of all worker-seconds spent idle."""
        return float(self.waiting_s.sum() / (self.workers * self.seconds.sum()))

    @property
    def wasted(self) -> float:
        """Part of all worker-seconds spent on work that was thrown away."""
        return float(self.wasted_s.sum() / (self.workers * self.seconds.sum()))

    @property
    def count_cv(self) -> float:
        """Spread of a step's work over its mean: how much the batch varies."""
        return float(self.shares.std() / self.shares.mean())

    def with_round(self, round_s: float) -> Outcome:
        """The same with rounds that take so much longer."""
        return replace(self, seconds=self.seconds + round_s)

    def after(self, warm_up: int) -> Outcome:
        """The same without the first ``warm_up`` steps."""
        columns = ("shares", "seconds", "waiting_s", "wasted_s")
        return replace(self, **{name: getattr(self, name)[warm_up:] for name in columns})


def matrix(seconds: ArrayLike) -> Floats:
    """Seconds as a steps x workers matrix; anything else is a ValueError that says where."""
    try:
        own = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("seconds are numbers, a row a step, each with as many workers") from None
    if own.ndim != 2 or not own.size:
        raise ValueError("seconds are a row a step and a column a worker, at least one of each")
    good = np.isfinite(own) & (own > 0)
    if not good.all():
        step, worker = np.unravel_index(int(np.argmin(good)), own.shape)
        raise ValueError(f"step {step}, worker {worker}: seconds are finite and above 0, not {own[step, worker]}")
    return own
