"""What the transports over torch.distributed share: sums over a process group, and small facts through a store.

Who is there, and what becomes of a call that cannot end, is each transport's own: `Fixed` names the lost worker and
gives up, `Elastic` forms the group anew and makes the call again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.machines.link import link_from_env
from paceline.transport.base import Pending
from paceline.transport.heartbeat import CALLS, ROUNDS
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import (
    ENGINE_TIMEOUT,
    Sockets,
    Store,
    close_doors,
    dist,
    gloo_device,
    joining,
    listening_ports,
    open_sockets,
)
from paceline.transport.pending import Watched
from paceline.transport.small_sums import Outbox, StarSum, is_small

logger = logging.getLogger("paceline")


class Linked(ABC):
    """Workers in one process group, with a store beside it."""

    solitary = False
    generation = 0
    backend: str
    rank: int
    size: int
    workers: tuple[int, ...]
    _rank: int
    _size: int
    """In the group as it stands; what the training sees (``rank``, ``size``) may follow later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: Store = None
        """Facts of this generation."""
        self._signals: Store = None
        self._board: Store = None
        """The same signals, over a connection of their own for another thread."""
        self._slots: dict[str, int] = {}
        self._spent: list[str] = []
        self._stars = 0
        self._outbox = Outbox()
        self._alike = False
        """Whether all compute on one kind of device, so that all choose the same way for a sum."""
        self._link = link_from_env()
        self._summed = 0
        """Bytes whose sum was started since the last round ended: gradients start before their round is entered."""
        self._group: Any = None
        self._gpus: NcclGroup | None = None
        """Sums what lies on GPUs, where every worker has one of its own; all else goes over Gloo."""
        self._sockets: Sockets = frozenset()

    # -- each transport's own --------------------------------------------------------------------------------------

    @abstractmethod
    def _enter(self, label: str, *, lane: str) -> int:
        """Begin the next collective call of this lane; returns its number."""

    @abstractmethod
    def _leave(self, *, lane: str) -> None: ...

    @abstractmethod
    def _check(self) -> None:
        """Raise when what this worker waits for can never come."""

    @abstractmethod
    def _check_store(self, store: Store) -> None:
        """Raise when what is awaited in this store is asked for in another by now."""

    @abstractmethod
    def failed(self, error: BaseException) -> Exception:
        """What to raise for an engine's error."""

    @abstractmethod
    def _unlike_calls(self, labels: dict[int, str]) -> Exception:
        """What to raise when workers met in unlike calls."""

    # -- sums ------------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, label: str, *, aside: bool = False, keeps: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        lane = ROUNDS if aside else CALLS
        self._enter(label, lane=lane)
        try:
            yield
            self._outbox.round_is_over()
            self._cross_link()
        finally:
            self._leave(lane=lane)

    def sum(self, tensor: torch.Tensor) -> Pending:
        self._summed += tensor.numel() * tensor.element_size()
        return self._started(self._start_sum, tensor)

    def _started(self, start: Callable[..., Any], *args: Any, whole: bool = True) -> Pending:
        store = self._store  # read first: whoever began in the next generation without knowing it is then told so
        try:
            return Watched(start(*args), self, store=store, whole=whole)
        except RuntimeError as error:  # on a connection that broke, even the start fails
            raise self.failed(error) from None

    def _start_sum(self, tensor: torch.Tensor) -> Any:
        gpus = self._gpus if tensor.is_cuda else None
        if gpus is not None:
            return gpus.sum(tensor)
        if self._alike and is_small(tensor, self._size):
            self._stars += 1
            star = StarSum(self._engine, tensor, rank=self._rank, size=self._size, number=self._stars)
            return self._outbox.keep(star)
        return self._engine.allreduce([tensor], _sum_options())

    @property
    def _engine(self) -> Any:
        return self._group

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        with self.round("the leader's broadcast", keeps=tensors):
            self._broadcast(tensors)

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]  # any dtype, any layout
        for work in [self._started(lambda part=part: self._engine.broadcast([part], options)) for part in raw]:
            work.wait()
        for tensor, part in zip(tensors, raw, strict=True):
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _cross_link(self) -> None:
        """Take as long as an emulated link would for what this round has summed."""
        data, self._summed = self._summed, 0
        if self._link is not None:
            time.sleep(self._link.seconds(data, workers=self._size))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._started(lambda: self._engine.send([tensor], to, tag), whole=False).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        self._started(lambda: self._engine.recv([tensor], source, tag), whole=False).wait()

    # -- small facts -----------------------------------------------------------------------------------------------

    def _gather(self, key: str, label: str, value: Any) -> list[Any]:
        """Workers put their values, the leader puts the list: two store operations a worker."""
        store = self._store
        if self._rank:
            store.set(f"{key}/{self._rank}", json.dumps([label, value]))
            self._await([f"{key}/all"], store)
            return list(json.loads(store.get(f"{key}/all")))
        others = [f"{key}/{rank}" for rank in range(1, self._size)]
        if others:
            self._await(others, store)
        said = [[label, json.loads(json.dumps(value))], *(json.loads(store.get(other)) for other in others)]
        if any(theirs != label for theirs, _ in said):
            raise self._unlike_calls({rank: theirs for rank, (theirs, _) in enumerate(said)})
        values = [theirs for _, theirs in said]
        store.set(f"{key}/all", json.dumps(values))
        for old in (*others, *self._spent):  # everybody has read the list before this one
            store.delete_key(old)
        self._spent = [f"{key}/all"]
        return values

    def _await(self, keys: list[str], store: Store) -> None:
        pause = 0.0002
        while not store.check(keys):
            self._check()
            self._check_store(store)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    def slot(self, name: str) -> int:
        while name not in self._slots:  # the first slot that is ours or free
            slot = len(self._slots)
            given = self._ask_store(partial(self._store.compare_set, f"slot/{slot}", "", name))
            self._slots[str(given.decode())] = slot
        return self._slots[name]

    def slot_name(self, slot: int) -> str:
        while len(self._slots) <= slot:  # given out by another worker before it used it
            name = self._ask_store(partial(self._store.get, f"slot/{len(self._slots)}"))
            self._slots[str(name.decode())] = len(self._slots)
        return list(self._slots)[slot]

    # -- signals ---------------------------------------------------------------------------------------------------

    def signal(self, name: str) -> None:
        self._ask_store(lambda: self._signals.set(name, ""))

    def tally(self, name: str) -> int:
        return int(self._ask_store(lambda: self._signals.add(name, 1)))

    def forget(self, name: str) -> None:
        self._ask_store(lambda: self._board.delete_key(name))

    def heard(self, name: str) -> bool:
        self._check()
        return bool(self._ask_store(lambda: self._board.check([name])))

    def _ask_store(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RuntimeError as error:
            raise self.failed(error) from None

    # -- the engine ------------------------------------------------------------------------------------------------

    def _form_group(self, store: Store, rank: int, size: int, *, towards: tuple[str, int]) -> Any:
        """Gloo for so many workers, all of whom come here."""
        before = open_sockets()
        gloo, where = gloo_device(*towards)
        doors = open_sockets() - before  # Gloo's, and what another thread of the script may have opened meanwhile
        mine = listening_ports(doors)
        store.set(f"doors/{rank}", json.dumps(mine))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [gloo]
        options._timeout = ENGINE_TIMEOUT
        group = self._make_gloo(store, rank, size, options)
        everybodys = [json.loads(store.get(f"doors/{other}")) for other in range(size)]  # all have come by now
        made = open_sockets() - before
        self._sockets |= joining(made, {port for ports in everybodys for port in ports}) or made
        if len(mine) == 1:  # surely Gloo's
            close_doors(doors)
        logger.info("worker %d of %d reaches the others over gloo, %s", rank, size, where)
        return group

    def _make_gloo(self, store: Store, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, options)


def facts_of(device: torch.device) -> dict[str, Any]:
    """What a worker says of itself."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}


def choose_backend(facts: Sequence[Mapping[str, Any]]) -> str:
    """NCCL when every worker has a GPU of its own, else Gloo; PACELINE_BACKEND decides when it is set."""
    wanted = os.environ.get("PACELINE_BACKEND", "").lower()
    if wanted not in ("", "gloo", "nccl"):
        raise ValueError(f"PACELINE_BACKEND is {wanted!r}; it can be gloo or nccl")
    own_gpus = {(fact["host"], fact["device"]) for fact in facts if fact["device"].startswith("cuda")}
    return wanted or ("nccl" if len(own_gpus) == len(facts) and dist.is_nccl_available() else "gloo")


def one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:300] if text else type(error).__name__


def _sum_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    return options
