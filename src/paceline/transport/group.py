"""Some workers, connected: an engine carries their sums, NCCL those that lie on GPUs, and a store small facts.

A group never changes: where workers come and go, each generation has its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from paceline import concurrency
from paceline.transport.engine_waits import LEAVE_S, EngineWaits
from paceline.transport.engines.base import CLOSED, Engine, EngineWork, Look
from paceline.transport.formats import Format
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import Store, read_json
from paceline.transport.small_sums import SmallSums, is_small
from paceline.transport.topology import Topology, one_place
from paceline.transport.tree_sums import MESSAGE_BYTES, TreeSums

logger = logging.getLogger("paceline")

CLOSE_S = 3.0
"""How long a thread whose connections are shut may take to end."""
MakeEngine = Callable[[int, int], tuple[Engine, str]]
"""Connects an engine, from this worker's rank in it and the size; returns a description for the log beside it."""


class Watch(Protocol):
    """Knows what becomes of a call that cannot end: each transport's own."""

    @property
    def group(self) -> Group:
        """The group as it stands."""

    def check(self) -> None:
        """Raise when what this worker waits for can never come."""

    def check_group(self, group: Group) -> None:
        """Raise when what is awaited in this group is asked for in another by now."""

    def failed(self, error: BaseException) -> Exception:
        """What to raise for an engine's error."""

    def unlike_calls(self, labels: dict[int, str]) -> Exception:
        """What to raise when workers met in unlike calls."""


class Already(EngineWork):
    """A sum over one worker."""

    def wait(self, look: Look | None = None) -> None:
        return

    def abandon(self) -> bool:
        return True


