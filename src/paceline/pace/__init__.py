"""Who does how many samples, until when: the pacers, and `make` to get one by name. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable

from paceline.pace.adaptive import Adaptive
from paceline.pace.base import Ask, Pacer, may_set_deadlines
from paceline.pace.cutoff import Cutoff
from paceline.pace.epoch import Epoch
from paceline.pace.equal import Equal
from paceline.pace.fixed import Fixed
from paceline.pace.joint import Joint

__all__ = ["Adaptive", "Ask", "Cutoff", "Epoch", "Equal", "Fixed", "Joint", "Pacer", "make", "may_set_deadlines"]

_BY_NAME: dict[str, Callable[[], Pacer]] = {
    "equal": Equal,
    "epoch": Epoch,
    "adaptive": Adaptive,
    "cutoff": Cutoff,
    "joint": Joint,
}
_KNOWN = "equal, fixed:1,1,2 (ratios of work, one a worker), epoch, adaptive, cutoff, joint"


def make(pace: str | Pacer) -> Pacer:
    """A pacer from its name or from itself.

    >>> make("fixed:1,1,2")
    Fixed([1.0, 1.0, 2.0])
    """
    if isinstance(pace, Pacer) and not isinstance(pace, type):
        return pace
    if not isinstance(pace, str):
        raise ValueError(f"pace must be a name or a pacer such as Adaptive(), not {pace!r}. Known names: {_KNOWN}")
    name, _, ratios = pace.strip().partition(":")
    if name == "fixed":
        return Fixed(_ratios(ratios, pace))
    if name not in _BY_NAME or ratios:
        raise ValueError(f"unknown pace {pace!r}. Known names: {_KNOWN}")
    return _BY_NAME[name]()


def _ratios(text: str, pace: str) -> list[float]:
    try:
        return [float(ratio) for ratio in text.split(",")]
    except ValueError:
        raise ValueError(f"pace {pace!r} needs ratios of work, one a worker, such as fixed:1,1,2") from None
