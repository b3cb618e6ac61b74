"""Where this worker is in the program: which call of each sequence it is in, and what it does between two of them.

A worker's beats tell the others, through the store (`paceline.transport.heartbeat`) or the roster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.roster.calls import CALLS, Spot


class CallPlace(NamedTuple):
    """Where this worker is, replaced whole, so that another thread never reads half of a change."""

    call: int = 0
    label: str = ""
    since: float | None = None
    """When it began to wait there; None while it works towards the next call."""

    def spot(self) -> Spot:
        return Spot(self.call, self.label, self.since is not None)


class CallSequences:
    """This worker's place in each sequence of calls. ``on_change`` is called when there is something new to tell."""

    def __init__(self, *lanes: str, on_change: Callable[[], None] = lambda: None) -> None:
        self.doing = "starting"
        self.begun = 0
        """Steps that the user's thread has begun."""
        self.places = dict.fromkeys(lanes, CallPlace())
        self._on_change = on_change

    def note(self, doing: str, *, begun: int | None = None) -> None:
        """What this worker does now."""
        self.doing = doing
        if begun is not None:
            self.begun = begun
        self._on_change()

    def enter(self, label: str, *, lane: str, since: float, call: int | None = None) -> int:
        """Begin the next call of this lane, or call number ``call``: from now on this worker waits for the others."""
        place = CallPlace(self.places[lane].call + 1 if call is None else call, label, since)
        self.places[lane] = place
        self._on_change()
        return place.call

    def leave(self, *, lane: str) -> None:
        self.places[lane] = self.places[lane]._replace(since=None)
        self._on_change()

    def skip_to(self, call: int, *, lane: str = CALLS) -> None:
        """This worker has taken over another one's place in the training, calls included."""
        self.places[lane] = CallPlace(call)

    def fall_back(self, call: int, *, lane: str) -> None:
        """The call under way is no longer this worker's business: ``call`` was its last."""
        self.places[lane] = self.places[lane]._replace(call=call)

    def spots(self) -> dict[str, Spot]:
        return {lane: place.spot() for lane, place in self.places.items()}

    def longest_wait(self) -> tuple[str, float | None]:
        """The lane in which this worker has waited longest, and since when; None: it waits nowhere."""
        waits = [(place.since, lane) for lane, place in self.places.items() if place.since is not None]
        return (min(waits)[1], min(waits)[0]) if waits else (CALLS, None)
