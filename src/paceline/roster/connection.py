"""The roster's end of one connection: the state it keeps per worker, and TLS that never blocks, everything bounded."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.roster import wire
from paceline.roster.calls import Beat, Heard
from paceline.roster.liveness import ProcessState, SilenceCheck, SilenceLimit, process_state_of
from paceline.roster.tls import HANDSHAKE, Channel

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
