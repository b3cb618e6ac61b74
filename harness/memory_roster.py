"""A network in memory, over which the real `RosterServer` and the real `RosterClient` speak within one process.

There are no sockets, no TLS and no proofs; the messages are those of the wire. All waits and locks come from
`paceline.concurrency` when they are needed, so whoever replaces that module decides the order of events:

    network = MemoryNetwork()
    server = RosterServer(..., door=MemoryDoor(network), store=MemoryStoreHost())
    client = RosterClient(server.address, ..., shake_hands=partial(network.shake_hands, state=state))
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline import concurrency
from paceline.roster import wire
from paceline.roster.door import Closed, DoorEvent, WorkerConnection
from paceline.roster.liveness import UNKNOWN, ProcessState
from paceline.roster.wire import ANSWER_S, take_welcome

OPEN, CLOSED, CUT = "open", "closed", "cut"


class MessageQueue:
    """One direction of a connection: the lines that were sent and not yet read, and how the direction ended.

    ``changed``: the condition on which its reader waits.
    """

    def __init__(self, changed: Any) -> None:
        self.changed = changed
        self.state = OPEN
        self._lines: deque[bytes] = deque()

    @property
    def readable(self) -> bool:
        """Whether reading returns at once. The caller holds ``changed``."""
        return bool(self._lines) or self.state != OPEN

    def put(self, message: wire.Message | bytes) -> None:
        """Send a message; raises BrokenPipeError when the connection has ended."""
        line = wire.encode(message)
        with self.changed:
            if self.state != OPEN:
                raise BrokenPipeError(errno.EPIPE, "the connection has ended")
            self._lines.append(line)
            self.changed.notify_all()

    def take(self) -> tuple[list[dict[str, Any]], str]:
        """Return what has come, and the state of the connection, which counts once nothing more comes."""
        with self.changed:
            lines = list(self._lines)
            self._lines.clear()
            return [wire.decode(line) for line in lines], OPEN if lines else self.state

    def end(self, state: str) -> None:
        """End the direction. What was sent before a close still arrives; a cut loses it."""
        with self.changed:
            if self.state == OPEN:
                self.state = state
            if state == CUT:
                self._lines.clear()
            self.changed.notify_all()


class Link:
    """Both directions of a connection, and what the roster can learn of the worker's process."""

    def __init__(self, at_door: Any, state: Callable[[], ProcessState]) -> None:
        self.to_roster, self.to_worker = MessageQueue(at_door), MessageQueue(concurrency.Condition())
        self.state = state

    def end(self, state: str) -> None:
        """End both directions."""
        self.to_roster.end(state)
        self.to_worker.end(state)


class MemoryWorkerConnection(WorkerConnection):
    """The roster's end of a connection. It counts as proven from the beginning."""

    def __init__(self, link: Link, peer: str, now: float) -> None:
        super().__init__(peer, now)
        self.link = link
        self.proven, self.mute = True, False

    def process_state(self) -> ProcessState:
        """Return what the one who shook hands says of its process."""
        return self.link.state()

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; raises `Closed`."""
        messages, state = self.link.to_roster.take()
        if state != OPEN:
            raise Closed(cut=state == CUT)
        return messages

    def send(self, message: wire.Message | bytes) -> None:
        """Send a message; one to a worker that has gone is lost."""
        with suppress(BrokenPipeError):
            self.link.to_worker.put(message)

    def flush(self) -> None:
        """Do nothing: every message is sent at once."""

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent: none ever do."""
        return 0

    def close(self) -> None:
        """Close the connection; the worker reads what was sent before, then sees the end."""
        self.link.end(CLOSED)


class MemoryRosterConnection:
    """The worker's end of a connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.id = -1
        self.running = False
        self.store_port = 0
        self.clock_ahead_s = 0.0
        self._early: list[dict[str, Any]] = []

    def send(self, message: wire.Message) -> None:
        """Send a message, from any thread; raises BrokenPipeError when the connection has ended."""
        self.link.to_roster.put(message)

    def wait(self, seconds: float) -> bool:
        """Return whether messages have come, or the connection has ended, waiting up to ``seconds``."""
        queue = self.link.to_worker
        with queue.changed:
            return bool(self._early) or bool(queue.changed.wait_for(lambda: queue.readable, seconds))

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come, waiting for the first.

        Raises EOFError after a close, ConnectionResetError after a cut, TimeoutError after `ANSWER_S`.
        """
        if not self.wait(ANSWER_S):
            raise TimeoutError("timed out")
        early, self._early = self._early, []
        messages, state = ([], OPEN) if early else self.link.to_worker.take()
        if state == CUT:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was cut")
        if state == CLOSED:
            raise EOFError("it closed the connection")
        return early or messages

    def answer(self) -> dict[str, Any]:
        """Return the next message, and keep what came with it for `read`; raises `wire.Refused`."""
        first, *self._early = self.read()
        if "refused" in first:
            raise wire.Refused(str(first["refused"]), str(first.get("text", "")))
        return first

    def break_off(self) -> None:
        """Close the connection, from any thread: both ends see it."""
        self.link.end(CLOSED)

    def close(self) -> None:
        """Close the connection, as the end of the worker's process does."""
        self.link.end(CLOSED)

    def cut(self) -> None:
        """Break the connection between its ends: what is under way is lost, and both see that the path is dead."""
        self.link.end(CUT)


