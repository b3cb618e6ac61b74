"""The fleet of one trial of hunted.py: the tests' own, with one bound for all its waits, and a verdict on its end."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "benchmarks", ROOT / "harness", ROOT / "tests", ROOT / "tests" / "fleet"]
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

from _chaos_sockets import connections_of, cut  # noqa: E402
from _chaos_verdict import PYTHON_ERROR, dump, last_line  # noqa: E402
from crew import Outcome  # noqa: E402
from flock import Flock, sound  # noqa: E402
from nursery import Nursery  # noqa: E402

from paceline.errors import FLEET_FAILED, describe_exit  # noqa: E402
from paceline.launcher.supervise import loopback  # noqa: E402
from ports import own_port  # noqa: E402

TICK_S = 0.01
SHOWN = 3000
"""Letters of a worker's last words that a verdict has."""


class Hang(Exception):
    """Something has not come within the trial's time."""


class Crash(Exception):
    """A worker ended in a way that no fault explains."""


class Unsound(Exception):
    """The ledger or the replicas are wrong."""


class Missed(Exception):
    """The fault did not come about."""


@dataclass
class Stage:
    """What a case plays with."""

    folder: Path
    nursery: Nursery
    dice: random.Random
    bound_s: float
    """Seconds that the trial may take."""
    bug: str = ""
    """A mended bug that is put back in all workers."""

    def fleet(self, case: str, size: int, args: Any, *, fixed: bool = False) -> Hunted:
        """Start a fleet whose workers run ``case``: a function of `_hunted_worker` or of the tests' case files.

        ``fixed``: of fixed size, without a roster.
        """
        return Hunted(self, case, size, args, port=own_port() if fixed else 0)


