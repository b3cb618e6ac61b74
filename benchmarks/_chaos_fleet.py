"""The processes of one run of chaos.py, as a launcher would hold them, and its roster."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from _chaos_program import MOST_LIVING, SLOTS, Program
from nursery import Nursery, Worker, elastic_variables

from paceline.errors import FLEET_FAILED, describe_exit
from paceline.launcher.process_group import FAIL_S, FOLLOW_S, outcome
from paceline.launcher.supervise import loopback
from paceline.roster import RosterServer

RESTART_S = 0.3
"""Seconds from an exit with 75 to the restart."""
MOST_RESTARTS = 40
"""More exits with 75 than this in one run are no way to go on."""
SETTLED_S = 0.7
"""Seconds after a fault from which a step shows that the worker is in the fleet again."""
LATE_S = 1.0
"""A worker whose last step is older than the newest one's by this may have been done without."""
BIND_S = 10.0


@dataclass(eq=False)
class Life:
    """One start of a worker: one process, or those of its group, the head first."""

    slot: int
    processes: list[Worker]
    files: list[str]
    """Beginnings of the names of each process's files."""
    first: bool
    """Whether it was started at the run's beginning."""
    struck: set[str] = field(default_factory=set)
    """Kinds of faults that hit it."""
    calm_from: float = 0.0
    """When its last fault was over, in unix seconds."""
    frozen: dict[int, float] = field(default_factory=dict)
    """Stopped processes, and when each goes on."""
    ended: list[tuple[int, int]] = field(default_factory=list)
    """Processes that have ended, as (shard, exit code), in this order."""
    until: float = float("inf")
    """When those of its processes that still run are killed."""
    back_s: float | None = None
    """Seconds after which its slot is started again."""
    code: int | None = None

    @property
    def progress(self) -> float | None:
        """When it made its last step; None before the first one."""
        with suppress(OSError):
            return Path(self.files[0] + ".progress").stat().st_mtime
        return None

    @property
    def running(self) -> list[Worker]:
        """Processes that have not ended."""
        gone = dict(self.ended)
        return [worker for shard, worker in enumerate(self.processes) if shard not in gone]

    @property
    def value(self) -> dict[str, Any] | None:
        """What it left as its result."""
        file = Path(self.files[0] + ".value")
        return dict(json.loads(file.read_text())) if file.exists() else None

    def words(self) -> str:
        """Return what its processes wrote to stderr."""
        texts = [Path(name + ".err") for name in self.files]
        return "\n".join(text.read_text(errors="replace") for text in texts if text.exists())

    def strike(self, kind: str, until: float) -> None:
        """Note that a fault hits it, which is over at ``until``."""
        self.struck.add(kind)
        self.calm_from = max(self.calm_from, until)


