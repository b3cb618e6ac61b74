"""Faults that the user asked for, injected into real workers: events at steps, and the nodes of a spot trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from paceline.machines.failures import Event
from paceline.machines.spot import Market, SpotChange


class Workers(Protocol):
    """The workers of a launcher, by number, as far as faults need them."""

    @property
    def living(self) -> Sequence[int]:
        """Workers whose process runs and that no fault has hit yet, in order."""

    @property
    def inside(self) -> frozenset[int]:
        """Living workers that are in the fleet, and therefore hold the training's state."""

    def kill(self, number: int, *, returns: bool) -> None: ...

    def freeze(self, number: int, *, seconds: float) -> None: ...

    def leave(self, number: int, *, notice_s: float | None = None) -> None:
        """Ask a worker to leave for good; after ``notice_s``, if given, kill it."""

    def add(self, *, new: bool) -> int | None:
        """Start one more worker and return its number; None when there is no room.

        Its number is one never used before if ``new``, else the lowest that is free.
        """

    def note(self, text: str) -> None: ...


class Faults:
    """The player of faults: ``events`` at their steps, and ``market`` by the clock once a worker is in the fleet.

    ``seed`` draws the workers called ``?``. A spot node is asked to leave ``notice_s`` before it is killed.
    """

    def __init__(
        self, events: Sequence[Event] = (), *, seed: int = 0, market: Market | None = None, notice_s: float = 0.0
    ) -> None:
        self._events, self._random = [*events], random.Random(seed)
        self._market, self._notice_s = market, notice_s
        self._slots: dict[str, int] = {}
        """The worker number of each node of the trace that is in use."""
        self._arriving: list[str] = []
        """Nodes that start as soon as the nodes before them have gone."""
        self._began_s: float | None = None
        """Time at which the trace's clock began: when its first node was in the fleet.

        Starting takes a while, and at a high speed-up the first nodes would be gone before they had begun.
        """
        self._announced_waiting = False

    @property
    def starts_workers(self) -> bool:
        """Whether the trace decides which workers are started, from the first one on."""
        return self._market is not None

    @property
    def coming(self) -> bool:
        """Whether the trace, whose clock is running, has yet to start a worker."""
        return bool(self._arriving) or (self._began_s is not None and self._market is not None and self._market.coming)

    @property
    def watches_steps(self) -> bool:
        return bool(self._events)

    def play(self, workers: Workers, *, step: int, elapsed_s: float) -> None:
        """Play the faults that are due after step ``step`` (-1: none yet) and ``elapsed_s`` seconds."""
        while self._events and self._events[0].step <= step:
            self._play_event(self._events.pop(0), workers)
        if self._market is not None:
            self._trade_all(self._market, workers, elapsed_s)

    # -- events ----------------------------------------------------------------------------------------------------

    def _play_event(self, event: Event, workers: Workers) -> None:
        if event.action == "join":
            number = workers.add(new=True)
            what = "skipped, the fleet is full" if number is None else f"worker {number} is started"
            workers.note(f"{event.text}: {what}")
            return
        if (target := self._target(event, workers)) is None:
            nobody = "no worker is running" if event.worker is None else f"worker {event.worker} is not running"
            workers.note(f"{event.text}: skipped, {nobody}")
            return
        workers.note(f"{event.text}: worker {target} {_fate(event)}")
        if event.action == "kill":
            workers.kill(target, returns=not event.stays)
        elif event.action == "freeze":
            workers.freeze(target, seconds=event.seconds)
        else:
            workers.leave(target)

    def _target(self, event: Event, workers: Workers) -> int | None:
        living = workers.living
        if event.worker is None:
            return self._random.choice(living) if living else None
        return event.worker if event.worker in living else None

    # -- spot machines ---------------------------------------------------------------------------------------------

    def _trade_all(self, market: Market, workers: Workers, elapsed_s: float) -> None:
        there = workers.inside
        inside = {node for node, number in self._slots.items() if number in there}
        if self._began_s is None and inside:
            self._began_s = elapsed_s
        since = 0.0 if self._began_s is None else elapsed_s - self._began_s
        for change in market.changes(market.begins_s + since, inside=inside):
            self._trade(change, workers)
        while self._arriving and (number := workers.add(new=False)) is not None:
            node = self._arriving.pop(0)
            self._slots = {other: taken for other, taken in self._slots.items() if taken != number} | {node: number}
            workers.note(f"spot: {node} comes as worker {number}")

    def _trade(self, change: SpotChange, workers: Workers) -> None:
        node = change.node
        if change.what == "add":
            self._arriving.append(node)
        elif change.what == "remove":
            self._reclaim(node, workers)
        elif change.what == "spare":
            workers.note(f"spot: {node} is spared until another worker has the training's state")
        elif not self._announced_waiting:
            self._announced_waiting = True
            workers.note(f"spot: {node} and further nodes wait until there is room")

    def _reclaim(self, node: str, workers: Workers) -> None:
        if node in self._arriving:
            self._arriving.remove(node)
            return
        if (number := self._slots.pop(node, None)) is None:  # its worker had gone before, and another has its number
            return
        workers.note(f"spot: {node} is reclaimed, worker {number} goes")
        if self._notice_s:
            workers.leave(number, notice_s=self._notice_s)
        else:
            workers.kill(number, returns=False)


def _fate(event: Event) -> str:
    if event.action == "kill":
        return "is killed and does not return" if event.stays else "is killed"
    return f"stands still for {event.seconds:g} s" if event.action == "freeze" else "is asked to leave"