class Hunted(Flock):
    """Workers that meet a hunted fault. Use as a context manager: nothing survives it, and a hang leaves all stacks."""

    def __init__(self, stage: Stage, case: str, size: int, args: Any, *, port: int) -> None:
        self._stage, self._port, self._size = stage, port, size
        self._until = time.monotonic() + stage.bound_s
        super().__init__(case, size, stage.folder, args=args)

    def start(self, slot: int, *, expected: bool = False, **env: str) -> None:
        out, err, value, stacks = (self.folder / f"{name}.{slot}" for name in ("out", "err", "value", "stacks"))
        value.unlink(missing_ok=True)
        order = {"case": self.case, "args": self.args, "bug": self._stage.bug, "folder": str(self.folder)}
        order |= {"value": str(value), "stacks": str(stacks)}
        env = {**self._variables(slot), "PACELINE_DEVICE": "cpu", **env}
        env |= {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}
        self.workers[slot] = self._stage.nursery.start(
            "_hunted_worker:work", order, env=env, out=out, err=err, quick=True
        )

    def _variables(self, slot: int) -> dict[str, str]:
        if not self._port:
            return super()._variables(slot)
        place = {"RANK": slot, "LOCAL_RANK": slot, "WORLD_SIZE": self._size, "MASTER_PORT": self._port}
        fleet = {"MASTER_ADDR": "127.0.0.1", "PACELINE_RUN_DIR": str(self.folder / "run"), "PACELINE_WORKER": str(slot)}
        return fleet | {name: str(value) for name, value in place.items()}

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is Hang:
                dump(self.folder, [worker.pid for worker in self._running()], self.server)
        finally:
            super().__exit__(*error)

    def _running(self) -> list[Any]:
        return [worker for worker in self.workers.values() if worker.poll() is None]

    # -- waits -----------------------------------------------------------------------------------------------------

    def until(self, happened: Callable[[], Any], what: str) -> None:
        """Wait until something has happened.

        Raise Hang when the trial's time is over, and Missed when all workers have ended without it.
        """
        while not happened():
            if not self._running() and not happened():
                self.look_for_crashes()
                raise Missed(f"all workers ended before {what}")
            if time.monotonic() > self._until:
                raise Hang(f"{what} has not come in {self._stage.bound_s:.0f} s")
            time.sleep(TICK_S)

    def until_file(self, name: str) -> None:
        self.until((self.folder / name).exists, f"the file {name}")

    def until_step(self, step: int) -> None:
        self.until(lambda: any(record["step"] >= step for record in self.records()), f"step {step}")

    def until_members(self, what: str, are: Callable[[list[int]], bool]) -> None:
        """Wait until the members of the last step in the log are such."""
        self.until(lambda: (found := self.records()) and are(found[-1]["workers"]), what)

    def finish(self, *, reports: bool = False) -> dict[int, Outcome]:
        """Wait until all have ended. ``reports``: the roster is informed of deaths, as a launcher does."""
        dead = set[int]()

        def over() -> bool:
            gone = {slot: code for slot, worker in self.workers.items() if (code := worker.poll()) is not None}
            for slot in [slot for slot, code in gone.items() if reports and code and slot not in dead]:
                dead.add(slot)
                self.tell_death(slot)
            return len(gone) == len(self.workers)

        self.until(over, "the end of all workers")
        return self.outcomes()

    def outcomes(self) -> dict[int, Outcome]:
        return {slot: self.outcome(slot) for slot in self.workers}

    # -- faults ----------------------------------------------------------------------------------------------------

    def freeze_and_wake(self, slot: int, gone: Callable[[], Any], *, pause_s: float = 0.0) -> None:
        """Stop a worker until ``gone``, the fleet has gone on without it, and for ``pause_s`` more."""
        self.send(slot, signal.SIGSTOP)
        try:
            self.until(gone, f"a step without worker {slot}")
            time.sleep(pause_s)
        finally:
            with suppress(ProcessLookupError):
                self.send(slot, signal.SIGCONT)

    def is_back(self, slot: int) -> bool:
        """Return whether the last step in the log was made with this worker, or it has ended."""
        found = self.records()
        return self.workers[slot].poll() is not None or (bool(found) and slot in found[-1]["workers"])

    def goes_on_without(self, slot: int) -> Callable[[], bool]:
        """Return whether the last step in the log was made without this worker, which was a member."""
        return lambda: bool(found := self.records()) and slot not in found[-1]["workers"]

    def cut_store(self, slot: int) -> int:
        """Cut a worker's connections to the roster's store; return how many there were."""
        ends = [one for one in connections_of(self.workers[slot].pid) if one.remote[1] == self.server._store.port]
        for end in ends:
            cut(end)
        return len(ends)

    # -- the verdict -----------------------------------------------------------------------------------------------

    def look_for_crashes(self, *, killed: Iterable[int] = (), dropped: Iterable[int] = ()) -> None:
        """Raise Crash unless each worker has ended as it may: a dropped one may ask to be started again."""
        for slot, one in self.outcomes().items():
            allowed = {0} | ({-signal.SIGKILL} if slot in killed else set())
            allowed |= {FLEET_FAILED} if slot in dropped else set()
            found = PYTHON_ERROR.search(one.err)
            if one.code not in allowed or found:
                why = last_line(one.err[found.start() :]) if found else ""
                raise Crash(f"worker {slot} {describe_exit(one.code)} {why}\n{one.err[-SHOWN:]}")

    def judge(
        self,
        *,
        length: int,
        epochs: int | None,
        killed: Iterable[int] = (),
        dropped: Iterable[int] = (),
        happened: bool = True,
        whole: bool = True,
    ) -> None:
        """Raise what is wrong with a trial whose workers have all ended; at last Missed, unless the fault came about.

        ``epochs`` of ``length`` samples each are in the ledger; None: there is no ledger. ``happened``: whether the
        fault did, as far as its case can tell. Who is ``dropped`` may come back when all is over. ``whole``: whether
        the log must have its end.
        """
        outcomes = self.outcomes()
        self.look_for_crashes(killed=killed, dropped=dropped)
        well = {slot for slot, one in outcomes.items() if one.code == 0 and one.value is not None}
        if silent := {slot for slot, one in outcomes.items() if one.code == 0} - well - {*dropped}:
            raise Crash(f"workers {sorted(silent)} ended without a result")
        if not well:
            raise Crash("nobody ended well")
        try:
            sound(self.folder, outcomes, ended=well, epochs=epochs, length=length, whole=whole)
            for slot in sorted(well):
                counted = outcomes[slot].value.get("counted") or []
                assert all(count == 1 for epoch in counted for count in epoch), "the model's own ledger is wrong"
        except AssertionError as error:
            raise Unsound(str(error)[-SHOWN:]) from None
        alive = [slot for slot in killed if outcomes[slot].code != -signal.SIGKILL]
        if alive or not happened:
            raise Missed(f"worker {alive[0]} was not killed" if alive else "the fault did not come about")


class Jitter(threading.Thread):
    """Stops a worker for a moment, now and then, as other programs on too few cores do. Use as a context manager."""

    MEAN_S = 0.05
    LONGS = (0.001, 0.004, 0.015, 0.05, 0.2)

    def __init__(self, fleet: Hunted, dice: random.Random, *, often: bool) -> None:
        """``often``: False stops nobody."""
        super().__init__(daemon=True)
        self._pids, self._dice = (
            [worker.pid for worker in fleet.workers.values()] if often else [],
            random.Random(dice.random()),
        )
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._dice.expovariate(1 / self.MEAN_S)):
            if not self._pids:
                return
            pid = self._dice.choice(self._pids)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._dice.choice(self.LONGS))
                os.kill(pid, signal.SIGCONT)

    def __enter__(self) -> Jitter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