class Group:
    """Workers that one engine connects, with a store beside it."""

    def __init__(
        self, rank: int, size: int, *, store: Store = None, signals: Store = None, board: Store = None
    ) -> None:
        """``store`` holds this group's facts, ``signals`` what its workers say; ``board``: the same signals, over a
        connection of their own for another thread."""
        self.rank, self.size = rank, size
        self.store, self.signals, self.board = store, signals, board
        self.gpus: NcclGroup | None = None
        """Sums what lies on GPUs, where every worker has one of its own; all else goes over the engine."""
        self._engine: Engine | None = None
        self._over = False
        self.waits = EngineWaits()
        self._arrange(one_place(size))
        self._tree: TreeSums | None = None
        self._spent: list[str] = []

    def _arrange(self, topology: Topology) -> None:
        self.topology = topology
        self._seats = {rank: seat for seat, rank in enumerate(topology.order)}
        self._small = SmallSums(self._seats[self.rank], self.size, lambda: self.engine)

    @property
    def engine(self) -> Engine:
        """What carries the sums."""
        if self._engine is None:
            raise RuntimeError(CLOSED)
        return self._engine

    def connect(self, make: MakeEngine, *, topology: Topology | None = None) -> None:
        """Connect the engine; all workers of the group come here. ``topology``, the same for all: in whose order its
        ranks are."""
        self._arrange(topology or self.topology)
        self._engine, how = make(self._seats[self.rank], self.size)
        if self._over:  # broken off by another thread meanwhile, which found no engine
            self._engine.abort()
        logger.info("worker %d of %d reaches the others over %s", self.rank, self.size, how)

    # -- sums ------------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> EngineWork:
        """The engine's work that sums ``tensor`` in place."""
        if self.size == 1:
            return Already()
        gpus = self.gpus if tensor.is_cuda else None
        if gpus is not None:
            return gpus.sum(tensor)
        if self._tree is not None and tensor.numel() * tensor.element_size() > MESSAGE_BYTES:
            return self._tree.start(tensor)
        if is_small(tensor, self.size):
            return self._small.start(tensor)
        return self.engine.sum(tensor)

    def start_written_sum(self, tensor: torch.Tensor, form: Format) -> EngineWork:
        """The same with numbers in this format between places far from one another."""
        if self._tree is None:  # the group was re-formed meanwhile
            raise RuntimeError("sums of this group cross no places")
        return self._tree.start(tensor, form)

    @property
    def writes(self) -> bool:
        """Whether `start_written_sum` is there: sums cross between places by one worker of each."""
        return self._tree is not None

    def start_all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> EngineWork:
        """The engine's work that exchanges rows of bytes."""
        if len(sent) != self.size:
            raise RuntimeError(f"rows for {len(sent)} workers in a group of {self.size}")
        return self.engine.all_to_all(sent, got)

    def start_broadcast(self, part: torch.Tensor) -> EngineWork:
        """The engine's work that overwrites ``part`` with the leader's."""
        return self.engine.broadcast(part, self._seats[0])

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EngineWork:
        """The engine's work that sends to the worker of that rank."""
        return self.engine.send(tensor, self._seats[to], tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> EngineWork:
        return self.engine.receive(tensor, self._seats[source], tag)

    def sum_over(self, topology: Topology) -> None:
        """From now on sums go as the topology, in whose order the group was connected, says."""
        self.topology = topology
        if topology.tree:
            self._tree = TreeSums(topology.branch(self.rank), self.rank, send=self.send, receive=self.receive)

    def round_is_over(self) -> None:
        self._small.round_is_over()
        if self._tree is not None:
            self._tree.round_is_over()

    # -- small facts -----------------------------------------------------------------------------------------------

    def gather(self, key: str, label: str, value: Any, *, watch: Watch) -> list[Any]:
        """Workers put their values, the leader puts the list: two store operations a worker."""
        store = self.store
        if self.rank:
            store.set(f"{key}/{self.rank}", json.dumps([label, value]))
            self.wait_for([f"{key}/all"], watch=watch)
            return list(read_json(store, f"{key}/all"))
        others = [f"{key}/{rank}" for rank in range(1, self.size)]
        if others:
            self.wait_for(others, watch=watch)
        said = [[label, json.loads(json.dumps(value))], *(read_json(store, other) for other in others)]
        if any(theirs != label for theirs, _ in said):
            raise watch.unlike_calls({rank: theirs for rank, (theirs, _) in enumerate(said)})
        values = [theirs for _, theirs in said]
        store.set(f"{key}/all", json.dumps(values))
        for old in (*others, *self._spent):  # everybody has read the list before this one
            store.delete_key(old)
        self._spent = [f"{key}/all"]
        return values

    def wait_for(self, keys: list[str], *, watch: Watch) -> None:
        """Return when all these keys are in the store."""
        pause = 0.0002
        while not self.store.check(keys):
            watch.check()
            watch.check_group(self)
            concurrency.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    # -- the network -----------------------------------------------------------------------------------------------

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        """Where the network between this worker and others does not pass: their ranks, their address, and the seconds
        since anything sent to it was last acknowledged. All workers of a computer share its address."""
        if self._engine is None:
            return []
        seats = self.topology.order
        return [
            (sorted(seats[seat] for seat in found), address, silent_s)
            for found, address, silent_s in self._engine.unanswered()
        ]

    # -- the end ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise when the group was broken off or closed: for a thread that waits in it and has no watch."""
        if self._over:
            raise RuntimeError("the group is over")

    def break_off(self) -> None:
        """What is under way fails now, within milliseconds."""
        self._over = True
        if self.gpus is not None:
            self.gpus.abort()
        if self._engine is not None:
            self._engine.abort()

    @property
    def hopeless(self) -> bool:
        """Whether a thread waits in the engine for long though a connection of this group is broken: nothing is bound
        to wake it, for on a connection that breaks at the wrong moment Gloo may forget to."""
        engine = self._engine
        return not self._over and engine is not None and self.waits.longest_s() > LEAVE_S and engine.lost()

    def end_if_stuck(self) -> None:
        """End the process, some seconds from now, if a thread is still in a wait of this broken-off group."""
        self.waits.end_if_stuck()

    def detach(self) -> list[Any]:
        """Give up the engine: what holds it and its last sends, for `let_go`; itself last, for what runs in it needs
        it."""
        self._over = True
        sends: list[Any] = [*self._small.empty(), *(self._tree.end() if self._tree is not None else [])]
        engine = self._engine.detach() if self._engine is not None else []
        return [*sends, *engine] if engine else []


def let_go(held: list[Any]) -> None:
    """Free what a group has given up, in order. The interpreter must not end while a thread is inside the engine."""
    while held:
        one = held.pop(0)
        if isinstance(one, concurrency.Thread):
            one.join(CLOSE_S)
        del one
