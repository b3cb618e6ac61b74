"""The roster as a launcher sees it, its own in this process or a remote one; and the workers' identity there.

A worker's identity is its computer's name and its number there, so a second launcher that joins a fleet from the same
computer must use other numbers. A launcher whose workers may return on another computer has a name of its own for them
(``starter``), which they find in PACELINE_STARTER.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.launcher.tokens import is_loopback
from paceline.observe.serve.addresses import reached_at
from paceline.roster import RosterServer
from paceline.roster.membership_rules import FINISHED
from paceline.roster.wire import parse_address, parse_fingerprint, written

TAKING_S = 2.0
"""How long a newcomer is given to take over a peer's state before it counts as one that holds it."""


class Roster:
    """What a launcher asks of a roster, answered for one elsewhere: that notices by itself who comes and goes, and only
    workers connect to it. Workers of this computer are called by their number."""

    maximum: int | None = None
    """The most workers that the launcher knows to be allowed."""
    finished = False
    """Whether the training has ended well, so that no worker is needed any more."""

    starter: str | None = None
    """In the names of this launcher's workers, in place of their computer's."""

    def __init__(self, host: str, port: int, token: str, *, fingerprint: str | None = None) -> None:
        self.address, self.port, self.token = written(host, port, fingerprint or ""), port, token
        self.loopback = is_loopback(host)
        """Whether only this computer can reach it."""

    @property
    def inside(self) -> frozenset[int]:
        """Workers of this computer that are in the fleet."""
        return frozenset()

    @property
    def outsiders(self) -> int:
        """How many are in the fleet that others have started: they need the roster here."""
        return 0

    @property
    def waiting(self) -> str:
        """What the fleet waits for, as long as it does."""
        return ""

    def started(self, number: int, *, first: bool) -> None:
        """A process was started; the fleet's first generation waits for those of the beginning (``first``)."""

    def died(self, number: int, how: str) -> None:
        """A process has ended."""

    def close(self) -> None:
        """The launcher ends."""


def remote_roster(address: str, token: str) -> Roster:
    """The roster that ``--join`` names."""
    try:
        host, port = parse_address(address)
        return Roster(host, port, token, fingerprint=parse_fingerprint(address))
    except ValueError as error:
        raise ValueError(f"--join: {error}") from None


class OwnRoster(Roster):
    """A roster in the launcher's own process: it is told at once who has died, and knows who is in."""

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
        """Until when workers that just came in may still lack the training's state."""
        self._started: set[str] = set()
        try:
            self._server = RosterServer(
                minimum=minimum,
                maximum=maximum,
                token=token,
                host=host,
                port=port,
                certificate=certificate,
                observe=self._observe,
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

    def _observe(self, kind: str, said: Mapping[str, Any]) -> None:
        """Called from the server's thread."""
        with self._lock:
            if kind == "registered":
                self._names[said["id"]] = said["name"]
            elif kind == "left" and said["name"] in self._inside:
                self._inside.remove(said["name"])
                self.finished = self.finished or said["text"] == FINISHED
            elif kind == "generation":
                self._inside = {self._names[id] for id in said["workers"]}
                new = said["fresh"] if len(said["fresh"]) < len(said["workers"]) else []
                self._fresh = {self._names[id]: concurrency.monotonic() + TAKING_S for id in new}
            elif kind == "finished":
                self.finished = True


def worker_name(number: int, starter: str | None = None) -> str:
    """A worker's name in the fleet: its computer, or who else numbers the workers, and its number there."""
    return f"{starter or socket.gethostname()}/{number}"


def number_of(name: str, starter: str | None = None) -> int | None:
    """The number of a worker of this computer, or of this ``starter``; None for others."""
    host, _, number = name.rpartition("/")
    mine = host == (starter or socket.gethostname())
    return int(number) if mine and number.isascii() and number.isdigit() else None


class WorkerNumbers:
    """The numbers that this launcher holds in the fleet whose roster listens on ``port``.

    A number is held by binding a name in Linux's abstract namespace of sockets: nothing is left on the disk, and it is
    free again when the launcher ends, whatever it ends of. Elsewhere every number counts as free, and the roster
    refuses the second worker of a name.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._held: dict[int, socket.socket | None] = {}

    def acquire(self, lowest: int = 0) -> int:
        """The lowest number from ``lowest`` on that nobody holds; it is this launcher's until `close`."""
        return next(number for number in count(lowest) if number not in self._held and self._bind(number))

    def close(self) -> None:
        for held in self._held.values():
            if held is not None:
                held.close()
        self._held.clear()

    def _bind(self, number: int) -> bool:
        if not sys.platform.startswith("linux"):
            self._held[number] = None
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0paceline-{os.getuid()}-{self._port}-{number}")
        except OSError:
            name.close()
            return False
        self._held[number] = name
        return True
