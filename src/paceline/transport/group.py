"""Some workers, connected: Gloo carries their sums, NCCL those that lie on GPUs, and a torch store small facts.

A group never changes: where workers come and go, each generation has its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from paceline import concurrency
from paceline.transport.formats import Format
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import (
    ENGINE_TIMEOUT,
    Sockets,
    Store,
    break_off,
    close_listeners,
    dist,
    gloo_device,
    joining,
    listening,
    open_sockets,
    unanswered,
)
from paceline.transport.small_sums import SmallSums, is_small
from paceline.transport.topology import Topology, one_place
from paceline.transport.tree_sums import MESSAGE_BYTES, TreeSums

logger = logging.getLogger("paceline")

CLOSE_S = 3.0
"""How long a thread whose connections are shut may take to end."""
MakeGloo = Callable[[Store, int, int, Any], Any]
"""Makes Gloo's process group from a store, this worker's rank, the size, and options."""


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


class Already:
    """A sum over one worker."""

    def is_completed(self) -> bool:
        return True

    def wait(self, _: timedelta | None = None) -> None:
        return

    def abandon(self) -> bool:
        return True


class Group:
    """Workers in one process group, with a store beside it."""

    def __init__(
        self, rank: int, size: int, *, store: Store = None, signals: Store = None, board: Store = None
    ) -> None:
        """``store`` holds this group's facts, ``signals`` what its workers say; ``board``: the same signals, over a
        connection of their own for another thread."""
        self.rank, self.size = rank, size
        self.store, self.signals, self.board = store, signals, board
        self.gpus: NcclGroup | None = None
        """Sums what lies on GPUs, where every worker has one of its own; all else goes over Gloo."""
        self._gloo: Any = None
        self._sockets: Sockets = frozenset()
        self._doors: dict[tuple[str, int], int] = {}
        """Where the engine of each worker listens, and its rank."""
        self._arrange(one_place(size))
        self._tree: TreeSums | None = None
        self._spent: list[str] = []

    def _arrange(self, topology: Topology) -> None:
        self.topology = topology
        self._seats = {rank: seat for seat, rank in enumerate(topology.order)}
        self._small = SmallSums(self._seats[self.rank], self.size, lambda: self.engine)

    @property
    def engine(self) -> Any:
        """Gloo's process group."""
        if self._gloo is None:
            raise RuntimeError("the group is not formed, or closed")
        return self._gloo

    def connect(
        self,
        store: Store,
        *,
        towards: tuple[str, int],
        make: MakeGloo,
        channels: int = 1,
        topology: Topology | None = None,
    ) -> None:
        """Form Gloo's process group; all workers of the group come here. ``towards``: where the fleet meets.
        ``channels``: how many sums may travel side by side. ``topology``: in whose order rings go. Both are the same
        for all."""
        self._arrange(topology or self.topology)
        before = open_sockets()
        devices, (where, *_) = zip(*(gloo_device(*towards) for _ in range(channels)), strict=True)
        listeners = open_sockets() - before  # Gloo's, and what another thread of the script may have opened meanwhile
        mine = listening(listeners)
        store.set(f"doors/{self.rank}", json.dumps(mine))
        options = dist.ProcessGroupGloo._Options()
        options._devices = list(devices)
        options._threads = max(2, channels)
        options._timeout = ENGINE_TIMEOUT
        gloo = make(store, self._seats[self.rank], self.size, options)
        doors = [json.loads(store.get(f"doors/{other}")) for other in range(self.size)]  # all have come by now
        self._doors = {(address, port): rank for rank, theirs in enumerate(doors) for address, port in theirs}
        made = open_sockets() - before
        self._sockets = joining(made, {port for _, port in self._doors}) or made
        if len(mine) == channels:  # surely Gloo's
            close_listeners(listeners)
        logger.info("worker %d of %d reaches the others over gloo, %s", self.rank, self.size, where)
        self._gloo = gloo

    # -- sums ------------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> Any:
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
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return self.engine.allreduce([tensor], options)

    def start_written_sum(self, tensor: torch.Tensor, form: Format) -> Any:
        """The same with numbers in this format between places far from one another."""
        if self._tree is None:  # the group was re-formed meanwhile
            raise RuntimeError("sums of this group cross no places")
        return self._tree.start(tensor, form)

    @property
    def writes(self) -> bool:
        """Whether `start_written_sum` is there: sums cross between places by one worker of each."""
        return self._tree is not None

    def start_all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Any:
        """The engine's work that exchanges rows of bytes."""
        if len(sent) != self.size:
            raise RuntimeError(f"rows for {len(sent)} workers in a group of {self.size}")
        return self.engine.alltoall_base(got.view(-1), sent.view(-1), [], [], dist.AllToAllOptions())

    def start_broadcast(self, part: torch.Tensor) -> Any:
        """The engine's work that overwrites ``part`` with the leader's."""
        options = dist.BroadcastOptions()
        options.rootRank = self._seats[0]
        return self.engine.broadcast([part], options)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """The engine's work that sends to the worker of that rank."""
        return self.engine.send([tensor], self._seats[to], tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return self.engine.recv([tensor], self._seats[source], tag)

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
            return list(json.loads(store.get(f"{key}/all")))
        others = [f"{key}/{rank}" for rank in range(1, self.size)]
        if others:
            self.wait_for(others, watch=watch)
        said = [[label, json.loads(json.dumps(value))], *(json.loads(store.get(other)) for other in others)]
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
        found = {}
        for (address, port), silent_s in unanswered(self._sockets).items():
            one = self._doors.get((address, port))
            ranks = {rank for (theirs, _), rank in self._doors.items() if theirs == address} if one is None else {one}
            if ranks := ranks - {self.rank}:
                found[address] = (sorted(ranks), address, silent_s)
        return [found[address] for address in sorted(found)]

    # -- the end ---------------------------------------------------------------------------------------------------

    def break_off(self, *, spare_port: int) -> None:
        """What is under way fails now, within milliseconds. ``spare_port``: the store's, whose connections stay."""
        if self.gpus is not None:
            self.gpus.abort()
        sockets, self._sockets = self._sockets, frozenset[tuple[int, str]]()
        if sockets:
            break_off(sockets, spare_port=spare_port)

    def detach(self) -> list[Any]:
        """Give up the engine: what holds it and its last sends, for `let_go`; itself last, for what runs in it needs
        it."""
        gloo, self._gloo = self._gloo, None
        sends: list[Any] = [*self._small.empty(), *(self._tree.end() if self._tree is not None else [])]
        return [] if gloo is None else [*sends, gloo]


def let_go(held: list[Any]) -> None:
    """Free what a group has given up, in order. The interpreter must not end while a thread is inside the engine."""
    while held:
        one = held.pop(0)
        if isinstance(one, concurrency.Thread):
            one.join(CLOSE_S)
        del one
