"""Equal shares: what plain data-parallel training does, and the yardstick for the other paces."""

from __future__ import annotations

import numpy as np

from paceline.pace.forecasting import Forecasting, caps, floors
from paceline.pace.pacer import Ask, Traits
from paceline.pace.shares import proportional
from paceline.records import Plan


class Equal(Forecasting):
    """Everybody the same number of samples: ``n_i = total / workers``.

    >>> Equal().plan(Ask(step=0, total=10, workers=(0, 1, 2, 3))).samples
    (3, 3, 2, 2)
    """

    name = "equal"
    """Name in ``pace=``, the log and checkpoints."""
    traits = Traits(equal_shares=True)
    """What reports and the simulator need to know of it."""

    def plan(self, ask: Ask) -> Plan:
        """Return the same number of samples for everybody."""
        weights = np.ones(len(ask.workers))
        shares = proportional(weights, ask.total, unit=ask.unit, minimum=floors(ask), maximum=caps(ask))
        return self._answer(ask, shares)

    def __repr__(self) -> str:
        return "Equal()"
