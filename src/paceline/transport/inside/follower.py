"""A further process of a worker: it makes the calls that the head makes, and receives what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from paceline.errors import FleetError
from paceline.roster import Generation
from paceline.transport.base import Pending, RoundTensors, Transport, made
from paceline.transport.elastic.changes import MembershipListener
from paceline.transport.inside.head import ANSWER, ERROR, STATE, VALUE
from paceline.transport.inside.links import Links, opened, rebuilt

T = TypeVar("T")


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
            self.listener.give_state()
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
