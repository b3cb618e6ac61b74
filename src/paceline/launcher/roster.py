"""The roster as a launcher sees it, in its own process or a remote one; and the workers' names in it.

A worker's name is its computer's name and its number there, so a second launcher that joins a fleet from the same
computer must use other numbers. A launcher whose workers may return on another computer gives them a name of its own
(``starter``) in place of the computer's, in the variable PACELINE_STARTER.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.launcher.tokens import is_loopback
from paceline.roster import RosterServer
from paceline.roster.door import reached_at
from paceline.roster.state import FINISHED
from paceline.roster.wire import parse_address, parse_fingerprint, written

TAKING_S = 2.0
"""Time after which a newcomer is assumed to have taken over a peer's state."""


class Roster:
    """A roster as a launcher sees it; this base class stands for a remote one.

    A remote roster notices by itself which workers come and go, and only workers connect to it. Workers of this
    computer are identified by their number.
    """

    maximum: int | None = None
    """The greatest number of workers allowed; None when the launcher does not know it."""
    finished = False
    """Whether the training has ended well, so that no worker is needed any more."""

    starter: str | None = None
    """The name that stands in place of the computer's in the names of this launcher's workers."""

    def __init__(self, host: str, port: int, token: str, *, fingerprint: str | None = None) -> None:
        self.address, self.port, self.token = written(host, port, fingerprint or ""), port, token
        self.loopback = is_loopback(host)
        """Whether only this computer can reach the roster."""

    @property
    def inside(self) -> frozenset[int]:
        """Workers of this computer that are in the fleet."""
        return frozenset()

    @property
    def outsiders(self) -> int:
        """The number of workers in the fleet that other launchers have started: they need the roster here."""
        return 0

    @property
    def waiting(self) -> str:
        """For whom the fleet waits, in words; empty when it does not."""
        return ""

    def started(self, number: int, *, first: bool) -> None:
        """Register a started process; the fleet's first generation waits for those started ``first``."""

    def died(self, number: int, how: str) -> None:
        """Report the end of a process."""

    def close(self) -> None:
        """Release the roster; called when the launcher ends."""


def remote_roster(address: str, token: str) -> Roster:
    """Return the roster at the address given by ``--join``."""
    try:
        host, port = parse_address(address)
        return Roster(host, port, token, fingerprint=parse_fingerprint(address))
    except ValueError as error:
        raise ValueError(f"--join: {error}") from None


class OwnRoster(Roster):
    """A roster in the launcher's own process: the launcher reports deaths at once, and sees who is in the fleet."""

    def __init__(
        self,
        *,
        minimum: int,
        maximum: int,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        starter: str | None = None,
        certificate: Path | None = None,
    ) -> None:
        self.starter = starter
        self._lock = concurrency.Lock()
        self._names: dict[int, str] = {}
        self._inside: set[str] = set()
        self._fresh: dict[str, float] = {}
        """Times until which workers that just came in may still lack the training's state."""
        self._started: set[str] = set()
        try:
            self._server = RosterServer(
                minimum=minimum,
                maximum=maximum,
                token=token,
                host=host,
                port=port,
                certificate=certificate,
                on_event=self._on_event,
            )
        except OSError as error:
            raise ValueError(f"cannot listen on {written(host, port)} ({error.strerror or error})") from None
        self._server.start()
        super().__init__(reached_at(host), self._server.port, token, fingerprint=self._server.fingerprint)
        self.maximum, self.loopback = maximum, is_loopback(host)

    @property
    def inside(self) -> frozenset[int]:
        now = concurrency.monotonic()
        with self._lock:
            settled = [name for name in self._inside if self._fresh.get(name, 0.0) <= now]
            return frozenset(number for name in settled if (number := number_of(name, self.starter)) is not None)

    @property
    def outsiders(self) -> int:
        with self._lock:
            return len(self._inside - self._started)

    @property
    def waiting(self) -> str:
        return str(self._server.snapshot()["waiting_for"])

    def started(self, number: int, *, first: bool) -> None:
        self._started.add(worker_name(number, self.starter))
        if first:
            self._server.expect(1)

    def died(self, number: int, how: str) -> None:
        self._server.died(worker_name(number, self.starter), how)

    def close(self) -> None:
        self._server.close()

    def _on_event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Handle an event of the server; called from the server's thread."""
        with self._lock:
            if kind == "registered":
                self._names[event["id"]] = event["name"]
            elif kind == "left" and event["name"] in self._inside:
                self._inside.remove(event["name"])
                self.finished = self.finished or event["text"] == FINISHED
            elif kind == "generation":
                self._inside = {self._names[id] for id in event["workers"]}
                new = event["fresh"] if len(event["fresh"]) < len(event["workers"]) else []
                self._fresh = {self._names[id]: concurrency.monotonic() + TAKING_S for id in new}
            elif kind == "finished":
                self.finished = True


def worker_name(number: int, starter: str | None = None) -> str:
    """Return a worker's name in the fleet: its computer's name, or the ``starter``, and its number there."""
    return f"{starter or socket.gethostname()}/{number}"


def number_of(name: str, starter: str | None = None) -> int | None:
    """Return the number of a worker of this computer, or of this ``starter``; None for others."""
    host, _, number = name.rpartition("/")
    mine = host == (starter or socket.gethostname())
    return int(number) if mine and number.isascii() and number.isdigit() else None


class WorkerNumbers:
    """The numbers that this launcher holds in the fleet whose roster listens on ``port``.

    A number is held by binding a name in Linux's abstract socket namespace: nothing is left on the disk, and the number
    is free again however the launcher ends. On other systems every number counts as free, and the roster refuses a
    second worker with the same name.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._held: dict[int, socket.socket] = {}

    def acquire(self, lowest: int = 0) -> int:
        """Return the lowest free number from ``lowest`` on, and hold it until `close`."""
        return next(number for number in count(lowest) if number not in self._held and self._bind(number))

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _bind(self, number: int) -> bool:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0paceline-{os.getuid()}-{self._port}-{number}")
        except OSError:
            name.close()
            return False
        self._held[number] = name
        return True
