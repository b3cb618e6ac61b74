"""The roster's door: where workers connect, and the state and the TLS of each connection, which never block."""

from __future__ import annotations

import logging
import selectors
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline import concurrency
from paceline.roster import persistence, wire
from paceline.roster.calls import Beat, Heard
from paceline.roster.liveness import ProcessState, SilenceCheck, SilenceLimit, process_state_of
from paceline.roster.wire import HANDSHAKE, Certificate, Channel

if TYPE_CHECKING:
    import ssl

MAX_UNSENT = 16 * 1024 * 1024
"""Bytes that may wait for a worker that does not read; beyond that its connection is closed."""
CHUNK = 64 * 1024
PLAIN = "this roster speaks TLS, and what came is not: install the paceline that the roster's computer has"


class Closed(Exception):
    """The other end has closed; ``cut``: nothing was heard of it, the path is dead."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__("cut" if cut else "closed")
        self.cut = cut


class WorkerConnection(ABC):
    """One worker, or somebody who has yet to prove to be one; the subclass carries the messages."""

    def __init__(self, peer: str, now: float) -> None:
        self.peer, self.opened = peer, now
        self.challenge = wire.challenge()
        self.proven = False
        self.worker: int | None = None
        self.session = ""
        self.process: tuple[int, str] = (0, "")
        """Pid and computer."""
        self.last_heard = self.last_beat = now
        self.heard = Heard()
        self.silence_limit = SilenceLimit()
        self.silence: SilenceCheck | None = None
        self.given_up = False
        """It was silent for too long; should it be heard again, that is news."""
        self.mute = True
        """Nothing has come from it."""

    def prove(self) -> None:
        """Note that the other end knows the token."""
        self.proven = True

    def process_state(self) -> ProcessState:
        """Return what is known of the worker's process."""
        return process_state_of(*self.process)

    def note_beat(self, beat: Beat, now: float) -> None:
        """Remember a beat, and what its lateness says of the next ones."""
        if not self.given_up:
            self.silence_limit.note(now - self.last_beat)
        self.last_beat = now
        self.heard.note(beat, now)

    def note_return(self, now: float) -> None:
        """Remember that the worker is heard again after it was given up."""
        self.given_up = False
        self.silence_limit.note_return(now - self.last_heard, now)
        self.last_beat = now

    def refuse_plain(self) -> wire.Refused:
        """Return the refusal for one that does not speak TLS."""
        return wire.Refused("plain", PLAIN)

    @abstractmethod
    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come, without waiting.

        Raises `Closed`, `wire.Garbled` or, for one in the clear, `wire.Refused`.
        """

    @abstractmethod
    def send(self, message: wire.Message | bytes) -> None:
        """Send now what can be sent, and keep the rest. A broken connection shows when it is read next."""

    @abstractmethod
    def flush(self) -> None:
        """Send what was kept, as far as that is possible now."""

    @property
    @abstractmethod
    def backlog(self) -> int:
        """Bytes that wait to be sent."""

    @abstractmethod
    def close(self) -> None:
        """End the connection; the other end sees it closed."""


class SocketConnection(WorkerConnection):
    """A worker's connection over a socket, with TLS."""

    def __init__(self, sock: socket.socket, peer: str, now: float, context: ssl.SSLContext) -> None:
        super().__init__(peer, now)
        self.socket = sock
        self._channel: Channel | None = Channel(context)
        """None: it speaks in the clear, and is told so before it is closed."""
        self._lines = wire.Lines(wire.MAX_FIRST_LINE)
        self._unsent = bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def prove(self) -> None:
        """Note that the other end knows the token: it may send longer lines now."""
        super().prove()
        self._lines.limit = wire.MAX_LINE

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; see `WorkerConnection.read`."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except TimeoutError:
            raise Closed(cut=True) from None
        except OSError as error:
            raise Closed(cut=not isinstance(error, ConnectionError)) from None
        if not data:
            raise Closed
        return self._lines.feed(self._opened(data))

    def _opened(self, data: bytes) -> bytes:
        if self.mute and data[0] != HANDSHAKE:
            raise self.refuse_plain()
        self.mute = False
        assert self._channel is not None
        try:
            return self._channel.open(data)
        except EOFError:
            raise Closed from None
        finally:
            self._unsent += self._channel.outgoing()
            self.flush()

    def refuse_plain(self) -> wire.Refused:
        """Return the refusal; what is sent from now on is in the clear, for the other end to read."""
        self._channel = None
        return super().refuse_plain()

    def send(self, message: wire.Message | bytes) -> None:
        """Seal the message, and send what the socket takes now."""
        line = wire.encode(message)
        with suppress(OSError):  # TLS is broken: nothing can be sent any more
            self._unsent += self._channel.seal(line) if self._channel else line
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. A broken connection shows when it is read next."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    @property
    def backlog(self) -> int:
        """Sealed bytes that the socket has not taken yet."""
        return len(self._unsent)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


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
