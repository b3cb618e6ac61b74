"""An engine in memory, for workers that are threads of one process: whole fleets in a test, without sockets.

It behaves as Gloo does where that matters to those who use it. A message is read when it is received, so a sender that
writes into its buffer too early is seen; a send that nobody holds any more is cancelled. When a worker is lost or
breaks off, those beside it in the ring and those who exchange messages with it fail, and the others wait until they
break off themselves. A failed operation has written over its tensor. What has not been waited for when a connection
breaks is lost, even where every part of it had been there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.contract import CHECK_S, CLOSED, Check, Closer, Engine, EngineWork, Held

FORMING_S = 5.0
"""How long members may take to come to `MemoryEngine.join`."""
Address = tuple[int, int, int]
"""Source, destination and tag of a message."""


class MemoryNetwork:
    """Everything that the engines and stores of a process share.

    ``point`` is called before each operation on an engine or a store, and before each wait: a scheduler may run other
    threads there. ``ended`` is called with the process whose part in an operation has just ended; those of others may
    be under way still. ``faults`` are errors of the workers that a real engine does not name, as unlike operations.
    """

    def __init__(self, *, point: Callable[[], None] | None = None) -> None:
        self.point: Callable[[], None] = point or _nothing
        self.ended: Callable[[Hashable], None] = _nothing
        self.faults: list[str] = []
        self.servers: dict[tuple[str, int], Any] = {}
        """Stores by address; each enters itself."""
        self.lock = concurrency.Condition()
        self._rooms: dict[Hashable, MemoryRoom] = {}

    def room(self, key: Hashable, size: int) -> MemoryRoom:
        """Return the room of the group with this key."""
        with self.lock:
            return self._rooms.setdefault(key, MemoryRoom(size))

    def forget(self, key: Hashable) -> None:
        """Drop the room of a group once all its engines were given up."""
        with self.lock:
            room = self._rooms.get(key)
            if room is not None and len(room.engines) == room.size and all(e.closed for e in room.engines.values()):
                del self._rooms[key]

    def kill(self, process: Hashable) -> None:
        """Break all connections of the engines of this process."""
        with self.lock:
            engines = [engine for room in self._rooms.values() for engine in room.engines.values()]
        for engine in engines:
            if engine.process == process:
                engine.abort()

    def break_pair(self, key: Hashable, one: int, other: int) -> None:
        """Break the connection between two ranks of a group."""
        with self.lock:
            if key in self._rooms:
                self._rooms[key].broken.add(frozenset((one, other)))
            self.lock.notify_all()

    def wedge(self, engine: MemoryEngine) -> None:
        """Let the engine's next wait on a broken connection never return, whatever its check finds."""
        engine.wedged = True

    def wait_until(self, there: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``there``, called under the lock, is true; False when it is not after ``seconds``."""
        until = concurrency.monotonic() + seconds
        with self.lock:
            while not there():
                if (left := until - concurrency.monotonic()) <= 0:
                    return False
                self.lock.wait(left)
            return True


class MemoryRoom:
    """What the engines of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.engines: dict[int, MemoryEngine] = {}
        self.broken: set[frozenset[int]] = set()
        """Pairs of ranks whose connection is broken."""
        self.sends: dict[Address, deque[weakref.ref[MemoryMessage]]] = {}
        self.receives: dict[Address, deque[weakref.ref[MemoryMessage]]] = {}
        """Messages that nobody receives, or nobody has sent, yet."""
        self.rounds: dict[int, MemoryRound] = {}
        """Operations of the whole group by their number."""


class MemoryEngine(Engine):
    """The engine of one worker. ``key`` names its group, ``process`` the process that the worker pretends to be."""

    def __init__(
        self, network: MemoryNetwork, key: Hashable, rank: int, size: int, *, process: Hashable = None
    ) -> None:
        self.network, self.key, self.rank, self.size, self.process = network, key, rank, size, process
        self.closed = self.wedged = False
        self._started = 0
        self.room = network.room(key, size)
        with network.lock:
            if rank in self.room.engines:
                raise RuntimeError(f"there is a rank {rank} of {key} already")
            self.room.engines[rank] = self
            network.lock.notify_all()

    def join(self, check: Check) -> None:
        """Return when the engines of all ranks are there; RuntimeError when they do not come or a connection breaks."""
        until = concurrency.monotonic() + FORMING_S
        try:
            while not self.network.wait_until(self._all_there, 0.01):
                check()
                if concurrency.monotonic() > until:
                    raise RuntimeError(f"the others did not come within {FORMING_S:.0f} s: timed out")
        except BaseException:
            self.abort()
            raise

    def _all_there(self) -> bool:
        if (lost := self.first_broken(range(self.size))) is not None:
            raise RuntimeError(closed_by(lost))
        return len(self.room.engines) == self.size

    def first_broken(self, others: Iterable[int]) -> int | None:
        """Return the first of these ranks to which the connection is broken."""
        return next((other for other in others if frozenset((self.rank, other)) in self.room.broken), None)

    # -- operations ------------------------------------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor) -> MemoryWork:
        return self._take_part("sum", tensor, tensor, self._beside())

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> MemoryWork:
        return self._take_part("all to all", sent, got, set(range(self.size)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> MemoryWork:
        return self._take_part(f"broadcast of {root}", tensor, tensor, self._beside() | {root})

    def _beside(self) -> set[int]:
        return {(self.rank - 1) % self.size, (self.rank + 1) % self.size}

    def _take_part(self, kind: str, read: torch.Tensor, written: torch.Tensor, partners: set[int]) -> MemoryWork:
        with self._operation():
            self._started += 1
            kind = f"{kind}, {read.numel()} of {read.dtype}"
            round = self.room.rounds.setdefault(self._started, MemoryRound(kind, self.size))
            if round.kind != kind:
                fault = f"rank {self.rank} of {self.key} comes with {kind} where another came with {round.kind}"
                self.network.faults.append(fault)
                raise RuntimeError(fault)
            work = MemoryPart(self, round, read.detach(), written.detach(), partners - {self.rank})
            round.parts[self.rank] = work
            if len(round.parts) == self.size:
                del self.room.rounds[self._started]
            return work

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> MemoryWork:
        return self._post((self.rank, to, tag), tensor, to, mine=self.room.sends, theirs=self.room.receives)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> MemoryWork:
        return self._post((source, self.rank, tag), tensor, source, mine=self.room.receives, theirs=self.room.sends)

    def _post(self, at: Address, tensor: torch.Tensor, other: int, *, mine: Any, theirs: Any) -> MemoryWork:
        with self._operation():
            message = MemoryMessage(self, tensor.detach(), other, sends=at[0] == self.rank)
            while waiting := theirs.get(at):
                if (peer := waiting.popleft()()) is not None:  # else it was freed, and so cancelled
                    message.peer, peer.peer = weakref.ref(peer), weakref.ref(message)
                    return message
            mine.setdefault(at, deque()).append(weakref.ref(message))
            return message

    def _operation(self) -> Any:
        """Return the lock under which an operation starts."""
        self.network.point()
        if self.closed:
            raise RuntimeError(CLOSED)
        return _Notifying(self.network.lock)

    # -- the end ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self.network.lock:
            self.room.broken |= {frozenset((self.rank, other)) for other in range(self.size) if other != self.rank}
            self.network.lock.notify_all()

    def lost(self) -> bool:
        return self.first_broken(other for other in range(self.size) if other != self.rank) is not None

    def close(self) -> list[Closer]:
        if self.closed:
            return []
        self.closed = True
        self.network.forget(self.key)
        return [Held(self)]


class MemoryWork(EngineWork):
    """One operation of one worker, which goes on while somebody waits for it."""

    def __init__(self, engine: MemoryEngine, partners: set[int], written: torch.Tensor | None) -> None:
        self.engine, self._partners, self._written = engine, partners, written
        self.finished = self.abandoned = False
        self._failure: str | None = None

    def wait(self, check: Check) -> None:
        self.engine.network.point()
        while not self.engine.network.wait_until(self._ended, CHECK_S):
            check()
        if self._failure is None:
            return
        if self.engine.wedged:
            self.engine.wedged = False
            while True:  # on purpose: a thread that Gloo forgot to wake never leaves by itself
                concurrency.Event().wait()
        raise RuntimeError(self._failure)

    def abandon(self) -> bool:
        with self.engine.network.lock:
            self.abandoned = True
            return self.finished or self._fails()

    @property
    def done(self) -> bool:
        with self.engine.network.lock:
            return self.finished or self._fails()

    def _ended(self) -> bool:
        """Go on as far as can be; return whether the operation is done, or has failed. Called under the lock."""
        if self.finished or self._fails():
            return True
        if not self._go_on():
            return False
        self.engine.network.lock.notify_all()
        self.engine.network.ended(self.engine.process)
        return True

    def _fails(self) -> bool:
        if self._failure is None and (lost := self.engine.first_broken(sorted(self._partners))) is not None:
            self._failure = closed_by(lost)
            if self._written is not None:
                scribble(self._written)
        return self._failure is not None

    def _go_on(self) -> bool:
        raise NotImplementedError


class MemoryPart(MemoryWork):
    """One worker's part in an operation of the whole group."""

    def __init__(
        self, engine: MemoryEngine, round: MemoryRound, read: torch.Tensor, written: torch.Tensor, partners: set[int]
    ) -> None:
        super().__init__(engine, partners, written)
        self.round, self.read, self.written = round, read, written

    def _go_on(self) -> bool:
        if len(self.round.parts) < self.engine.size:
            return False
        self.round.add_up()
        for rank, part in self.round.parts.items():
            if part is self or (part.abandoned and not part.finished):  # one that nobody waits for is written too
                self.round.write(rank, part)
        self.round.forget_if_done()
        return True


class MemoryRound:
    """An operation of the whole group."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self._size = kind, size
        self.parts: dict[int, MemoryPart] = {}
        self._result: list[torch.Tensor] = []

    def add_up(self) -> None:
        """Read what all have brought, once: some of it is about to be overwritten."""
        if self._result:
            return
        brought = [self.parts[rank].read.clone() for rank in range(self._size)]
        if self.kind.startswith("sum"):
            for other in brought[1:]:
                brought[0] += other
            brought = brought[:1]
        elif self.kind.startswith("broadcast"):
            brought = [brought[int(self.kind.split(",")[0].split()[-1])]]
        self._result = brought

    def forget_if_done(self) -> None:
        """Let go of the parts, which hold this round, once all of them are written."""
        if all(part.finished for part in self.parts.values()):
            self.parts, self._result = {}, []

    def write(self, rank: int, part: MemoryPart) -> None:
        """Write the result into the tensor of one rank."""
        part.finished = True
        if self.kind.startswith("all to all"):
            rows = part.written.view(-1).view(self._size, -1)
            for row, brought in zip(rows, self._result, strict=True):
                row.copy_(brought.view(-1).view(self._size, -1)[rank])
        else:
            part.written.copy_(self._result[0])


class MemoryMessage(MemoryWork):
    """A send or a receive."""

    def __init__(self, engine: MemoryEngine, tensor: torch.Tensor, other: int, *, sends: bool) -> None:
        super().__init__(engine, {other} - {engine.rank}, None if sends else tensor)
        self.tensor, self._sends = tensor, sends
        self.peer: weakref.ref[MemoryMessage] | None = None

    def _go_on(self) -> bool:
        peer = self.peer() if self.peer is not None else None
        if peer is None:
            return False
        into, source = (peer.tensor, self.tensor) if self._sends else (self.tensor, peer.tensor)
        as_bytes(into).copy_(as_bytes(source))
        self.finished = peer.finished = True
        return True


class _Notifying:
    """A condition's lock, whose waiters are woken at the end of the block."""

    def __init__(self, condition: concurrency.Condition) -> None:
        self._condition = condition

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._condition.notify_all()
        self._condition.release()


def closed_by(rank: int) -> str:
    """Return the words of a broken connection."""
    return f"memory engine: Connection closed by peer (rank {rank})"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, of which they are a view."""
    return tensor.view(-1).view(torch.uint8)


def scribble(tensor: torch.Tensor) -> None:
    """Write over a tensor as an operation that was broken off may have: NaN, or a number that nobody expects."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _nothing(*_: Hashable) -> None:
    return
