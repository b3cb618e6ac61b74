"""Measures links: round trips to other computers, and the bits per second that a connection carries.

A round trip is the time of opening a connection, which the other computer's kernel answers by itself however busy its
workers are. Bandwidth is measured by whoever can send bytes and time their receipt (`bandwidth`): a survey of the
fleet over its engine's messages, and ``paceline doctor --to`` over TCP with the doctor there (`Answering`). That one
greets with `GREETING` and then answers requests of nine bytes, a letter and a count: ``p`` by one byte, ``d`` by that
many bytes, ``u`` by taking that many and then sending one byte.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from paceline import concurrency

TRIES = 3
PATIENCE_S = 2.0
"""For all connections of one try."""
FIRST_BYTES = 1 << 18
PORT = 7071
GREETING = b"paceline doctor 1\n"
GREETING_S, ANSWER_S = 1.0, 30.0
"""How long the other end may take to greet, and to answer."""
MOST_BYTES = 1 << 26
"""That one request may ask for."""
At = tuple[str, int]


def bandwidth(
    timed: Callable[[int], float],
    *,
    trip_s: float,
    most_bytes: int = FIRST_BYTES,
    lasting_s: float = 0.0,
    tries: int = 1,
) -> float:
    """Return the bits per second of a link, from the seconds in which bytes are sent and their receipt comes back.

    ``timed(size)`` measures that for a number of bytes, ``trip_s`` is what it takes for the shortest message. Sizes
    grow from `FIRST_BYTES` until one takes half of ``lasting_s`` or is the largest; the best of ``tries`` counts.

    >>> bandwidth(lambda size: 0.02 + size / 1e6, trip_s=0.02, most_bytes=1 << 26, lasting_s=1.0)
    8000000.0
    """
    size = FIRST_BYTES
    while True:
        best = min(timed(size) for _ in range(tries))
        seconds = best - min(trip_s, best / 2)
        if size >= most_bytes or seconds > lasting_s / 2:
            return 8 * size / seconds
        size = min(most_bytes, int(size * min(8.0, 1.2 * lasting_s / seconds)))


@contextmanager
def listening_at(host: str) -> Iterator[At]:
    """Yield an address at which the kernel, and nobody else, answers connections."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(socket.SOMAXCONN)
        yield host, int(listener.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def round_trips(doors: Mapping[str, At], *, tries: int = TRIES) -> dict[str, float]:
    """Return the seconds that opening a connection to each door takes, the least of ``tries``.

    Doors that cannot be reached are left out.
    """
    found = _connect_all(doors)
    for _ in range(tries - 1 if found else 0):
        again = _connect_all({name: doors[name] for name in found})
        found = {name: min(seconds, again.get(name, seconds)) for name, seconds in found.items()}
    return found


def _connect_all(doors: Mapping[str, At]) -> dict[str, float]:
    found: dict[str, float] = {}
    until = concurrency.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for name, (host, port) in doors.items():
            one = socket.socket(_family(host), socket.SOCK_STREAM)
            one.setblocking(False)
            started = concurrency.perf_counter()
            if one.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                selector.register(one, selectors.EVENT_WRITE, (name, started))
            else:
                one.close()
        while selector.get_map() and (left := until - concurrency.monotonic()) > 0:
            ready, now = selector.select(left), concurrency.perf_counter()
            for key, _ in ready:
                name, started = key.data
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # type: ignore[union-attr]
                    found[name] = now - started
                _close(selector, key.fileobj)
        for key in list(selector.get_map().values()):
            _close(selector, key.fileobj)
    return found


def _close(selector: selectors.BaseSelector, one: Any) -> None:
    selector.unregister(one)
    with suppress(OSError):
        one.close()


# -- over TCP, with another computer's doctor ----------------------------------------------------------------------


class DoctorProbe:
    """A connection to another computer's doctor, over which bytes are timed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greeted(self) -> bool:
        """Return whether a doctor is at the other end: others wait for this end to speak first."""
        self._connection.settimeout(GREETING_S)
        try:
            heard = b""
            while len(heard) < len(GREETING) and GREETING.startswith(heard):
                if not (data := self._connection.recv(len(GREETING) - len(heard))):
                    return False
                heard += data
            return heard == GREETING
        except OSError:
            return False
        finally:
            self._connection.settimeout(ANSWER_S)

    def trip_s(self) -> float:
        """Return the seconds of one round trip."""
        return self._timed(b"p", 0)

    def there_s(self, size: int) -> float:
        """Return the seconds in which this many bytes are sent there and their receipt comes back."""
        return self._timed(b"u", size)

    def back_s(self, size: int) -> float:
        """Return the seconds in which this many bytes are asked for and come."""
        return self._timed(b"d", size)

    def _timed(self, letter: bytes, size: int) -> float:
        began = concurrency.perf_counter()
        self._connection.sendall(letter + struct.pack("!Q", size))
        if letter == b"u":
            self._connection.sendall(bytes(size))
        _take(self._connection, size if letter == b"d" else 1)
        return concurrency.perf_counter() - began


class Answering:
    """Answers the doctors of other computers until it is closed, each on a thread."""

    def __init__(self, port: int = PORT) -> None:
        self._listener = socket.create_server(("", port))
        self.port = int(self._listener.getsockname()[1])
        concurrency.Thread(target=self._run, name="paceline-answer", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # closed
            while True:
                guest, _ = self._listener.accept()
                concurrency.Thread(target=_answer, args=[guest], name="paceline-answer", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _answer(guest: socket.socket) -> None:
    with guest, suppress(OSError, struct.error):
        guest.settimeout(ANSWER_S)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest.sendall(GREETING)
        while len(request := guest.recv(9, socket.MSG_WAITALL)) == 9:
            size = struct.unpack("!Q", request[1:])[0]
            if size > MOST_BYTES:
                return
            if request[:1] == b"u":
                _take(guest, size)
            guest.sendall(bytes(size) if request[:1] == b"d" else b".")


def _take(connection: socket.socket, size: int) -> None:
    """Read this many bytes."""
    while size > 0:
        data = connection.recv(min(size, 1 << 20))
        if not data:
            raise ConnectionResetError("the other end closed it")
        size -= len(data)
