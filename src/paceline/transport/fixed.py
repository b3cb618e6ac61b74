"""A fleet of fixed size over torch.distributed: as started by ``paceline run``, torchrun, Slurm or by hand.

Gloo carries all; where every worker has a GPU of its own, NCCL sums what lies there. The process group is
Paceline's own, so a script may use torch.distributed's default group beside it. A worker that dies ends the run, with
an error that names it, on every survivor.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from paceline.errors import FleetError, LoaderDied, PacelineError
from paceline.transport.alone import Alone
from paceline.transport.base import Transport
from paceline.transport.distributed import Linked, choose_backend, facts_of, one_line
from paceline.transport.heartbeat import CALLS, Presence
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import Store, break_off, dist
from paceline.transport.subgroup import Subgroup

EXIT_CODE = 75
"""Exit code of a worker that was ended by the fleet's failure and not by its own."""
UNBLOCK_S = 5.0
HEARING_S = 3.0
"""How long the holder of the store stays after a failure, so that the others can read what it was."""


def launched() -> bool:
    """Whether a launcher has said who this worker is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Fixed(Linked):
    """The transport of a fleet whose size does not change."""

    name = "fixed"
    elastic = False

    def __init__(self, device: torch.device, *, backend: str | None = None) -> None:
        """``backend``: what the fleet needs, whatever else could be had."""
        super().__init__(device)
        store, self.rank, self.size, self._meeting = _rendezvous()
        self._rank, self._size = self.rank, self.size
        self.workers = tuple(range(self.size))
        self._holds_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        root = dist.PrefixStore("paceline" if restart == "0" else f"paceline{restart}", store)
        joined = root.add(f"joins/{self.rank}", 1)
        self._store = dist.PrefixStore(f"join{joined}", root)
        self._signals = dist.PrefixStore(f"board{joined}", root)
        self._subgroups: dict[tuple[int, ...], Transport] = {}
        self._noticed = threading.Event()
        self._names = [f"worker {rank}" for rank in range(self.size)]
        self._board = dist.PrefixStore(f"board{joined}", _clone(root))
        aside = _clone(root)
        beats = dist.PrefixStore(f"join{joined}", aside)
        self._presence = Presence(beats, aside, self.rank, self.size, names=self._names, on_failure=self._unblock)
        facts = self.gather("join", facts_of(device))
        self._name_workers(facts)
        self._alike = len({fact["device"].split(":")[0] for fact in facts}) == 1
        self.backend = backend or choose_backend(facts)
        with self.round("forming the group"):
            self._group, self._gpus = self._form(f"group/{self.generation}", self.rank, self.size)

    def _form(self, name: str, rank: int, size: int) -> tuple[Any, NcclGroup | None]:
        group = self._form_group(dist.PrefixStore(name, self._store), rank, size, towards=self._meeting)
        if self.backend != "nccl":
            return group, None
        return group, NcclGroup(dist.PrefixStore(f"{name}/gpus", self._store), rank, size, self._device)

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """A transport among these workers, this one included. All workers call it, each for its own group."""
        members = tuple(ranks)
        with self.round("forming the groups"):
            if members not in self._subgroups:
                self._subgroups[members] = self._make_subgroup(members) if len(members) > 1 else Alone()
        return self._subgroups[members]

    def _make_subgroup(self, members: tuple[int, ...]) -> Subgroup:
        name = f"group/{self.generation}/{'-'.join(map(str, members))}"
        engine, gpus = self._form(name, members.index(self.rank), len(members))
        return Subgroup(
            self,
            members,
            engine,
            gpus=gpus,
            alike=self._alike,
            presence=self._presence,
            pending=self._started,
        )

    # -- calls -----------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *, lane: str) -> int:
        return self._presence.enter(label, lane=lane)

    def _leave(self, *, lane: str) -> None:
        self._presence.leave(lane=lane)

    def _check(self) -> None:
        if self._presence.failure:
            raise self.failed(self._presence.failure)

    def _check_store(self, store: Store) -> None:
        assert store is self._store, "it is the same from beginning to end"

    def _unlike_calls(self, labels: dict[int, str]) -> FleetError:
        self._noticed.set()
        return self._presence.mismatch(labels)

    @property
    def calls(self) -> int:
        return self._presence.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self._presence.skip_to(calls)

    def gather(self, label: str, value: Any) -> list[Any]:
        mine = value() if callable(value) else value
        call = self._enter(label, lane=CALLS)
        try:
            return self._gather(f"call/{call}", label, mine)
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, FleetError):
                raise
            raise self.failed(error) from None
        finally:
            self._leave(lane=CALLS)

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self._presence.doing(what, begun=begun)

    # -- the end ---------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> PacelineError:
        """The named error behind an engine's error."""
        if (died := LoaderDied.told_by(error)) is not None:
            return died
        self._noticed.set()
        return self._presence.failure or self._presence.diagnose(error)

    def close(self, *, failure: BaseException | None = None) -> None:
        if failure is None:
            self._say_goodbye()
        elif not isinstance(failure, FleetError):
            self._presence.publish("lost", f"{self._names[self.rank]} ended with {one_line(failure)}")
        self._noticed.set()
        if failure is not None:
            if self._holds_store:
                self._presence.await_acknowledgements(HEARING_S)
            self._break_off()
        self._presence.stop()
        for gpus in self._abort_gpus():
            gpus.close()
        for subgroup in self._subgroups.values():
            subgroup.close()
        self._outbox.empty()
        self._group = self._gpus = None

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
        self._abort_gpus()
        self._break_off()
        threading.Thread(target=self._leave_if_stuck, name="paceline-unblock", daemon=True).start()

    def _abort_gpus(self) -> list[NcclGroup]:
        gpus = [self._gpus, *(getattr(group, "gpus", None) for group in self._subgroups.values())]
        for one in (found := [one for one in gpus if one is not None]):
            one.abort()
        return found

    def _break_off(self) -> None:
        break_off(self._sockets, spare_port=self._meeting[1])

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


def _rendezvous() -> tuple[Store, int, int, tuple[str, int]]:
    """The store, this worker's rank, the size, and where they met: a script may change the variables afterwards."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    advice = "start with `paceline run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"the environment does not say where the fleet meets: {', '.join(missing)} not set; {advice}")
    if wrong := [name for name in names if name != "MASTER_ADDR" and not os.environ[name].isdecimal()]:
        told = f"{wrong[0]} is {os.environ[wrong[0]]!r}"
        raise ValueError(f"the environment does not say where the fleet meets: {told}, not a number; {advice}")
    rank, size, address, port = (os.environ[name] for name in names)
    return *_meet(address, port, rank, size), (address, int(port))


@cache
def _meet(address: str, port: str, rank: str, size: str) -> tuple[Store, int, int]:
    """One store a process, for all its joins: were it opened anew for each, a quick worker would reach the last one's
    store while the leader closes it."""
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store, int(rank), int(size)


def _clone(store: Store) -> Store:
    """A second connection: one thread's blocking request must not hold up another's."""
    return store.clone()
