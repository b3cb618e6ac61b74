"""A fleet of fixed size over torch.distributed: as started by ``paceline run``, torchrun, Slurm or by hand.

Gloo carries all; where every worker has a GPU of its own, NCCL sums what lies there. The process group is
Paceline's own, so a script may use torch.distributed's default group beside it. A worker that dies ends the run, with
an error that names it, on every survivor.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from paceline import concurrency
from paceline.errors import FLEET_FAILED, FleetError, LoaderDied, PacelineError
from paceline.roster.calls import CALLS, GROUP, ROUNDS, name_workers, without_answer
from paceline.transport.alone import Alone
from paceline.transport.base import Collective
from paceline.transport.calls import CallSequences
from paceline.transport.distributed import Distributed, channels, choose_backend, facts_of, one_line
from paceline.transport.engines.gloo import connect_gloo
from paceline.transport.group import Group, let_go
from paceline.transport.heartbeat import Heartbeat
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import Store, dist
from paceline.transport.paths import find_address, own_addresses
from paceline.transport.subgroup import Subgroup
from paceline.transport.survey import Survey
from paceline.transport.topology import Topology

logger = logging.getLogger("paceline")

UNBLOCK_S = 5.0
PATIENT_TURNS = 4
"""How often workers try to reach each other before the run is given up, each time for some seconds."""
HEARING_S = 3.0
"""How long the holder of the store stays after a failure, so that the others can read what it was."""


def launched() -> bool:
    """Whether a launcher has said who this worker is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class FixedTransport(Distributed):
    """The transport of a fleet whose size does not change."""

    name = "fixed"

    def __init__(
        self, device: torch.device, *, backend: str | None = None, ranked: tuple[int, int] | None = None
    ) -> None:
        """``backend``: what the fleet needs, whatever else could be had. ``ranked``: this worker's rank and the fleet's
        size, where those of the launcher are of processes."""
        super().__init__(device, CallSequences(CALLS, ROUNDS, GROUP))
        store, *launched_as, self._meeting = _rendezvous()
        self.rank, self.size = ranked or launched_as
        self.workers = tuple(range(self.size))
        self._holds_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        root = dist.PrefixStore("paceline" if restart == "0" else f"paceline{restart}", store)
        joined = root.add(f"joins/{self.rank}", 1)
        # Each thread has a connection of its own: one's blocking request must not hold up another's.
        self._formed = Group(
            self.rank,
            self.size,
            store=dist.PrefixStore(f"join{joined}", root),
            signals=dist.PrefixStore(f"board{joined}", root),
            board=dist.PrefixStore(f"board{joined}", root.clone()),
        )
        self._subgroups: dict[tuple[int, ...], Collective] = {}
        self._noticed = concurrency.Event()
        self._names = [f"worker {rank}" for rank in range(self.size)]
        aside = root.clone()
        self._heartbeat = Heartbeat(
            dist.PrefixStore(f"join{joined}", aside),
            aside,
            self.rank,
            self.size,
            names=self._names,
            sequences=self._sequences,
            on_failure=self._unblock,
        )
        self._heartbeat.network, self._heartbeat.refuses_foreign = self._network, ranked is None
        facts = self.gather("join", facts_of(device))
        self._names[:] = name_workers(dict(enumerate(facts))).values()
        self.backend, self._channels = backend or choose_backend(facts), channels(facts)
        with self.round("forming the group"):
            self._address = self._find_address(facts)
            self._form(facts)

    @property
    def group(self) -> Group:
        return self._formed

    @property
    def watch(self) -> FixedTransport:
        return self

    def _find_address(self, facts: Sequence[Mapping[str, Any]]) -> str:
        """Where the others reach this worker. A cable that is cut for a moment is waited for."""
        own, problem = own_addresses(*self._meeting), ""
        for turn in range(PATIENT_TURNS):
            try:
                return find_address(self.group, own, facts=dict(enumerate(facts)), watch=self, turn=turn)
            except ConnectionError as error:
                problem = str(error)
                logger.warning("%s; trying again", problem)
        raise FleetError(problem)

    def _form(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Connect all workers, in the order of where they are."""
        survey = Survey()
        topology = survey.arrange(self.group, facts, host=self._address, watch=self)
        self._connect(self.group, f"group/{self.generation}", topology)
        try:
            self.group.sum_over(survey.weigh(self.group, topology, facts, watch=self))
        except RuntimeError as error:
            raise error if isinstance(error, PacelineError) else self.failed(error) from None

    def _connect(self, group: Group, name: str, topology: Topology) -> None:
        """Form a process group; ``name``: of its keys in the store."""
        store = dist.PrefixStore(name, self.group.store)
        how: Any = {"towards": (self._address, 0), "spare_port": self._meeting[1], "channels": self._channels}
        group.connect(partial(connect_gloo, store, **how), topology=topology)
        if self.backend == "nccl":
            store = dist.PrefixStore(f"{name}/gpus", self.group.store)
            group.gpus = NcclGroup(store, group.rank, group.size, self._device)

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """These workers by themselves, this one included. All workers call it, each for its own group."""
        members = tuple(ranks)
        with self.round("forming the groups"):
            if members not in self._subgroups:
                self._subgroups[members] = self._make_subgroup(members) if len(members) > 1 else Alone()
        return self._subgroups[members]

    def _make_subgroup(self, members: tuple[int, ...]) -> Subgroup:
        group, topology = Group(members.index(self.rank), len(members)), self.group.topology.among(members)
        self._connect(group, f"group/{self.generation}/{'-'.join(map(str, members))}", topology)
        group.sum_over(topology)
        return Subgroup(members, group, heartbeat=self._heartbeat, pending=self._started)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *, lane: str) -> int:
        return self._heartbeat.enter(label, lane=lane)

    def check(self) -> None:
        if self._heartbeat.failure:
            raise self.failed(self._heartbeat.failure)

    def _network(self) -> str:
        """Whom this worker's packets do not reach, in words."""
        return without_answer(self.group.unanswered(), self._names)

    def check_group(self, group: Group) -> None:
        assert group is self.group, "it is the same from beginning to end"

    def unlike_calls(self, labels: dict[int, str]) -> FleetError:
        self._noticed.set()
        return self._heartbeat.mismatch(labels)

    @property
    def calls(self) -> int:
        return self._sequences.places[CALLS].call

    @calls.setter
    def calls(self, calls: int) -> None:
        self._sequences.skip_to(calls)

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

    # -- the end ---------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> PacelineError:
        """The named error behind an engine's error."""
        if (died := LoaderDied.told_by(error)) is not None:
            return died
        self._noticed.set()
        return self._heartbeat.failure or self._heartbeat.diagnose(error)

    def close(self, *, failure: BaseException | None = None) -> None:
        if failure is None:
            self._say_goodbye()
        elif not isinstance(failure, FleetError):
            self._heartbeat.publish("lost", f"{self._names[self.rank]} ended with {one_line(failure)}")
        self._noticed.set()
        if failure is not None:
            if self._holds_store:
                self._heartbeat.await_acknowledgements(HEARING_S)
            self._break_off()
        self._heartbeat.stop()
        for gpus in self._abort_gpus():
            gpus.close()
        for subgroup in self._subgroups.values():
            subgroup.close()
        let_go(self.group.detach())
        self.group.gpus = None

    def _say_goodbye(self) -> None:
        """Leave together; the leader, which may hold the store, goes last."""
        self.gather("the end of the run", None)
        if self.rank:
            self.group.store.set(f"bye/{self.rank}", "")
            return
        until = concurrency.monotonic() + UNBLOCK_S
        others = [f"bye/{rank}" for rank in range(1, self.size)]
        while others and not self.group.store.check(others) and concurrency.monotonic() < until:
            concurrency.sleep(0.002)

    def _unblock(self) -> None:
        """Free this worker's main thread from a sum that will never end; failing that, end the process."""
        self._break_off()
        concurrency.Thread(target=self._leave_if_stuck, name="paceline-unblock", daemon=True).start()

    def _groups(self) -> list[Group]:
        return [self.group, *(one.group for one in self._subgroups.values() if isinstance(one, Subgroup))]

    def _abort_gpus(self) -> list[NcclGroup]:
        found = [group.gpus for group in self._groups() if group.gpus is not None]
        for gpus in found:
            gpus.abort()
        return found

    def _break_off(self) -> None:
        for group in self._groups():
            group.break_off()

    def _leave_if_stuck(self) -> None:
        if not self._noticed.wait(UNBLOCK_S):
            print(f"paceline: {self._heartbeat.failure}", file=sys.stderr, flush=True)
            os._exit(FLEET_FAILED)


def meeting_store() -> Store:
    """Where the processes that a launcher ranked meet."""
    return _rendezvous()[0]


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
