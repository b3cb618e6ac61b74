"""The first process of a worker of several: the fleet's member, which sends its followers what every call gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from paceline.errors import FleetError
from paceline.transport.elastic.changes import MembershipChange, MembershipListener
from paceline.transport.inside.links import Links, SharedTensor, portable

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

    def give_state(self) -> Sequence[torch.Tensor]:
        self._head.relay("give_state")
        return self._listener.give_state()

    def take_over(self, data: Sequence[torch.Tensor], change: MembershipChange) -> bool:
        self._head.relay("take_over", (self._head.id, change))
        return self._listener.take_over(data, change)
