"""The processes of one worker: the head makes each call of the fleet, and its followers receive what it gave.

The head is the worker's first process and the fleet's member. A follower makes the same calls, and reaches nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from paceline.errors import FleetError
from paceline.roster import Generation
from paceline.transport.base import Pending, RoundTensors, Transport, made
from paceline.transport.elastic.changes import MembershipChange, MembershipListener
from paceline.transport.inside.links import Links, SharedTensor, opened, portable, rebuilt

T = TypeVar("T")

ANSWER, ERROR, VALUE, STATE = "answer", "error", "value", "state"
SHOWN = ("rank", "size", "workers", "generation", "outside", "calls", "backend", "id")
"""The transport's attributes that followers receive after each call, as they are on the head."""
OWN = ("_real", "_links", "_label", "shards", "mesh")


class Head:
    """A transport whose calls are a whole worker's. What is not here is the transport's own."""

    shard = 0
    grouped = True
    solitary = False
    """Sums are made even where nobody else is there: the followers' parts come together for them."""

    def __init__(self, real: Any, links: Links, *, shards: int, mesh: Callable[[], Any]) -> None:
        self._real, self._links, self._label, self.shards, self.mesh = real, links, "", shards, mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        elif name == "listener":
            self._real.listener = None if value is None else RelayedListener(value, self)
        else:
            setattr(self._real, name, value)

    # -- inside the worker -----------------------------------------------------------------------------------------

    def once(self, label: str, call: Callable[[], T]) -> T:
        with self._answered(label) as answer:
            answer.append(call())
        result: T = answer[0]
        return result

    @contextmanager
    def _answered(self, label: str) -> Iterator[list[Any]]:
        """Send followers what the block puts into the list, or raises: they get it from the same call."""
        outer, self._label = self._label, self._label or label
        answer: list[Any] = []
        try:
            yield answer
        except BaseException as error:
            if not outer:
                with suppress(FleetError):  # they may be gone, and that be the error
                    self._send_state()
                    self._links.send(label, ERROR, portable(error))
            raise
        else:
            if not outer:
                self._send_state()
                self._links.send(label, ANSWER, answer[0] if answer else None)
        finally:
            self._label = outer

    def _send_state(self) -> None:
        self._links.send(self._label, STATE, {name: getattr(self._real, name, None) for name in SHOWN})

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        return

    def relay(self, kind: str, content: Any = None) -> None:
        self._links.send(self._label, kind, content)

    def collect(self, label: str, value: T) -> list[T]:
        return [value, *(content for _, content in self._links.receive(self._label or label))]

    def from_first(self, label: str, value: T) -> T:
        self._links.send(self._label or label, VALUE, value)
        return value

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        for shard in range(1, self.shards):
            self._links.send_tensor(parts(shard), to=shard)
        into.copy_(parts(0))

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        made = SharedTensor(size, dtype)
        self.from_first(label, made.path)
        self.collect(label, None)
        made.all_have_it()
        return made.tensor

    # -- calls of the fleet ----------------------------------------------------------------------------------------

    def gather(self, label: str, value: Any) -> list[Any]:
        def asked() -> Any:
            self.relay(VALUE)
            return value()

        return self.once(label, lambda: list(self._real.gather(label, asked if callable(value) else value)))

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        self.once("the leader's broadcast", lambda: self._real.broadcast(tensors))
        for tensor in tensors if inside else ():
            self._links.send_tensor(tensor)

    def slot_name(self, slot: int) -> str:
        return self.once("the name of a figure", lambda: str(self._real.slot_name(slot)))

    def deliver_members_changed(self) -> None:
        self.once("who is there", self._real.deliver_members_changed)

    def re_form(self) -> None:
        self.once("re-forming the group", self._real.re_form)

    def take_over_later(self) -> bool:
        return self.once("taking over a state", lambda: bool(self._real.take_over_later()))

    def depart(self, *, agreed: bool) -> None:
        self.once("leaving", partial(self._real.depart, agreed=agreed))

    @property
    def loop(self) -> RelayedLoop:
        return RelayedLoop(self._real.loop, self)

    def close(self, *, failure: BaseException | None = None) -> None:
        try:
            if failure is None:
                self.once("the end", self._real.close)
            else:
                self._real.close(failure=failure)
        finally:
            self._links.close()


class RelayedLoop:
    """The loop of the script that the fleet is in: followers receive the head's answers."""

    def __init__(self, real: Any, head: Head) -> None:
        self._real, self._head = real, head

    @property
    def number(self) -> int:
        return int(self._real.number)

    def begin(self, number: int, call_results: str) -> None:
        self._real.begin(number, call_results)

    def of_fleet(self) -> int:
        return self._head.once("the fleet's loop", lambda: int(self._real.of_fleet()))

    def call_results_of_fleet(self) -> str:
        return self._head.once("what the fleet's calls returned", lambda: str(self._real.call_results_of_fleet()))


