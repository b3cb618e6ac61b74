"""The roster's end of one connection: TLS in and out without ever blocking, everything bounded."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.roster import wire
from paceline.roster.calls import Beat, Heard
from paceline.roster.liveness import SilenceCheck, SilenceLimit
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


class Connection:
    """One worker, or somebody who has yet to prove to be one."""

    def __init__(self, sock: socket.socket, peer: str, now: float, context: ssl.SSLContext) -> None:
        self.socket, self.peer, self.opened = sock, peer, now
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
        self._channel: Channel | None = Channel(context)
        """None: it speaks in the clear, and is told so before it is closed."""
        self.mute = True
        """Nothing has come from it."""
        self._lines = wire.Lines(wire.MAX_FIRST_LINE)
        self._unsent = bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def prove(self) -> None:
        self.proven = True
        self._lines.limit = wire.MAX_LINE

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come; raises `Closed`, `wire.Garbled` or, for one in the clear, `wire.Refused`."""
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
        """Whoever is there does not speak TLS: what is sent from now on is in the clear, for it to read."""
        self._channel = None
        return wire.Refused("plain", PLAIN)

    def send(self, message: wire.Message | bytes) -> None:
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
        return len(self._unsent)

    def note_beat(self, beat: Beat, now: float) -> None:
        if not self.given_up:
            self.silence_limit.note(now - self.last_beat)
        self.last_beat = now
        self.heard.note(beat, now)

    def close(self) -> None:
        self.socket.close()