class MemoryNetwork:
    """Addresses, and the door that is open at each."""

    def __init__(self) -> None:
        self._doors: dict[tuple[str, int], MemoryDoor] = {}
        self._lock = concurrency.Lock()

    def shake_hands(
        self,
        address: tuple[str, int],
        *,
        token: str,
        hello: wire.Message,
        fingerprint: str | None = None,
        state: Callable[[], ProcessState] = lambda: UNKNOWN,
        opened: Callable[[MemoryRosterConnection], None] = lambda connection: None,
    ) -> MemoryRosterConnection:
        """Connect to the roster at ``address``, as `paceline.roster.wire.shake_hands` does; token and fingerprint
        are not compared. ``state`` and ``opened``: see `MemoryDoor.connect`."""
        with self._lock:
            door = self._doors.get(address)
        if door is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no roster is there")
        return door.connect(hello, state=state, opened=opened)

    def add(self, door: MemoryDoor) -> None:
        """Open an address; raises OSError when another door is open there."""
        with self._lock:
            if (door.host, door.port) in self._doors:
                raise OSError(errno.EADDRINUSE, f"{door.host}:{door.port} is in use")
            self._doors[door.host, door.port] = door

    def remove(self, door: MemoryDoor) -> None:
        """Let nobody connect to this door any more; another may open at its address."""
        with self._lock:
            if self._doors.get((door.host, door.port)) is door:
                del self._doors[door.host, door.port]


class MemoryDoor:
    """The door of a `RosterServer` at an address of a `MemoryNetwork`."""

    fingerprint = ""

    def __init__(self, network: MemoryNetwork, host: str = "memory", port: int = 1) -> None:
        self.host, self.port = host, port
        self._network = network
        self._changed = concurrency.Condition()
        self._newcomers: deque[Link] = deque()
        self._watched: dict[Link, MemoryWorkerConnection] = {}
        self._accepted = 0
        self._woken = self._closed = False
        network.add(self)

    # -- for workers -----------------------------------------------------------------------------------------------

    def connect(
        self,
        hello: wire.Message,
        *,
        state: Callable[[], ProcessState] = lambda: UNKNOWN,
        opened: Callable[[MemoryRosterConnection], None] = lambda connection: None,
    ) -> MemoryRosterConnection:
        """Return a connection over which the roster has let this worker in.

        ``state`` returns the state of the worker's process. ``opened`` receives the connection before the roster has
        answered: whoever ends the process closes it. Raises `wire.Refused`, OSError or EOFError.
        """
        link = Link(self._changed, state)
        connection = MemoryRosterConnection(link)
        with self._changed:
            if self._closed:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "no roster is there")
            self._newcomers.append(link)
            self._changed.notify_all()
        try:
            opened(connection)
            connection.send({"hello": hello})
            take_welcome(connection, connection.answer())
        except (KeyError, TypeError):
            connection.close()
            raise wire.Garbled("it is not a roster") from None
        except BaseException:
            connection.close()
            raise
        return connection

    # -- for the server --------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> list[DoorEvent]:
        """Return a newcomer and the connections to read, in the order of arrival, waiting up to ``seconds``.

        A closed door has no more events: a roster that has died does not see its connections end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._woken or bool(self._events()), seconds)
            self._woken = False
            return self._events()

    def _events(self) -> list[DoorEvent]:
        if self._closed:
            return []
        newcomer: list[DoorEvent] = [(None, False)] if self._newcomers else []
        return newcomer + [(one, False) for link, one in self._watched.items() if link.to_roster.readable]

    def accept(self) -> MemoryWorkerConnection | None:
        """Let the next newcomer in, and watch its connection."""
        with self._changed:
            if not self._newcomers:
                return None
            link = self._newcomers.popleft()
            self._accepted += 1
            connection = MemoryWorkerConnection(link, f"{self.host}:{self._accepted}", concurrency.monotonic())
            self._watched[link] = connection
            return connection

    def arm(self, connection: WorkerConnection) -> None:
        """Do nothing: there is always room to write."""

    def forget(self, connection: WorkerConnection) -> None:
        """Watch a connection no more."""
        assert isinstance(connection, MemoryWorkerConnection)
        with self._changed:
            self._watched.pop(connection.link, None)

    def wake(self) -> None:
        """End the present `wait`, or the next."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def release(self) -> None:
        """Do nothing: `wait` holds nothing."""

    def close(self) -> None:
        """Close the address and every connection, as the death of the roster's process does."""
        self._network.remove(self)
        with self._changed:
            self._closed = True
            links = [*self._newcomers, *self._watched]
            self._newcomers.clear()
            self._watched.clear()
        for link in links:
            link.end(CLOSED)


class MemoryStoreHost:
    """A store's place beside the roster; the store itself is not here."""

    def __init__(self, port: int = 2) -> None:
        self.port = port
        self.open = False

    def start(self) -> None:
        """Note that the roster serves."""
        self.open = True

    def close(self) -> None:
        """Note that the roster has closed."""
        self.open = False
