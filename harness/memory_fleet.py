"""Whole elastic fleets inside one process, under a scheduler: real rosters, transports and training loops, with every
thread, every wait, the time and the network in the hands of a test.

A `World` holds the emulated processes: a roster, workers, and a launcher that starts those again that should be. Each
worker is a handful of threads that belong to its process; a fault takes all of them at any point of the schedule.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from memory_connector import MemoryConnector
from memory_engine import MemoryNetwork
from memory_roster import MemoryDoor, MemoryRosterConnection, MemoryStoreHost
from memory_roster import MemoryNetwork as RosterNetwork
from memory_store import MemoryServer
from scheduler import Hang, Reaped, Scheduler, Task

from paceline import concurrency
from paceline.checkpoint import parts
from paceline.errors import FLEET_FAILED, FleetError
from paceline.fleet import Fleet
from paceline.gradients import Gradients
from paceline.roster import RosterClient, RosterServer
from paceline.roster.liveness import ENDED, ProcessState
from paceline.training import join as joining
from paceline.training import untracked
from paceline.transport import Elastic
from paceline.transport.elastic import handover
from paceline.worker_exit import Leave

KILLED, CRASHED = -9, 1
ROSTER, LAUNCHER = "roster", "launcher"
STORE = ("memory", 2)
MOST_FROZEN_S, DROPPED_LOOK_S = 15.0, 0.02
"""The longest wait of a frozen worker to be dropped, and the time between two looks at whether it was."""
RESTARTS = 4
"""How often a worker that ended with 75 is started again."""


@dataclass
class Outcome:
    """How a process ended: its exit code, what its program returned, and the text of an error."""

    code: int
    value: Any = None
    error: str = ""


@dataclass
class Process:
    """One life of a worker."""

    slot: int
    life: int
    transport: Elastic | None = None
    connection: MemoryRosterConnection | None = None
    outcome: Outcome | None = None
    main: Task | None = None
    """The thread that runs the program, while it does."""

    @property
    def key(self) -> str:
        return f"worker {self.slot}.{self.life}"

    @property
    def name(self) -> str:
        return f"here/{self.slot}"


@dataclass
class Verdict:
    """What became of a run."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    points: int = 0
    virtual_s: float = 0.0
    log: list[str] = field(default_factory=list)
    """What was done to the fleet, and what the workers logged."""