class RelayedListener:
    """The head's training as a listener of the transport; its calls are relayed to the followers' trainings."""

    def __init__(self, listener: MembershipListener, head: Head) -> None:
        self._listener, self._head = listener, head

    def facts(self) -> Any:
        return self._listener.facts()

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        self._head.relay("members_changed", (self._head.id, change))
        self._listener.members_changed(change, show)

    def held(self) -> Collection[str]:
        return self._listener.held()

    def give_state(self, held: Collection[str]) -> Sequence[torch.Tensor]:
        self._head.relay("give_state")
        return self._listener.give_state(held)

    def take_over(self, data: list[torch.Tensor], change: MembershipChange) -> bool:
        self._head.relay("take_over", (self._head.id, change))
        return self._listener.take_over(data, change)


class Follower(Transport):
    """The transport of a process that is no member of the fleet, but a part of one."""

    name = "follower"
    grouped = True
    rank, size, generation, calls = 0, 1, 0, 0
    workers: tuple[int, ...] = (0,)
    backend = "none"

    def __init__(self, links: Links, *, shard: int, shards: int, mesh: Callable[[], Any], elastic: bool) -> None:
        self._links, self.shard, self.shards, self._mesh, self.elastic = links, shard, shards, mesh, elastic
        self._id = 0
        self.listener: MembershipListener | None = None
        self.intact: Callable[[], bool] = lambda: True
        self.lanes = SimpleNamespace(rounds=0)
        self.loop = FollowedLoop(self)
        self._label = ""
        self._handlers: dict[str, Callable[[Any], None]] = {}

    @property
    def id(self) -> int:
        return self._id

    # -- inside the worker -----------------------------------------------------------------------------------------

    def once(self, label: str, call: Callable[[], T]) -> T:
        return cast(T, self._follow(label))

    def _follow(self, label: str, *, value: Callable[[], Any] | None = None) -> Any:
        """Follow the head's messages until its call is over."""
        outer, self._label = self._label, self._label or label
        try:
            while True:
                ((kind, content),) = self._links.receive(label)
                if kind == ANSWER:
                    return content
                if kind == ERROR:
                    raise rebuilt(*content)
                if kind == VALUE:
                    assert value is not None
                    value()
                else:
                    self._do(kind, content)
        finally:
            self._label = outer

    def _do(self, kind: str, content: Any) -> None:
        if kind == STATE:
            self._id = content.pop("id")
            vars(self).update(content)
        elif kind in self._handlers:
            self._handlers[kind](content)
        elif kind == "members_changed" and self.listener is not None:
            self._id, change = content
            self.listener.members_changed(change, partial(self._show, change.generation))
        elif kind == "give_state" and self.listener is not None:
            self.listener.give_state(())
        elif kind == "take_over" and self.listener is not None:
            self._id, change = content
            self._show(change.generation)
            self.listener.take_over([], change)  # its content comes from the head
        else:
            raise FleetError(f"a process of this worker heard {kind!r}, which is not for it")

    def _show(self, generation: Generation) -> None:
        self.workers, self.generation = generation.workers, generation.number
        self.rank, self.size = self.workers.index(self._id), len(self.workers)

    def mesh(self) -> Any:
        return self._mesh()

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        self._handlers[kind] = do

    def collect(self, label: str, value: T) -> list[T]:
        self._links.send(self._label or label, VALUE, value)
        return []

    def from_first(self, label: str, value: T) -> T:
        ((_, theirs),) = self._links.receive(self._label or label)
        return cast(T, theirs)

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        self._links.receive_tensor(into)

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = opened(self.from_first(label, ""), size, dtype)
        self.collect(label, None)
        return tensor

    # -- calls of the fleet ----------------------------------------------------------------------------------------

    def round(
        self, label: str, *, background: bool = False, result: RoundTensors = ()
    ) -> AbstractContextManager[Sequence[torch.Tensor]]:
        return nullcontext(made(result))

    def sum(self, tensor: torch.Tensor) -> Pending:
        raise AssertionError("a follower's sums are its head's")

    def gather(self, label: str, value: Any) -> list[Any]:
        return list(self._follow(label, value=value if callable(value) else None))

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        self._follow("the leader's broadcast")
        for tensor in tensors if inside else ():
            self._links.receive_tensor(tensor)

    def slot_name(self, slot: int) -> str:
        return str(self._follow("the name of a figure"))

    def deliver_members_changed(self) -> None:
        self._follow("who is there")

    def re_form(self) -> None:
        self._follow("re-forming the group")

    def take_over_later(self) -> bool:
        return bool(self._follow("taking over a state"))

    def depart(self, *, agreed: bool) -> None:
        self._follow("leaving")

    def slot(self, name: str) -> int:
        raise AssertionError("a follower names no figures")

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a follower sends nothing to other workers")

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a follower receives nothing from other workers")

    def tally(self, name: str, by: int = 1) -> int:
        return 0

    def was_signalled(self, name: str) -> bool:
        return False

    def close(self, *, failure: BaseException | None = None) -> None:
        try:
            if failure is None:
                self._follow("the end")
        finally:
            self._links.close()


class FollowedLoop:
    """The loop of the script that the fleet is in, as the head reports it."""

    number = 0

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def begin(self, number: int, call_results: str) -> None:
        self.number = number

    def of_fleet(self) -> int:
        return self._follower.once("the fleet's loop", lambda: 0)

    def call_results_of_fleet(self) -> str:
        return self._follower.once("what the fleet's calls returned", lambda: "")
