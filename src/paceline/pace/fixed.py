"""Shares that stay as they are: equal ones, and ratios set by hand (P1, the static allocation).

Equal shares are what plain data-parallel training does, and the yardstick for the other paces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.pace.forecasting import Forecasting, by_identity, caps, floors
from paceline.pace.pacer import Ask, Simulated, Traits
from paceline.pace.shares import proportional
from paceline.records import Plan


class Equal(Forecasting):
    """Equal shares, the same number of samples for everybody: ``n_i = total / workers``.

    >>> Equal().plan(Ask(step=0, total=10, workers=(0, 1, 2, 3))).samples
    (3, 3, 2, 2)
    """

    name = "equal"
    """Name in ``pace=``, the log and checkpoints."""
    traits = Traits(equal_shares=True)
    """Facts of it for reports and the simulator."""

    def plan(self, ask: Ask) -> Plan:
        """Return the same number of samples for everybody."""
        weights = np.ones(len(ask.workers))
        shares = proportional(weights, ask.total, unit=ask.unit, minimum=floors(ask), maximum=caps(ask))
        return self._answer(ask, shares)

    def __repr__(self) -> str:
        return "Equal()"


class Fixed(Forecasting):
    """Shares in proportion to ``ratios`` of WORK: a 2 does twice the samples of a 1, a 0 sits out.

    The i-th ratio is that of worker i (in a fleet of fixed size, of rank i), wherever it stands among the others. A
    worker beyond the list has the mean ratio; where only workers with ratio 0 are left, they share alike.

    >>> Fixed([1, 1, 2]).plan(Ask(step=0, total=64, workers=(0, 1, 2))).samples
    (16, 16, 32)
    """

    name = "fixed"
    """Name in ``pace=``, the log and checkpoints."""
    traits = Traits(usage="fixed:1,1,2 (ratios of work, one per worker)")
    """Facts of it for reports and the simulator."""

    def __init__(self, ratios: Sequence[float]) -> None:
        super().__init__()
        try:
            self.ratios = tuple(float(ratio) for ratio in ratios)
        except (TypeError, ValueError):
            raise ValueError(f"ratios must be a list of numbers, one for each worker, not {ratios!r}") from None
        if not all(math.isfinite(ratio) and ratio >= 0 for ratio in self.ratios) or not any(self.ratios):
            raise ValueError(f"ratios must be finite, at least 0 and not all 0, not {list(self.ratios)}")

    @classmethod
    def from_text(cls, pace: str) -> Fixed:
        """Return the pacer for ``pace=`` as it is written, ``fixed:1,1,2``."""
        try:
            ratios = [float(ratio) for ratio in pace.strip().partition(":")[2].split(",")]
        except ValueError:
            raise ValueError(f"pace {pace!r} needs ratios of work, one per worker, such as fixed:1,1,2") from None
        return cls(ratios)

    @classmethod
    def simulated(cls, **_: Any) -> Sequence[Simulated]:
        """Return no rows for the simulator: only who knows the machines can set ratios."""
        return ()

    def check(self, workers: int) -> None:
        super().check(workers)
        if len(self.ratios) != workers:
            raise ValueError(f"{len(self.ratios)} ratios for {workers} workers: give one for each")

    def plan(self, ask: Ask) -> Plan:
        """Return shares in the ratios that were set."""
        ratios = by_identity(self.ratios, ask.workers, beyond=sum(self.ratios) / len(self.ratios))
        weights = ratios if any(ratios) else [1.0] * len(ratios)
        shares = proportional(weights, ask.total, unit=ask.unit, minimum=floors(ask), maximum=caps(ask))
        return self._answer(ask, shares)

    def __repr__(self) -> str:
        return f"Fixed({list(self.ratios)})"
