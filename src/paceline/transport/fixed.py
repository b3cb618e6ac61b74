"""A fleet of fixed size: one worker alone, or several over torch.distributed.

Several are started by ``paceline run``, torchrun, Slurm or by hand (`FixedTransport`). Gloo carries all; where every
worker has a GPU of its own, NCCL sums what lies there. The process group is Paceline's own, so a script may use
torch.distributed's default group beside it. A worker that dies ends the run, with an error that names it, on every
survivor.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from paceline import concurrency
from paceline.errors import FleetError, LoaderDied, PacelineError
from paceline.roster.calls import BACKGROUND, CALLS, GROUP, name_workers, without_answer
from paceline.transport.base import Collective, Pending, RoundTensors, Transport, made
from paceline.transport.call_sequences import CallSequences
from paceline.transport.distributed import Distributed, channels, facts_of, one_line
from paceline.transport.engines import ENGINES, choose
from paceline.transport.engines.contract import Engine, EngineKind, Meeting
from paceline.transport.group import Group, Over, end_if_stuck, let_go
from paceline.transport.heartbeat import Heartbeat
from paceline.transport.network import Store, dist
from paceline.transport.survey import Survey, find_address, own_addresses
from paceline.transport.topology import Topology


class Alone(Transport):
    """The transport of a fleet of one."""

    name = "alone"
    backend = "none"
    solitary = True
    rank = 0
    size = 1
    generation = 0
    calls = 0
    workers: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._slots: list[str] = []

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        yield made(result)

    def sum(self, tensor: torch.Tensor) -> Over:
        return Over()

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        return

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a worker alone has nobody to send to")

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a worker alone has nobody to receive from")

    def gather(self, label: str, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value() if callable(value) else value))]

    def slot(self, name: str) -> int:
        if name not in self._slots:
            self._slots.append(name)
        return self._slots.index(name)

    def slot_name(self, slot: int) -> str:
        return self._slots[slot]

    def tally(self, name: str, by: int = 1) -> int:
        return 1

    def was_signalled(self, name: str) -> bool:
        return True

    def close(self, *, failure: BaseException | None = None) -> None:
        return


logger = logging.getLogger("paceline")

GOODBYE_S = 5.0
"""How long the leader, which may hold the store, waits at the end for the others to have left."""
PATIENT_TURNS = 4
"""How often workers try to reach each other before the run is given up, each time for some seconds."""
HEARING_S = 3.0
"""How long the holder of the store stays after a failure, so that the others can read what it was."""


def launched() -> bool:
    """Return whether a launcher has given this worker a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which MPI's launchers give the number of processes."""


def refuse_mpi() -> None:
    """Raise ValueError where mpirun has started several processes: each would train alone, and nobody would notice."""
    for name in MPI_SIZES:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ValueError(
                f"{name} is {size}, so MPI has started {size} processes, and RANK and WORLD_SIZE are not set, so each "
                "would train alone: start with `paceline run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT in each; unset {name} for trainings that are meant to be alone"
            )


