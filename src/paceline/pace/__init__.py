"""Who does how many samples, until when: the pacers, and `make` to get one by name. Pure: no clock, no I/O, no torch.

Each pace is one file and one line here; what others need to know of it stands on its class (`Traits`).
"""

from __future__ import annotations

from paceline.pace.adaptive import Adaptive
from paceline.pace.auto import Auto
from paceline.pace.base import Ask, Pacer, deadlines_needed, may_set_deadlines
from paceline.pace.cutoff import Cutoff
from paceline.pace.epoch import Epoch
from paceline.pace.equal import Equal
from paceline.pace.fixed import Fixed
from paceline.pace.joint import Joint
from paceline.pace.registry import baseline, make, register, registered, traits_of
from paceline.pace.traits import Simulated, Traits

__all__ = [
    "DEFAULT",
    "WAITING",
    "Adaptive",
    "Ask",
    "Auto",
    "Cutoff",
    "Epoch",
    "Equal",
    "Fixed",
    "Joint",
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
]

DEFAULT = Auto.name
"""The pace of a fleet that asks for none, and the one that reports advise."""
WAITING = Adaptive.name
"""What reports advise where waiting for everybody is faster."""

register(Equal)
register(Fixed)
register(Epoch)
register(Adaptive)
register(Cutoff)
register(Joint)
register(Auto)
