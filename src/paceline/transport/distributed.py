"""What the transports over torch.distributed share: sums over a process group, and small facts through a store.

Who is there, and what becomes of a call that cannot end, is each transport's own: `FixedTransport` names the lost
worker and gives up, `Elastic` re-forms the group and makes the call again.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline import concurrency
from paceline.machines.link import link_from_env
from paceline.roster.calls import BACKGROUND, CALLS
from paceline.transport.base import Pending, RoundTensors, Transport, made
from paceline.transport.call_sequences import CallSequences
from paceline.transport.engines.small_sums import lane as count_in
from paceline.transport.formats import Format
from paceline.transport.group import Group, Watch, Watched
from paceline.transport.network import Store, place
from paceline.transport.survey import place_facts


class Distributed(Transport, ABC):
    """Workers in one process group, with a store beside it."""

    generation = 0

    def __init__(self, device: torch.device, sequences: CallSequences) -> None:
        self._device, self._sequences = device, sequences
        self.slots = Slots(lambda: self.group.store, self._ask_store)
        self._link = link_from_env()
        self._summed = 0
        """Bytes whose sum was started since the last round ended: gradients start before their round is entered."""

    # -- each transport's own --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def group(self) -> Group:
        """The group as it stands; what the training sees (``rank``, ``size``) may be older."""

    @property
    @abstractmethod
    def watch(self) -> Watch:
        """What becomes of a call that cannot end."""

    @abstractmethod
    def _enter(self, label: str, *, lane: str) -> int:
        """Begin the next collective call of this lane; returns its number."""

    def _leave(self, *, lane: str) -> None:
        self._sequences.leave(lane=lane)

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self._sequences.note(what, begun=begun)

    # -- sums ------------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        lane = BACKGROUND if background else CALLS
        self._enter(label, lane=lane)
        try:
            with count_in(background=background):
                yield made(result)
                self._group_here().round_is_over()
            self._cross_link()
        finally:
            self._leave(lane=lane)

    def sum(self, tensor: torch.Tensor) -> Pending:
        self._summed += tensor.numel() * tensor.element_size()
        return self._started(lambda group: group.start_sum(tensor))

    def written_sum(self, tensor: torch.Tensor, wire_format: Format) -> Pending | None:
        if not self._group_here().crosses:
            return None
        self._summed += wire_format.row_bytes(tensor.numel())
        return self._started(lambda group: group.start_sum_in(tensor, wire_format))

    @property
    def sums_piecewise(self) -> bool:
        return self._group_here().crosses

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        self._summed += sent.numel() // 2  # a sum is two of them
        return self._started(lambda group: group.start_all_to_all(sent, got))

    def _group_here(self) -> Group:
        """Return the group in which this thread calls: where workers come and go, that of the round it is in."""
        return self.group

    def _started(self, start: Callable[[Group], Any]) -> Pending:
        return Watched.started(start, self.watch, group=self._group_here())

    def places(self) -> dict[str, Any] | None:
        topology, workers = self.group.topology, self.workers
        known = len(topology.computers) > 1 and len(topology.order) == len(workers)
        return topology.facts(workers) if known else None

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        with self.round("the leader's broadcast", result=tensors):
            if self._group_here().size > 1:
                self._broadcast(tensors)

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fetch the leader's tensors into room of their own: a broadcast that is cut short changes none of them."""
        raw = [tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]  # any dtype
        for work in [self._started(partial(Group.start_broadcast, part=part)) for part in raw]:
            work.wait()
        for tensor, part in zip(tensors, raw, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _cross_link(self) -> None:
        """Take as long as an emulated link would for what this round has summed."""
        data, self._summed = self._summed, 0
        if self._link is not None:
            concurrency.sleep(self._link.seconds(data, workers=self.group.size))

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        start = partial(Group.send, tensor=tensor, to=to, tag=tag)
        Watched.started(start, self.watch, group=self._group_of(generation)).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        start = partial(Group.receive, tensor=tensor, source=source, tag=tag)
        Watched.started(start, self.watch, group=self._group_of(generation)).wait()

    def _group_of(self, generation: int) -> Group:
        """Return the group of this generation; an elastic fleet's raises `GenerationOver` where another stands."""
        return self.group

    def start_send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        """Start to send a tensor, which must not change until the message was waited for."""
        return self._started(lambda group: group.send(tensor, to, tag))

    def start_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start to fill a tensor with what a member sends."""
        return self._started(lambda group: group.receive(tensor, source, tag))

    # -- small facts -----------------------------------------------------------------------------------------------

    def _gather(self, key: str, label: str, value: Any) -> list[Any]:
        return self.group.gather(key, label, value, watch=self.watch)

    def slot(self, name: str) -> int:
        return self.slots.number(name)

    def slot_name(self, slot: int) -> str:
        return self.slots.name(slot)

    # -- signals ---------------------------------------------------------------------------------------------------

    def signal(self, name: str) -> None:
        self._write_store(lambda: self.group.signals.set(name, ""))

    def tally(self, name: str, by: int = 1) -> int:
        return int(self._write_store(lambda: self.group.signals.add(name, by)))

    def forget(self, name: str) -> None:
        self._write_store(lambda: self.group.board.delete_key(name))

    def was_signalled(self, name: str) -> bool:
        self.watch.check()
        return bool(self._ask_store(lambda: self.group.board.check([name])))

    def _write_store(self, request: Callable[[], Any]) -> Any:
        """Make a request that changes the store; an elastic fleet's may be lost, and then gives 0."""
        return self._ask_store(request)

    def _ask_store(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RuntimeError as error:
            raise self.watch.failed(error) from None


class Slots:
    """Small numbers for names, the same on every worker: given out through the store, on first use by anybody.

    ``store`` gives the group's store as it stands; ``ask`` makes a request of it, and raises the transport's errors.
    """

    def __init__(self, store: Callable[[], Store], ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._store, self._ask = store, ask
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        while name not in self._numbers:  # the first slot that is ours or free
            slot = len(self._numbers)
            given = self._ask(partial(self._store().compare_set, f"slot/{slot}", "", name))
            self._numbers[str(given.decode())] = slot
        return self._numbers[name]

    def name(self, slot: int) -> str:
        while len(self._numbers) <= slot:  # given out by another worker before it used it
            name = self._ask(partial(self._store().get, f"slot/{len(self._numbers)}"))
            self._numbers[str(name.decode())] = len(self._numbers)
        return self.names()[slot]

    def names(self) -> list[str]:
        return list(self._numbers)

    def adopt(self, known: Sequence[Sequence[str]]) -> None:
        """Take over the longest list: names were numbered one after another, so everybody has a beginning of it."""
        longest = max(range(len(known)), key=lambda number: len(known[number]))
        self._numbers = {name: slot for slot, name in enumerate(known[longest])}


def facts_of(device: torch.device) -> dict[str, Any]:
    """Return the facts that a worker publishes of itself."""
    cores = len(os.sched_getaffinity(0))
    here = {"host": socket.gethostname(), "place": place(), "pid": os.getpid()}
    return {**here, "device": str(device), "cores": cores, **place_facts()}


MOST_CHANNELS = 4
"""Beyond these, loopback on 16 cores gained nothing."""


def channels(facts: Sequence[Mapping[str, Any]]) -> int:
    """Return over how many of Gloo's devices these workers send their sums side by side.

    Each device has one thread that moves its bytes, so where workers have cores to spare several are faster: 40 MB
    among three took 7 ms instead of 16.

    >>> channels([{"host": "a", "cores": 16}] * 3), channels([{"host": "a", "cores": 2}] * 4)
    (4, 1)
    """
    beside = Counter(fact["host"] for fact in facts)
    spare = min(int(fact.get("cores", 1)) // beside[fact["host"]] for fact in facts)
    return max(1, min(spare, MOST_CHANNELS))


def one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:300] if text else type(error).__name__
