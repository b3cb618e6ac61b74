"""What a pace says of itself besides its plans: read by the simulator, the verdict and the what-if.

All of it stands on the pacer's class and may be left out; then the defaults here hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.pace.base import Pacer
from paceline.pace.forecast.base import Forecast

Played = Literal["arrivals", "shares", "rounds"]
"""How the simulator plays a pacer: its plans say how many whole shares a step waits for, or everybody's share, or what
is done micro-batch by micro-batch until a deadline."""


@dataclass(frozen=True)
class Traits:
    """The class attribute ``traits`` of a pacer.

    >>> declared(type("Mine", (), {"traits": Traits(follows_speed=True)})).follows_speed, declared(object).usage
    (True, '')
    """

    usage: str = ""
    """How the pace is written in ``pace=`` where its name alone is not enough."""
    equal_shares: bool = False
    """All are dealt the same and waited for, as in plain data-parallel training: what other paces are compared with."""
    follows_speed: bool = False
    """Shares follow every worker's speed step by step. Where they do not and a worker holds the others back, the
    verdict advises the default pace."""
    if_stalled: str = ""
    """The pace that the verdict advises when the others are held up now and then."""
    if_cut: str = ""
    """The pace that the verdict advises when work is cut off and done again."""
    played: Played | None = None
    """How the simulator plays the pace: "rounds" for one that sets deadlines, else "shares", when left out."""
    shown: bool = True
    """The simulator's page draws the pace at once; otherwise its line waits in the legend."""


@dataclass(frozen=True)
class Simulated:
    """A row of the simulator's table: a pacer that has seen nothing yet."""

    name: str
    pacer: Pacer
    as_chosen: bool = True
    """The pace as ``pace=`` with its name gives it, which the what-if may advise; otherwise a variant."""
    cut_to_fit: bool = True
    """Before a deadline, micro-batches are cut to what still fits."""


def declared(kind: type[Any]) -> Traits:
    """What the class says of itself, or the defaults."""
    said = getattr(kind, "traits", None)
    return said if isinstance(said, Traits) else Traits()


def played(kind: type[Pacer]) -> Played:
    """How the simulator plays the pace."""
    return declared(kind).played or ("rounds" if getattr(kind, "deadlines", False) else "shares")


def rows(kind: type[Pacer], *, seed: int = 0, forecast: Forecast | None = None) -> Sequence[Simulated]:
    """The simulator's rows of a pace: what its class method ``simulated`` says, or one row of the pace as it is.

    ``seed`` is that of its draws; ``forecast`` is tried besides the usual ones by a pace that forecasts.
    """
    simulated = getattr(kind, "simulated", None)
    if simulated is None:
        return [Simulated(kind.name, kind())]
    own: Sequence[Simulated] = simulated(seed=seed, forecast=forecast)
    return own
