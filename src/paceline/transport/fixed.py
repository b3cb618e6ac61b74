"""A fleet of fixed size over torch.distributed: as started by ``paceline run``, torchrun, Slurm or by hand.

Gloo carries CPU and mixed fleets, NCCL a fleet in which every worker has a GPU of its own. The process group is
Paceline's own, so a script may use torch.distributed's default group beside it. A worker that dies ends the run, with
an error that names it, on every survivor.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from paceline.errors import FleetError
from paceline.machines.link import link_from_env
from paceline.transport.alone import Alone
from paceline.transport.base import Transport
from paceline.transport.network import Store, break_off, dist, gloo_device, open_sockets
from paceline.transport.presence import CALLS, ROUNDS, Presence
from paceline.transport.star import StarSum, is_small
from paceline.transport.subgroup import Subgroup

logger = logging.getLogger("paceline")

EXIT_CODE = 75
"""Exit code of a worker that was ended by the fleet's failure and not by its own."""
ENGINE_TIMEOUT = timedelta(days=7)
"""The engine's own timeout never decides: `Presence` does, and says who."""
UNBLOCK_S = 5.0
HEARING_S = 3.0
"""How long the holder of the store stays after a failure, so that the others can read what it was."""


def launched() -> bool:
    """Whether a launcher has said who this worker is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Fixed:
    """The transport of a fleet whose size does not change."""

    name = "fixed"
    generation = 0

    def __init__(self, device: torch.device, *, backend: str | None = None) -> None:
        """``backend``: what the fleet needs, whatever else could be had."""
        self._device = device
        store, self.rank, self.size = _rendezvous()
        self.workers = tuple(range(self.size))
        self._holds_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        root = dist.PrefixStore("paceline" if restart == "0" else f"paceline{restart}", store)
        joined = root.add(f"joins/{self.rank}", 1)
        self._store: Store = dist.PrefixStore(f"join{joined}", root)
        self._signals: Store = dist.PrefixStore(f"board{joined}", root)
        self._slots: dict[str, int] = {}
        self._spent: list[str] = []
        self._stars = 0
        self._link = link_from_env()
        self._summed = 0
        """Bytes whose sum was started since the last round ended: gradients start before their round is entered."""
        self._group: Any = None
        self._sockets: frozenset[int] = frozenset()
        self._subgroups: dict[tuple[int, ...], Transport] = {}
        self._noticed = threading.Event()
        self._names = [f"worker {rank}" for rank in range(self.size)]
        self._board: Store = dist.PrefixStore(f"board{joined}", _clone(root))
        aside = _clone(root)
        beats = dist.PrefixStore(f"join{joined}", aside)
        self._presence = Presence(beats, aside, self.rank, self.size, names=self._names, on_failure=self._unblock)
        facts = self.gather("join", _facts(device))
        self._name_workers(facts)
        self._alike = len({fact["device"].split(":")[0] for fact in facts}) == 1
        """Whether all compute on one kind of device, so that all choose the same way for a sum."""
        self.backend = backend or _choose_backend(facts)
        with self.round("forming the group"):
            self._group = self._form_group(f"group/{self.generation}", self.rank, self.size)

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """A transport among these workers, this one included. All workers call it, each for its own group."""
        members = tuple(ranks)
        with self.round("forming the groups"):
            if members not in self._subgroups:
                self._subgroups[members] = self._make_subgroup(members) if len(members) > 1 else Alone()
        return self._subgroups[members]

    def _make_subgroup(self, members: tuple[int, ...]) -> Subgroup:
        name = f"group/{self.generation}/{'-'.join(map(str, members))}"
        engine = self._form_group(name, members.index(self.rank), len(members))
        return Subgroup(
            self,
            members,
            engine,
            alike=self._alike,
            device=self._device,
            presence=self._presence,
            pending=lambda work: _Sum(work, self),
        )

    # -- sums ------------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, label: str, *, aside: bool = False) -> Iterator[None]:
        lane = ROUNDS if aside else CALLS
        self._presence.enter(label, lane=lane)
        try:
            yield
            self._cross_link()
            if self.backend == "nccl":  # its waits only order streams: the true one is here, where it is watched
                torch.cuda.current_stream(self._device).synchronize()
                if self._presence.failure:
                    raise self.failed(self._presence.failure)
        finally:
            self._presence.leave(lane=lane)

    def sum(self, tensor: torch.Tensor) -> _Sum:
        self._summed += tensor.numel() * tensor.element_size()
        return self._started(self._start_sum, tensor)

    def _started(self, start: Callable[..., Any], *args: Any) -> _Sum:
        try:
            return _Sum(start(*args), self)
        except RuntimeError as error:  # on a connection that broke, even the start fails
            raise self.failed(error) from None

    def _start_sum(self, tensor: torch.Tensor) -> Any:
        if self.backend == "gloo" and self._alike and is_small(tensor, self.size):
            self._stars += 1
            return StarSum(self._group, tensor, rank=self.rank, size=self.size, number=self._stars)
        return self._group.allreduce([tensor], _sum_options())

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]  # any dtype, any layout
        if self.backend == "nccl":
            raw = [part.to(self._device) for part in raw]
        with self.round("the leader's broadcast"):
            for work in [self._group.broadcast([part], options) for part in raw]:
                _Sum(work, self).wait()
        for tensor, part in zip(tensors, raw, strict=True):
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _cross_link(self) -> None:
        """Take as long as an emulated link would for what this round has summed."""
        data, self._summed = self._summed, 0
        if self._link is not None:
            time.sleep(self._link.seconds(data, workers=self.size))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._started(self._group.send, [tensor], to, tag).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        self._started(self._group.recv, [tensor], source, tag).wait()

    @property
    def calls(self) -> int:
        return self._presence.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self._presence.skip_to(calls)

    # -- small facts -----------------------------------------------------------------------------------------------

    def gather(self, label: str, value: Any) -> list[Any]:
        call = self._presence.enter(label)
        try:
            return self._gather(f"call/{call}", label, value)
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, FleetError):
                raise
            raise self.failed(error) from None
        finally:
            self._presence.leave()

    def _gather(self, key: str, label: str, value: Any) -> list[Any]:
        """Workers put their values, the leader puts the list: two store operations a worker."""
        if self.rank:
            self._store.set(f"{key}/{self.rank}", json.dumps([label, value]))
            self._await([f"{key}/all"])
            return list(json.loads(self._store.get(f"{key}/all")))
        others = [f"{key}/{rank}" for rank in range(1, self.size)]
        if others:
            self._await(others)
        said = [[label, json.loads(json.dumps(value))], *(json.loads(self._store.get(other)) for other in others)]
        if any(theirs != label for theirs, _ in said):
            self._noticed.set()
            raise self._presence.mismatch({rank: theirs for rank, (theirs, _) in enumerate(said)})
        values = [theirs for _, theirs in said]
        self._store.set(f"{key}/all", json.dumps(values))
        for old in (*others, *self._spent):  # everybody has read the list before this one
            self._store.delete_key(old)
        self._spent = [f"{key}/all"]
        return values

    def _await(self, keys: list[str]) -> None:
        pause = 0.0002
        while not self._store.check(keys):
            if self._presence.failure:
                raise self.failed(self._presence.failure)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    def slot(self, name: str) -> int:
        try:
            while name not in self._slots:  # the first slot that is ours or free
                slot = len(self._slots)
                self._slots[str(self._store.compare_set(f"slot/{slot}", "", name).decode())] = slot
        except RuntimeError as error:
            raise self.failed(error) from None
        return self._slots[name]

    def slot_name(self, slot: int) -> str:
        try:
            while len(self._slots) <= slot:  # given out by another worker before it used it
                self._slots[str(self._store.get(f"slot/{len(self._slots)}").decode())] = len(self._slots)
        except RuntimeError as error:
            raise self.failed(error) from None
        return list(self._slots)[slot]

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self._presence.doing(what, begun=begun)

    # -- signals ---------------------------------------------------------------------------------------------------

    def signal(self, name: str) -> None:
        self._ask_store(lambda: self._signals.set(name, ""))

    def tally(self, name: str) -> int:
        return int(self._ask_store(lambda: self._signals.add(name, 1)))

    def forget(self, name: str) -> None:
        self._ask_store(lambda: self._board.delete_key(name))

    def heard(self, name: str) -> bool:
        if self._presence.failure:
            raise self.failed(self._presence.failure)
        return bool(self._ask_store(lambda: self._board.check([name])))

    def _ask_store(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RuntimeError as error:
            raise self.failed(error) from None

    # -- the end ---------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> FleetError:
        """The named error behind an engine's error."""
        self._noticed.set()
        return self._presence.failure or self._presence.diagnose(error)

    def close(self, *, failure: BaseException | None = None) -> None:
        if failure is None:
            self._say_goodbye()
        elif not isinstance(failure, FleetError):
            self._presence.publish("lost", f"{self._names[self.rank]} ended with {_one_line(failure)}")
        self._noticed.set()
        if failure is not None:
            if self._holds_store:
                self._presence.await_acknowledgements(HEARING_S)
            self._break_off()
        self._presence.stop()
        for subgroup in self._subgroups.values():
            subgroup.close()
        self._group = None

    def _say_goodbye(self) -> None:
        """Leave together; the leader, which may hold the store, goes last."""
        self.gather("the end of the run", None)
        if self.rank:
            self._store.set(f"bye/{self.rank}", "")
            return
        until = time.monotonic() + UNBLOCK_S
        others = [f"bye/{rank}" for rank in range(1, self.size)]
        while others and not self._store.check(others) and time.monotonic() < until:
            time.sleep(0.002)

    def _unblock(self) -> None:
        """Free this worker's main thread from a sum that will never end; failing that, end the process."""
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._break_off()
        threading.Thread(target=self._leave_if_stuck, name="paceline-unblock", daemon=True).start()

    def _break_off(self) -> None:
        break_off(self._sockets, store_port=int(os.environ["MASTER_PORT"]))

    def _leave_if_stuck(self) -> None:
        if not self._noticed.wait(UNBLOCK_S):
            print(f"paceline: {self._presence.failure}", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)

    # -- the beginning ---------------------------------------------------------------------------------------------

    def _name_workers(self, facts: list[dict[str, Any]]) -> None:
        hosts = {fact["host"] for fact in facts}
        for rank, fact in enumerate(facts):
            where = fact["device"] if len(hosts) == 1 else f"{fact['host']}, {fact['device']}"
            self._names[rank] = f"worker {rank} ({where})"

    def _form_group(self, name: str, rank: int, size: int) -> Any:
        """An engine for so many workers, all of whom come here."""
        prefix = dist.PrefixStore(name, self._store)
        if self.backend == "nccl":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = ENGINE_TIMEOUT
            return dist.ProcessGroupNCCL(prefix, rank, size, options)
        before = open_sockets()
        gloo, where = gloo_device(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [gloo]
        options._timeout = ENGINE_TIMEOUT
        group = dist.ProcessGroupGloo(prefix, rank, size, options)
        self._sockets |= open_sockets() - before
        logger.info("worker %d of %d reaches the others over gloo, %s", rank, size, where)
        return group


class _Sum:
    """A sum under way, whose engine errors come out as named ones."""

    def __init__(self, work: Any, transport: Fixed) -> None:
        self._work, self._transport = work, transport

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._transport.failed(error) from None


def _sum_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    return options


def _rendezvous() -> tuple[Store, int, int]:
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise ValueError(
            f"the environment does not say where the fleet meets: {', '.join(missing)} not set; "
            "start with `paceline run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return _meet(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"], os.environ["WORLD_SIZE"])


@cache
def _meet(address: str, port: str, rank: str, size: str) -> tuple[Store, int, int]:
    """One store a process, for all its joins: were it opened anew for each, a quick worker would reach the last one's
    store while the leader closes it."""
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store, int(rank), int(size)


def _clone(store: Store) -> Store:
    """A second connection: one thread's blocking request must not hold up another's."""
    return store.clone()


def _facts(device: torch.device) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}


def _choose_backend(facts: list[dict[str, Any]]) -> str:
    """NCCL when every worker has a GPU of its own, else Gloo; PACELINE_BACKEND decides when it is set."""
    wanted = os.environ.get("PACELINE_BACKEND", "").lower()
    if wanted not in ("", "gloo", "nccl"):
        raise ValueError(f"PACELINE_BACKEND is {wanted!r}; it can be gloo or nccl")
    own_gpus = {(fact["host"], fact["device"]) for fact in facts if fact["device"].startswith("cuda")}
    return wanted or ("nccl" if len(own_gpus) == len(facts) and dist.is_nccl_available() else "gloo")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:300] if text else type(error).__name__