class Fleet:
    """Workers and roster of one run."""

    def __init__(self, program: Program, folder: Path, nursery: Nursery) -> None:
        self.program, self.folder, self._nursery = program, folder, nursery
        self._token, self._port = secrets.token_hex(8), 0
        self.lives: list[Life] = []
        self.restarts = 0
        self._due: list[tuple[float, int]] = []
        self._roster_back: float | None = None
        self._unreported: list[tuple[str, str]] = []
        self._finished = False
        self.roster: RosterServer | None = None
        self._open_roster(expect=program.workers)
        for slot in range(program.workers):
            self.start(slot, first=True)

    # -- the roster ----------------------------------------------------------------------------------------------------

    def _open_roster(self, *, expect: int) -> None:
        until = time.monotonic() + BIND_S
        sizes = {"minimum": 1, "maximum": SLOTS}
        while True:
            try:
                self.roster = RosterServer(
                    **sizes, token=self._token, port=self._port, expect=expect, state=self.folder / "roster.json"
                )
                break
            except OSError:  # without a network of its own, something else may have the port for a moment
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self.roster.start()
        self._port = self.roster.port
        for name, how in self._unreported:
            self.roster.died(name, how)
        self._unreported.clear()

    def close_roster(self, *, away_s: float) -> None:
        """Stop the roster; `tick` starts it again from its file."""
        if self.roster is not None:
            self._finished = self.finished
            self.roster.close()
        self.roster, self._roster_back = None, time.time() + away_s

    @property
    def finished(self) -> bool:
        """Whether the training is over, so that nobody is started again."""
        known = self.roster is not None and bool(self.roster.snapshot()["finished"])
        return self._finished or known or any(life.code == 0 for life in self.lives)

    @property
    def store_port(self) -> int | None:
        """Port of the store beside the roster; None while there is none."""
        return int(self.roster._store.port) if self.roster is not None else None

    @property
    def roster_port(self) -> int:
        """Port of the roster, which it keeps."""
        return self._port

    def _report(self, life: Life, how: str) -> None:
        if not self.program.reported:
            return
        name = f"{socket.gethostname()}/{life.slot}"
        if self.roster is None:
            self._unreported.append((name, how))
        else:
            self.roster.died(name, how)

    # -- workers -------------------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Life]:
        """Lives that have not ended, in the order of their starts."""
        return [life for life in self.lives if life.code is None]

    def holders(self) -> list[Life]:
        """Return those that certainly hold the training's state: they make steps, and no fault is on its way.

        Before anybody's first step all who were started at the beginning count, whom no fault has hit.
        """
        steps = {id(life): life.progress for life in self.living}
        newest = max((step for step in (life.progress for life in self.lives) if step is not None), default=None)
        calm = [life for life in self.living if not life.frozen and life.back_s is None]
        if newest is None:
            return [life for life in calm if life.first and not life.struck]
        made = [(life, steps[id(life)]) for life in calm]
        return [
            life
            for life, step in made
            if step is not None
            and step > newest - LATE_S
            and (not life.struck or step > life.calm_from + SETTLED_S)
            and "leave" not in life.struck
        ]

    def free_slot(self) -> int | None:
        """Return the slot of the next newcomer; None while enough workers live or are about to."""
        taken = {life.slot for life in self.living} | {slot for _, slot in self._due}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        return free[0] if free and len(taken) < MOST_LIVING else None

    def start(self, slot: int, *, first: bool = False) -> None:
        """Start a worker in this slot."""
        number, shards = len(self.lives), self.program.shards
        own = elastic_variables(slot, run_dir=self.folder / "run", address=self._address, token=self._token)
        own |= {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}
        meeting = self.folder / f"group.{number}"
        meeting.mkdir()
        life = Life(slot, [], [], first)
        for shard in range(shards):
            files = str(self.folder / f"worker.{slot}.{number}.{shard}")
            group = {"PACELINE_PROCS_PER_WORKER": str(shards), "PACELINE_SHARD": str(shard)}
            group["PACELINE_GROUP_DIR"] = str(meeting)
            env = own | (group | {"PACELINE_DEVICE": "cpu"} if shards > 1 else {})
            order = {**self.program.as_order(), "folder": str(self.folder), "files": files}
            err = Path(files + ".err")
            life.processes.append(
                self._nursery.start("_chaos_worker:train", order, env=env, out=err, err=err, quick=True)
            )
            life.files.append(files)
        self.lives.append(life)

    @property
    def _address(self) -> str:
        if self.roster is not None:
            self._known_address = self.roster.address
        return self._known_address

    def tick(self) -> bool:
        """Do what is due, and notice who has ended; return whether anything runs or is about to."""
        now = time.time()
        if self._roster_back is not None and now >= self._roster_back:
            self._roster_back = None
            self._open_roster(expect=0)
        for life in self.living:
            self._thaw(life, now)
            self._reap(life, now)
        if self.finished:
            self._due.clear()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self.start(due[1])
        return bool(self.living or self._due)

    def _thaw(self, life: Life, now: float) -> None:
        for pid in [pid for pid, until in life.frozen.items() if until <= now]:
            del life.frozen[pid]
            send(pid, signal.SIGCONT)

    def _reap(self, life: Life, now: float) -> None:
        gone = dict(life.ended)
        for shard, worker in enumerate(life.processes):
            if shard not in gone and (code := worker.poll()) is not None:
                life.ended.append((shard, code))
                life.until = min(life.until, now + _patience(dict(life.ended), code))
        if life.running and now >= life.until:
            for worker in life.running:
                worker.kill_group()
                worker.wait()
            life.until = float("inf")
        elif life.running:
            return
        life.code = outcome(life.ended)
        life.frozen.clear()
        self._report(life, describe_exit(life.code))
        self._plan_restart(life, now)

    def _plan_restart(self, life: Life, now: float) -> None:
        delay = life.back_s
        if life.code == FLEET_FAILED or (life.code == -signal.SIGABRT and "cut peer" in life.struck):
            delay = RESTART_S
            self.restarts += 1
        if delay is not None and self.restarts <= MOST_RESTARTS:
            self._due.append((now + delay, life.slot))

    def pids(self) -> Iterator[tuple[Life, int]]:
        """Yield every process that runs, with its life."""
        for life in self.living:
            for worker in life.running:
                yield life, worker.pid

    def close(self) -> None:
        """End whatever is left."""
        for life in self.living:
            for worker in life.running:
                worker.kill_group()
                worker.wait()
        if self.roster is not None:
            self.roster.close()


def _patience(ended: dict[int, int], code: int) -> float:
    """Return the seconds that a group's other processes have after one ended, as the launcher gives them."""
    if ended.get(0) == 0:
        return FOLLOW_S
    return float("inf") if code == 0 else 0.0 if code == -signal.SIGKILL else FAIL_S


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