class FixedTransport(Distributed):
    """The transport of a fleet whose size does not change."""

    name = "fixed"

    def __init__(
        self, device: torch.device, *, cpu_engine: bool = False, ranked: tuple[int, int] | None = None
    ) -> None:
        """Meet the other workers, and connect them.

        ``cpu_engine``: sum by Gloo in host memory, whatever engine could be had. ``ranked``: this worker's rank and the
        fleet's size, where those of the launcher are of processes.
        """
        super().__init__(device, CallSequences(CALLS, BACKGROUND, GROUP))
        store, *launched_as, self._meeting = _rendezvous()
        self.rank, self.size = ranked or launched_as
        self.solitary = self.size == 1
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
        self._groups = [self._formed]
        """The whole fleet's group, and those of its subgroups."""
        self._names = [f"worker {rank}" for rank in range(self.size)]
        heartbeat_root = root.clone()
        self._heartbeat = Heartbeat(
            dist.PrefixStore(f"join{joined}", heartbeat_root),
            heartbeat_root,
            self.rank,
            self.size,
            names=self._names,
            sequences=self._sequences,
            on_failure=self._unblock,
        )
        self._heartbeat.network, self._heartbeat.refuses_foreign = self._network, ranked is None
        facts = self.gather("join", facts_of(device))
        self._names[:] = name_workers(dict(enumerate(facts))).values()
        self._kind: EngineKind = ENGINES["gloo"] if cpu_engine else choose(facts)
        self.backend, self._channels = self._kind.name, channels(facts)
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
        """Return the address at which the others reach this worker; a cable that is cut for a moment is waited for."""
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
        """Connect a group's engine; ``name`` is the prefix of its keys in the store."""
        store, spare_port = dist.PrefixStore(name, self.group.store), self._meeting[1]

        def make(rank: int, size: int) -> tuple[Engine, str]:
            at: Any = {"spare_port": spare_port, "channels": self._channels}
            return self._kind.connect(Meeting(store, rank, size, (self._address, 0), self._device, **at))

        group.connect(make, topology=topology)

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Return these workers by themselves, this one included. All workers call it, each for its own group."""
        members = tuple(ranks)
        with self.round("forming the groups"):
            if members not in self._subgroups:
                self._subgroups[members] = self._make_subgroup(members) if len(members) > 1 else Alone()
        return self._subgroups[members]

    def _make_subgroup(self, members: tuple[int, ...]) -> Subgroup:
        group, topology = Group(members.index(self.rank), len(members)), self.group.topology.among(members)
        self._connect(group, f"group/{self.generation}/{'-'.join(map(str, members))}", topology)
        group.sum_over(topology)
        self._groups.append(group)
        return Subgroup(members, group, heartbeat=self._heartbeat, pending=self._started)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *, lane: str) -> int:
        return self._heartbeat.enter(label, lane=lane)

    def check(self) -> None:
        if self._heartbeat.failure:
            raise self.failed(self._heartbeat.failure)

    def _network(self) -> str:
        """Return, in words, whom this worker's packets do not reach."""
        return without_answer(self.group.unanswered(), self._names)

    def check_group(self, group: Group) -> None:
        assert group is self.group, "it is the same from beginning to end"

    def unlike_calls(self, labels: dict[int, str]) -> FleetError:
        return self._heartbeat.mismatch(labels)

    @property
    def calls(self) -> int:
        return self._sequences.positions[CALLS].call

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

    def failed(self, error: BaseException, group: Group | None = None) -> PacelineError:
        """Return the named error behind an engine's error."""
        if (died := LoaderDied.told_by(error)) is not None:
            return died
        return self._heartbeat.failure or self._heartbeat.diagnose(error)

    def close(self, *, failure: BaseException | None = None) -> None:
        if failure is None:
            self._say_goodbye()
        elif not isinstance(failure, FleetError):
            self._heartbeat.publish("lost", f"{self._names[self.rank]} ended with {one_line(failure)}")
        if failure is not None:
            if self._holds_store:
                self._heartbeat.await_acknowledgements(HEARING_S)
            self._break_off()
        self._heartbeat.stop()
        let_go([closer for group in reversed(self._groups) for closer in group.close()])

    def _say_goodbye(self) -> None:
        """Leave together; the leader, which may hold the store, goes last."""
        self.gather("the end of the run", None)
        if self.rank:
            self.group.store.set(f"bye/{self.rank}", "")
            return
        until = concurrency.monotonic() + GOODBYE_S
        others = [f"bye/{rank}" for rank in range(1, self.size)]
        while others and not self.group.store.check(others) and concurrency.monotonic() < until:
            concurrency.sleep(0.002)

    def _unblock(self) -> None:
        """Free this worker's threads from calls that will never end; failing that, end the process."""
        self._break_off()
        end_if_stuck(self._waits, f"paceline: {self._heartbeat.failure}")

    def _waits(self) -> set[Any]:
        """Return what this worker's threads wait in now: calls and messages of the fleet, and a script's collective."""
        return self._heartbeat.waits().union(*(group.waits.now() for group in self._groups))

    def _break_off(self) -> None:
        for group in self._groups:
            group.break_off()


class Subgroup(Collective):
    """Some workers of a fleet with sums of their own: a group of `paceline.Averaging` combines its gradients over it.

    Its sums run on an engine of their own, beside the whole fleet's, and are counted apart, for unlike groups make
    unlike numbers of them. The fleet's `Heartbeat` watches who is waited for, and names them as everywhere.
    """

    def __init__(
        self, ranks: Sequence[int], group: Group, *, heartbeat: Heartbeat, pending: Callable[..., Pending]
    ) -> None:
        """Watch over ``group``: the members, connected, in the order of ``ranks``.

        ``pending`` starts an engine's work and watches over it.
        """
        self.group, self._heartbeat, self._pending = group, heartbeat, pending
        self.rank, self.size = group.rank, group.size
        heartbeat.group = tuple(ranks)

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        self._heartbeat.enter(label, lane=GROUP)
        try:
            yield made(result)
            self.group.round_is_over()
        finally:
            self._heartbeat.leave(lane=GROUP)

    def sum(self, tensor: torch.Tensor) -> Pending:
        return self._pending(lambda _: self.group.start_sum(tensor))

    def gather(self, label: str, value: Any) -> list[Any]:
        """Return everybody's value, by two sums: of the lengths of the JSON, and of the JSON, one row per worker."""
        own = torch.frombuffer(bytearray(json.dumps(value() if callable(value) else value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(own)
        with self.round(label):
            self.sum(lengths).wait()
            rows = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
            rows[self.rank, : len(own)] = own
            self.sum(rows).wait()
        sizes = lengths.tolist()
        return [json.loads(bytes(row[:size])) for row, size in zip(rows.tolist(), sizes, strict=True)]

    def close(self, *, failure: BaseException | None = None) -> None:
        """Let go of the engine; the fleet's transport closes its connections."""
        let_go(self.group.close())


def meeting_store() -> Store:
    """Return the store where the processes meet that a launcher ranked."""
    return _rendezvous()[0]


def _rendezvous() -> tuple[Store, int, int, tuple[str, int]]:
    """Return the store, this worker's rank, the size, and where they met: a script may change the variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    advice = "start with `paceline run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"the environment does not say where the fleet meets: {', '.join(missing)} not set; {advice}")
    if wrong := [name for name in names if name != "MASTER_ADDR" and not os.environ[name].isdecimal()]:
        given = f"{wrong[0]} is {os.environ[wrong[0]]!r}"
        raise ValueError(f"the environment does not say where the fleet meets: {given}, not a number; {advice}")
    rank, size, address, port = (os.environ[name] for name in names)
    return *_meet(address, port, rank, size), (address, int(port))


@cache
def _meet(address: str, port: str, rank: str, size: str) -> tuple[Store, int, int]:
    """Return the one store of this process, for all its joins.

    Were it opened anew for each, a quick worker would reach the last one's store while the leader closes it.
    """
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store, int(rank), int(size)
