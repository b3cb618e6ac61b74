"""A worker's handshake with the roster: connect, see its certificate, prove and be proven to, and be let in or not."""

from __future__ import annotations

import os
import selectors
import socket
import weakref
from contextlib import suppress
from typing import Any

from paceline import concurrency
from paceline.roster import wire
from paceline.roster.wire import ALERT, HANDSHAKE, Channel

ANSWER_S = 5.0
"""How long the roster may take for each answer of the handshake."""

_OPEN: weakref.WeakSet[RosterConnection] = weakref.WeakSet()


class RosterConnection:
    """A connection over which the roster has let this worker in."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.id = -1
        self.running = False
        self.store_port = 0
        self.clock_ahead_s = 0.0
        """Seconds by which the roster's clock is ahead of this computer's, but for the welcome's time on its way."""
        self._channel = Channel()
        self._sending = concurrency.Lock()
        self._lines = wire.Lines(wire.MAX_ANSWER)
        self._early: list[dict[str, Any]] = []
        self._selector: selectors.BaseSelector | None = None
        """Made by the first `wait`."""
        _OPEN.add(self)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the certificate that the roster has shown."""
        return self._channel.fingerprint

    def secure(self) -> None:
        """Make TLS's handshake; raises `wire.Refused` when the roster speaks in the clear."""
        self.socket.sendall(self._channel.outgoing())
        data = self._receive()
        if data[0] not in (ALERT, HANDSHAKE):
            raise _plain(data)
        while True:
            opened = self._channel.open(data)
            self.socket.sendall(self._channel.outgoing())
            if self._channel.ready:
                self._early = self._lines.feed(opened)
                return
            data = self._receive()

    def _receive(self) -> bytes:
        data = self.socket.recv(64 * 1024)
        if not data:
            raise EOFError("it closed the connection")
        return data

    def send(self, message: wire.Message) -> None:
        """Send a message; any thread may."""
        with self._sending:
            self.socket.sendall(self._channel.seal(wire.encode(message)))

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; wait for at least some bytes."""
        early, self._early = self._early, []
        return early or self._lines.feed(self._channel.open(self._receive()))

    def answer(self) -> dict[str, Any]:
        """Return the next message; what came with it is kept for `read`."""
        while not self._early:
            self._early = self.read()
        first, *self._early = self._early
        if "refused" in first:
            raise wire.Refused(str(first["refused"]), str(first.get("text", "")))
        return first

    def wait(self, seconds: float) -> bool:
        """Return whether messages have come, or the connection has ended, waiting up to ``seconds``.

        Only the thread that reads may call it.
        """
        if self._early:  # the socket will not announce these
            return True
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self.socket, selectors.EVENT_READ)
        return bool(self._selector.select(seconds))

    def break_off(self) -> None:
        """End the connection, from any thread: the thread that reads it wakes, and closes it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and the selector that watches it. No other thread may be in `wait`."""
        self.socket.close()
        if self._selector is not None:
            self._selector.close()


def _close_in_child() -> None:
    """Close connections in a forked child (a data loader), for a death shows by the end of a worker's connection."""
    for connection in list(_OPEN):
        with suppress(OSError):  # some systems' selectors do not survive a fork
            connection.close()  # the parent's selector goes on: nothing is unregistered


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def shake_hands(
    address: tuple[str, int], *, token: str, hello: wire.Message, fingerprint: str | None = None
) -> RosterConnection:
    """Enter at the roster whose certificate has this fingerprint, if one is given."""
    sock = socket.create_connection(address, timeout=ANSWER_S)
    connection = RosterConnection(sock)
    try:
        wire.tune(sock)
        connection.secure()
        if fingerprint not in (None, connection.fingerprint):
            raise _stranger(connection.fingerprint)
        _prove(connection, token)
        connection.send({"hello": hello})
        take_welcome(connection, connection.answer())
        return connection
    except (KeyError, TypeError):
        connection.close()
        raise wire.Garbled("it is not a roster") from None
    except BaseException:
        connection.close()
        raise


def take_welcome(connection: RosterConnection, welcome: wire.Message) -> None:
    """Note what the roster says to a worker that it lets in."""
    connection.id, connection.running = int(welcome["welcome"]), bool(welcome["running"])
    connection.store_port = int(welcome["store"])
    connection.clock_ahead_s = float(welcome.get("now", 0.0) or concurrency.time()) - concurrency.time()


def _prove(connection: RosterConnection, token: str) -> None:
    first = connection.answer()
    if first.get("paceline") != wire.VERSION:
        raise wire.Garbled(f"it is not a roster of version {wire.VERSION}")
    theirs, mine = str(first["challenge"]), wire.challenge()
    seen = connection.fingerprint
    connection.send({"challenge": mine, "proof": wire.proof(token, "worker", theirs, mine, seen)})
    if not wire.proven(connection.answer()["proof"], wire.proof(token, "roster", theirs, mine, seen)):
        raise wire.Refused("token", "whoever answers there does not know this run's token: it is not this run's roster")


def _plain(data: bytes) -> Exception:
    """Return the error for an answer that is not TLS: a roster of version 1 sends its challenge."""
    if b'"challenge"' in data:
        return wire.Refused(
            "plain", "the roster there speaks in the clear, and this worker TLS: install the same paceline on both"
        )
    return wire.Garbled("it does not speak TLS")


def _stranger(fingerprint: str) -> wire.Refused:
    return wire.Refused(
        "fingerprint",
        f"another roster than that of the join line answers there: its certificate has fingerprint {fingerprint}. Take "
        "the line anew from its launcher; a roster that was started again shows the old one only if it was given the "
        "same --state or --token-file",
    )
