"""The roster's door: where workers connect, and where the server's thread waits for what they send."""

from __future__ import annotations

import logging
import selectors
import socket
from contextlib import suppress

from paceline import concurrency
from paceline.roster import persistence, wire
from paceline.roster.connection import SocketConnection, WorkerConnection
from paceline.roster.tls import Certificate

logger = logging.getLogger("paceline")

DoorEvent = tuple[WorkerConnection | None, bool]
"""A connection to read, and whether it has room to write; None in its place is a newcomer, to be accepted."""


class SocketDoor:
    """A listening socket, and a selector over it and the connections that were accepted, each with TLS."""

    def __init__(self, host: str, port: int, certificate: Certificate) -> None:
        self.host, self.fingerprint = host, certificate.fingerprint
        self._context = certificate.context
        self._listener = socket.create_server((host, port), family=persistence.family(host), backlog=256)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[DoorEvent]:
        """Return the connections to read, and None for a newcomer, waiting up to ``seconds``."""
        events: list[DoorEvent] = []
        for key, mask in self._selector.select(seconds):
            if isinstance(key.fileobj, SocketConnection):
                events.append((key.fileobj, bool(mask & selectors.EVENT_WRITE)))
            elif key.fileobj is self._listener:
                events.append((None, False))
            else:
                self._wake_receiver.recv(4096)
        return events

    def accept(self) -> SocketConnection | None:
        """Accept the next connection in the queue, if it is still there."""
        try:
            sock, peer = self._listener.accept()
            wire.tune(sock)
        except OSError as error:
            logger.debug("roster: a connection was not accepted: %s", error)
            concurrency.sleep(0.01)  # out of descriptors: the queue stays, so this would spin
            return None
        connection = SocketConnection(sock, f"{peer[0]}:{peer[1]}", concurrency.monotonic(), self._context)
        self._selector.register(connection, selectors.EVENT_READ)
        return connection

    def arm(self, connection: WorkerConnection) -> None:
        """Watch for room to write exactly if the connection has something to send."""
        assert isinstance(connection, SocketConnection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlog else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted)

    def forget(self, connection: WorkerConnection) -> None:
        """Take a connection out of the selector."""
        assert isinstance(connection, SocketConnection)
        with suppress(KeyError, ValueError, RuntimeError):  # the thread may have ended
            self._selector.unregister(connection)

    def wake(self) -> None:
        """Wake the thread that waits: another one has left it something to send or to report."""
        with suppress(OSError):  # it is awake already, or gone
            self._wake_sender.send(b"!", socket.MSG_DONTWAIT)

    def release(self) -> None:
        """Close the selector."""
        self._selector.close()

    def close(self) -> None:
        """Close the listener, and what wakes the thread."""
        for one in (self._listener, self._wake_sender, self._wake_receiver):
            one.close()


def reached_at(host: str) -> str:
    """Return the address at which others reach what listens on ``host``, which may stand for all addresses."""
    return host if host not in ("0.0.0.0", "::") else address_outwards() or socket.gethostname()


def address_outwards(host: str | None = None) -> str | None:
    """Return the local address from which packets to ``host``, or to any other computer, leave; None: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((host or "10.255.255.254", 9))  # sends nothing, only chooses the route
        except OSError:
            return None
        return str(datagrams.getsockname()[0])