class World:
    """The emulated computers of one run.

    Args:
        scheduler: runs everything.
        program: what each worker runs: takes `join`, which makes its fleet, and returns plain data.
        size: workers at the beginning.
        minimum: workers without which the fleet waits.
    """

    def __init__(
        self, scheduler: Scheduler, program: Callable[..., Any], *, size: int, minimum: int = 1, folder: Path
    ) -> None:
        self.scheduler, self.program, self.size, self.minimum, self.folder = scheduler, program, size, minimum, folder
        self.processes: dict[str, Process] = {}
        self.newest: dict[int, Process] = {}
        self.pending = 0
        """Things that are yet to happen: the run is not over before."""
        self.living = 0
        """Workers that have not ended."""
        self.log: list[str] = []
        self.crashes: list[str] = []
        self.restarting = False
        self.network = MemoryNetwork()
        self._parts: dict[Hashable, int] = {}
        self._after_received: dict[tuple[Hashable, int], Callable[[], None]] = {}

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Run the fleet to its end."""
        verdict = Verdict(log=self.log)
        scheduler = self.scheduler
        scheduler.end_process = self._end_process  # type: ignore[method-assign]
        with ExitStack() as stack:
            stack.enter_context(_without_collections())
            stack.enter_context(concurrency.use(scheduler))
            stack.enter_context(mock.patch.object(parts, "LEAST", 16))  # a newcomer's state is in several parts,
            stack.enter_context(mock.patch.object(handover, "PIECE", 1 << 12))  # and one of them in several pieces
            stack.enter_context(mock.patch.object(joining, "_make_transport", self._make_transport))
            stack.enter_context(mock.patch.object(gc, "get_referrers", _nothing))  # slow: it looks for scalers
            stack.enter_context(mock.patch.object(untracked, "named_in_script", _nothing))  # so does this for modules
            stack.enter_context(mock.patch.object(atexit, "register", _nothing))  # a process ends here, not this one
            stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # it would hold the last errors
            stack.enter_context(self._without_hooks())
            stack.enter_context(self._logging())
            scheduler.spawn(self._boot, name="boot", process=ROSTER)
            self.pending = 1
            try:
                scheduler.run(self._over)
            except Hang as hang:
                verdict.problems.append(f"HANG {hang}")
        verdict.points, verdict.virtual_s = scheduler.points, scheduler.now - 1000.0
        verdict.outcomes = {slot: one.outcome for slot, one in self.newest.items() if one.outcome is not None}
        verdict.problems += self.crashes
        failed = [task for task in scheduler.tasks if task.error is not None]
        verdict.problems += [f"THREAD {task.process} {task.name}: {_text(task.error)}" for task in failed]
        verdict.problems += [f"ENGINE {fault}" for fault in self.network.faults]
        return verdict

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Take the hooks of workers that were killed off their models: with these they form a cycle that torch hides
        from the garbage collector."""
        made: list[Gradients] = []
        real = Gradients.__init__

        def noted(gradients: Gradients, *args: Any, **options: Any) -> None:
            made.append(gradients)
            real(gradients, *args, **options)

        with mock.patch.object(Gradients, "__init__", noted):
            yield
        for gradients in made:
            gradients.detach()

    def _over(self) -> bool:
        return self.pending == 0 and self.living == 0

    def _boot(self) -> None:
        self.network = MemoryNetwork(point=self.scheduler.point)
        self.network.ended = self._received
        self.rosters = RosterNetwork()
        self.store = MemoryServer(self.network, STORE)
        self.server = self._host(expect=self.size)
        for slot in range(self.size):
            self.start(slot)
        self.pending -= 1

    def _host(self, *, expect: int) -> RosterServer:
        server = RosterServer(
            minimum=self.minimum,
            maximum=max(8, self.size + 2),
            token="token",
            expect=expect,
            door=MemoryDoor(self.rosters),
            store=MemoryStoreHost(STORE[1]),
            state=self.folder / "roster.json",
        )
        server.start()
        return server

    def _logging(self) -> Any:
        world = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                with suppress(AssertionError):
                    world.note(f"{world.scheduler.current().process}: {record.getMessage()}")

        stack, logger, handler = ExitStack(), logging.getLogger("paceline"), Handler()
        handler.createLock = lambda: None  # type: ignore[method-assign]
        handler.lock = None
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        stack.callback(logger._cache.clear)  # type: ignore[attr-defined]
        stack.enter_context(mock.patch.object(logger, "level", logging.INFO))  # setLevel looks at every logger of torch
        stack.enter_context(mock.patch.object(logger, "propagate", False))
        logger._cache.clear()  # type: ignore[attr-defined]
        return stack

    def note(self, text: str) -> None:
        self.log.append(f"{self.scheduler.now - 1000.0:9.4f} {self.scheduler.points:6d} {text}")

    # -- workers ---------------------------------------------------------------------------------------------------

    def start(self, slot: int) -> None:
        """Start a worker, or start it again."""
        life = self.newest[slot].life + 1 if slot in self.newest else 0
        process = self.newest[slot] = Process(slot, life)
        self.processes[process.key] = process
        self.living += 1
        self.scheduler.spawn(partial(self._work, process), name="user", process=process.key)

    def _work(self, process: Process) -> None:
        outcome = Outcome(0)
        try:
            process.main = self.scheduler.current()
            outcome.value = self.program(self, process.slot)
        except Reaped:
            raise
        except SystemExit as exit:
            outcome.code = exit.code if isinstance(exit.code, int) else 0
        except FleetError as error:
            outcome = Outcome(FLEET_FAILED, error=str(error))
        except BaseException as error:
            outcome = Outcome(CRASHED, error=_text(error))
            self.crashes.append(f"CRASH {process.key}: {_text(error)}")
        finally:
            if process.main is not None:
                process.main.raises = process.main = None
        self._end(process, outcome)
        raise Reaped

    def _make_transport(self, *_: Any) -> Elastic:
        process = self.processes[str(self.scheduler.current().process)]
        shake = partial(self._shake_hands, process)
        client = partial(
            RosterClient, self.server.address, token="token", name=process.name, facts=FACTS, shake_hands=shake
        )
        connector = partial(MemoryConnector, network=self.network, process=process.key)
        process.transport = Elastic(torch.device("cpu"), cpu_engine=True, join=client, connector=connector)
        return process.transport

    def _shake_hands(self, process: Process, *args: Any, **options: Any) -> MemoryRosterConnection:
        def opened(connection: MemoryRosterConnection) -> None:
            process.connection = connection

        return self.rosters.shake_hands(*args, state=partial(self._state, process), opened=opened, **options)

    def _state(self, process: Process) -> ProcessState:
        if process.key in self.scheduler.dead:
            return ENDED
        return ProcessState(stopped=process.key in self.scheduler.frozen)

    def _end_process(self, code: int) -> None:
        process = self.processes[str(self.scheduler.current().process)]
        self._end(process, Outcome(code, error="ended by its watchdog"))
        raise Reaped

    def _end(self, process: Process, outcome: Outcome) -> None:
        """The process is gone: its connections close, and a launcher sees it and starts it again if it should."""
        if process.outcome is not None:
            return
        process.outcome = outcome
        self.living -= 1
        self.note(f"{process.key} ended with {outcome.code} {outcome.error.splitlines()[-1] if outcome.error else ''}")
        with self.scheduler.atomic():
            self.scheduler.kill(process.key)
            self.scheduler.thaw(process.key)
            if process.connection is not None:
                process.connection.close()
            self.network.kill(process.key)
        again = outcome.code == FLEET_FAILED and process.life < RESTARTS
        if again or outcome.code != 0:
            self.later(0.05, partial(self._seen_to_end, process, again))

    def _seen_to_end(self, process: Process, again: bool) -> None:
        self.server.died(process.name, f"ended with {process.outcome.code if process.outcome else 0}")
        if again:
            self.server.expect(1)
            self.start(process.slot)

    def after_received(self, process: Hashable, number: int, happens: Callable[[], None]) -> None:
        """Let something happen as soon as this process has so many results of sums and messages."""
        self._after_received[process, number] = happens

    def _received(self, process: Hashable) -> None:
        number = self._parts[process] = self._parts.get(process, 0) + 1
        if (happens := self._after_received.get((process, number))) is not None:
            self.scheduler.at_point(self.scheduler.points, happens)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Let the launcher do something after a while."""
        self.pending += 1

        def do() -> None:
            concurrency.sleep(seconds)
            try:
                act()
            finally:
                self.pending -= 1

        self.scheduler.spawn(do, name="launcher", process=LAUNCHER)

    def alive(self, slot: int) -> Process | None:
        """The life of this worker that runs, if one does."""
        process = self.newest.get(slot)
        return process if process is not None and process.outcome is None else None

    # -- faults: each at a point of the schedule ---------------------------------------------------------------------

    def kill(self, slot: int, *, again: bool, told: bool = True) -> None:
        """End a worker as kill -9 does; ``again``: it is started anew; ``told``: its launcher tells the roster."""
        process = self.alive(slot)
        if process is None or not self._has_server():
            return
        self.note(f"KILL {process.key}")
        process.outcome = Outcome(KILLED)
        self.living -= 1
        self.scheduler.kill(process.key)
        self.scheduler.thaw(process.key)
        if process.connection is not None:
            process.connection.close()
        self.network.kill(process.key)
        if again or told or process.connection is None:  # of one that never came only its launcher knows
            self.later(self.scheduler.rng.choice((0.0, 0.05, 1.0)), partial(self._seen_to_end, process, again))

    def freeze(self, slot: int, seconds: float, *, dropped: bool = False) -> None:
        """Stop a worker, as SIGSTOP does. It goes on after ``seconds``; with ``dropped``, ``seconds`` after the others
        have gone on without it."""
        process = self.alive(slot)
        if process is None or process.key in self.scheduler.frozen:
            return
        self.note(f"FREEZE {process.key} for {seconds} s{' after it is dropped' if dropped else ''}")
        self.scheduler.freeze(process.key)
        self.pending += 1
        until = self.scheduler.now + MOST_FROZEN_S

        def thaw() -> None:
            self.note(f"THAW {process.key}")
            self.scheduler.thaw(process.key)
            self.pending -= 1

        def look() -> None:
            over = self._is_dropped(process) or self.scheduler.now > until
            self.scheduler.after(seconds if over else DROPPED_LOOK_S, thaw if over else look)

        if dropped:
            look()
        else:
            self.scheduler.after(seconds, thaw)

    def _is_dropped(self, process: Process) -> bool:
        """Whether a later group stands without this worker."""
        mine = process.transport
        others = [one.transport.reform.now for one in self.newest.values() if one.transport is not None]
        return mine is not None and any(
            now.number > mine.reform.number and mine.id not in now.workers for now in others if now
        )

    def ask_to_leave(self, slot: int) -> None:
        """SIGTERM, to a worker that has joined; one that is at rest leaves at once (`paceline.worker_exit`)."""
        process = self.alive(slot)
        if process is None or process.transport is None or process.transport.leaving or process.main is None:
            return
        self.note(f"SIGTERM {process.key}{' at rest' if process.transport.at_rest else ''}")
        process.transport.leaving = True
        if process.transport.at_rest:
            self.scheduler.interrupt(process.main, Leave())

    def interrupt(self, slot: int) -> None:
        """Ctrl-C, wherever the worker's program is."""
        process = self.alive(slot)
        if process is not None and process.main is not None:
            self.note(f"INTERRUPT {process.key}")
            self.scheduler.interrupt(process.main, KeyboardInterrupt())

    def join(self, slot: int) -> None:
        """A further worker comes."""
        if slot not in self.newest and self._has_server():
            self.note(f"JOIN {slot}")
            self.start(slot)

    def cut_roster(self, slot: int) -> None:
        process = self.alive(slot)
        if process is not None and process.connection is not None:
            self.note(f"CUT ROSTER {process.key}")
            process.connection.cut()

    def cut_store(self, slot: int) -> None:
        process = self.alive(slot)
        if process is not None and process.transport is not None:
            self.note(f"CUT STORE {process.key}")
            dice, connector = self.scheduler.rng, process.transport.reform.connector
            for store in dice.sample([connector.root, connector.signals_root], dice.choice((1, 2))):
                if store is not None:
                    store.cut()

    def cut_peers(self, slot: int, other: int) -> None:
        one, another = (process.transport if process else None for process in (self.alive(slot), self.alive(other)))
        if one is None or another is None or (now := one.reform.now) is None:
            return
        if one.id in now.workers and another.id in now.workers:
            self.note(f"CUT PEERS {slot} {other}")
            self.network.break_pair((*STORE, now.number), now.workers.index(one.id), now.workers.index(another.id))

    def wedge(self, slot: int) -> None:
        """The worker's next wait on a broken connection never returns."""
        process = self.alive(slot)
        if process is not None and process.transport is not None:
            engine = getattr(process.transport.group, "_engine", None)
            if engine is not None:
                self.note(f"WEDGE {process.key}")
                self.network.wedge(engine)

    def restart_roster(self, pause_s: float) -> None:
        """End the roster, and let another go on from its state.

        Once a run has ended, that one would begin another run, whose weights are none of this one's.
        """
        if not self._has_server() or self.restarting or self._has_ended():
            return
        self.restarting = True
        self.note("ROSTER RESTARTS")
        self.pending += 1

        def restart() -> None:
            self.server.close()
            self.store.stop()
            concurrency.sleep(pause_s)
            self.store.start()
            ended = self._has_ended()  # it heard of the end before it closed
            self.server = self._host(expect=0)
            self.server._rules.ended = ended
            self.note("ROSTER IS BACK")
            self.restarting = False
            self.pending -= 1

        self.scheduler.spawn(restart, name="restart", process=ROSTER)

    def _has_server(self) -> bool:
        return hasattr(self, "server")

    def _has_ended(self) -> bool:
        roster = self.server._rules.roster
        return roster.finishing and roster.last is not None and not roster.last.alive()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector out of the block: when it comes depends on what this process did before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _nothing(*_: Any) -> list[Any]:
    return []


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


FACTS = {"host": "here", "place": "here", "pid": 1, "device": "cpu", "cores": 1, "emulated": None}


def fleet_of(pace: Any, combine: Any, folder: Path) -> Fleet:
    """Join, as a script does under a launcher."""
    options: dict[str, Any] = {"device": "cpu", "seed": 0, "nonfinite": "stop", "comm_dtype": "float32", "name": "run"}
    return Fleet(joining.join_training(pace, combine, run_dir=folder / "run", quiet=True, **options))


class Folder:
    """A folder of its own for each run, in memory where that can be."""

    made = 0

    def __enter__(self) -> Path:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        Folder.made += 1
        self.path = Path(tempfile.mkdtemp(prefix="paceline-", dir=base))
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if Folder.made % 20 == 0:
            gc.collect()
