"""The pacers: how many samples each worker does, and until when; `make` gets one by name.

Pure: no clock, no I/O, no torch.

Each pace is a class and one line here; what others need to know of it stands on its class (`Pacer`). The cut-off is a
plug-in (`paceline.research`), imported when it is asked for.
"""

from __future__ import annotations

from paceline.pace.adaptive import Adaptive
from paceline.pace.auto import Auto
from paceline.pace.epoch import Epoch
from paceline.pace.fixed import Equal, Fixed
from paceline.pace.joint import Joint
from paceline.pace.pacer import (
    PACES,
    Ask,
    MinimalPacer,
    Pacer,
    Simulated,
    Traits,
    baseline,
    deadlines_needed,
    make,
    may_set_deadlines,
    register,
    registered,
    traits_of,
)

__all__ = [
    "DEFAULT",
    "WAITING",
    "Adaptive",
    "Ask",
    "Auto",
    "Epoch",
    "Equal",
    "Fixed",
    "Joint",
    "MinimalPacer",
    "Pacer",
    "Simulated",
    "Traits",
    "baseline",
    "deadlines_needed",
    "make",
    "may_set_deadlines",
    "register",
    "registered",
    "traits_of",
    "with_a_sample_for_each",
]

DEFAULT = Auto.name
"""The pace of a fleet that asks for none, and the one that reports advise."""
WAITING = Adaptive.name
"""Pace that reports advise where waiting for everybody is faster."""


def with_a_sample_for_each() -> Pacer:
    """Return a pacer whose shares follow the speeds, with at least one sample per worker and no deadlines."""
    return Adaptive(minimum=1)


register(Equal)
register(Fixed)
register(Epoch)
register(Adaptive)
PACES.plug_in("cutoff", "paceline.research.cutoff")
register(Joint)
register(Auto)
