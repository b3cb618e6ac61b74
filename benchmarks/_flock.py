"""The workers of one elastic training, as a launcher would hold them, and what was done to each of them when.

`paceline.launcher.faults` can be played on it. Times are unix seconds, as in the run's log.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from _smoke import smoking
from nursery import Nursery, Worker, elastic_variables, end_all

from paceline.errors import FLEET_FAILED
from paceline.launcher.roster import OwnRoster
from paceline.launcher.supervise import loopback

RESTART_S = 0.5
"""After a worker could not go on with the fleet (it was frozen at the wrong moment), it is started again."""
EXCUSED = ("it enters anew", "the run has ended")
"""How such a worker ends, and one that came too late."""
KILLED = "was killed by signal 9 (SIGKILL)"


@dataclass
class Life:
    """One worker process."""

    slot: int
    worker: Worker
    diary: Path
    err: Path
    replica: Path
    stops: list[tuple[float, float]] = field(default_factory=list)
    """When it stood still, from and until."""
    ended: float | None = None
    code: int | None = None
    struck: bool = False
    """Whether its end was wanted."""

    @property
    def notes(self) -> list[dict[str, Any]]:
        if not self.diary.exists():
            return []
        lines = self.diary.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may cut the last one off

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What it noted of its steps."""
        return [note for note in self.notes if note["what"] == "step"]

    @property
    def ready(self) -> float | None:
        """When it was set up and asked to be in."""
        return next((float(note["t"]) for note in self.notes if note["what"] == "ready"), None)

    @property
    def frozen(self) -> bool:
        return bool(self.stops) and self.stops[-1][1] > time.time()

    @property
    def words(self) -> str:
        return self.err.read_text(errors="replace") if self.err.exists() else ""


class Failed(Exception):
    """A worker crashed, or the training does not end."""


@cache
def nursery() -> Nursery:
    return Nursery(Path(__file__).parent, fork=smoking())


class Flock:
    """Use as a context manager: no worker survives it."""

    def __init__(
        self,
        folder: Path,
        *,
        call: str,
        pace: str,
        machines: str,
        sample_ms: float,
        minimum: int,
        maximum: int,
        label: str = "",
    ) -> None:
        self.folder, self.maximum, self._call, self._label = folder, maximum, call, label
        nursery().ask()  # waits until it has imported everything
        folder.mkdir(parents=True)
        self.stop, self.run_dir = folder / "stop", folder / "run"
        self._order = {"pace": pace, "stop": str(self.stop)}
        self._roster = OwnRoster(minimum=minimum, maximum=maximum, token=secrets.token_hex(8))
        self._settings = {
            "PACELINE_EMULATE": machines,
            "PACELINE_SAMPLE_MS": f"{sample_ms:g}",
            **({"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}),
        }
        self.lives: list[Life] = []
        self._now: dict[int, Life] = {}
        self._leaving: list[tuple[float, Life]] = []
        self._due: dict[int, float] = {}
        self.restarts = 0
        self._beginning, self._failure = True, ""
        self._began = time.time()

    def __enter__(self) -> Flock:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(life.worker for life in self._running)
        self._roster.close()

    # -- what faults are played on (paceline.launcher.faults.Workers) -------------------------------------------------

    @property
    def living(self) -> Sequence[int]:
        return sorted(slot for slot, life in self._now.items() if life.code is None and not life.struck)

    @property
    def inside(self) -> frozenset[int]:
        return self._roster.inside & frozenset(self.living)

    def kill(self, number: int, *, returns: bool) -> None:
        life = self._now[number]
        life.struck = True
        self._signal(life, signal.SIGKILL)
        while life.code is None:  # it is gone in a moment, and a launcher would hear of it at once
            self._reap(life)
        if returns:
            self._due[number] = time.time() + RESTART_S

    def freeze(self, number: int, *, seconds: float) -> None:
        life = self._now[number]
        self._signal(life, signal.SIGSTOP)
        now = time.time()
        life.stops.append((now, now + seconds))

    def leave(self, number: int, *, notice_s: float | None = None) -> None:
        life = self._now[number]
        life.struck = True
        self._signal(life, signal.SIGTERM)
        self._leaving.append((time.time() + (notice_s or 30.0), life))

    def add(self, *, new: bool) -> int | None:
        taken = {*self.living, *self._due, *(life.slot for life in self._running)}
        if len(taken) >= self.maximum:
            return None
        free = [slot for slot in self._now if slot not in taken]
        number = min(free) if free and not new else len(self._now)
        self.start(number)
        return number

    def note(self, text: str) -> None:
        size = len(self.living)
        print(
            f"  {self._label} {time.time() - self._began:6.1f} s  {size} workers  {text}", file=sys.stderr, flush=True
        )

    # -- their lives -------------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """A process for this slot; the first generation waits for those before the first `tick`."""
        self._roster.started(number, first=self._beginning)
        diary, err, replica = (
            self.folder / f"{kind}.{number}.{len(self.lives)}" for kind in ("diary", "err", "replica")
        )
        order = {**self._order, "diary": str(diary), "replica": str(replica)}
        told = elastic_variables(number, run_dir=self.run_dir, address=self._roster.address, token=self._roster.token)
        env = {**self._settings, **told}
        self._now[number] = Life(number, self._begin(order, env, err), diary, err, replica)
        self.lives.append(self._now[number])

    def _begin(self, order: dict[str, str], env: dict[str, str], err: Path) -> Worker:
        return nursery().start(self._call, order, env=env, out=err, err=err, quick=True)

    def tick(self) -> None:
        """See who has ended, and do what is due. Raises Failed when somebody ended badly, by nobody's will."""
        self._beginning = False
        now = time.time()
        for life in self._running:
            if life.stops and not life.frozen and _stopped(life.worker.pid):
                self._signal(life, signal.SIGCONT)
                life.stops[-1] = (life.stops[-1][0], now)
            self._reap(life)
        for due, life in [entry for entry in self._leaving if entry[0] <= now]:
            self._leaving.remove((due, life))
            self._signal(life, signal.SIGKILL)
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            if not self._roster.finished:
                self.start(number)
        if self._failure:
            raise Failed(self._failure)

    def let_join(self, joiners: int, *, first: int, calm: int, after: int, within_s: float) -> float:
        """Start ``first`` workers, let ``joiners`` join them after ``calm`` steps, and end ``after`` steps of all.

        Returns the time at which the joiners were started; raises SystemExit when the steps take longer.
        """
        for slot in range(first):
            self.start(slot)
        self._await_steps(calm, workers=first, within_s=within_s)
        began = time.time()
        for _ in range(joiners):
            self.add(new=True)
        self._await_steps(after, workers=first + joiners, within_s=within_s)
        self.end(within_s=60.0)
        return began

    def _await_steps(self, steps: int, *, workers: int, within_s: float) -> None:
        until = time.time() + within_s
        while sum(note["workers"] == workers for note in self.lives[0].steps) < steps:
            self.tick()
            if time.time() > until:
                raise SystemExit(f"no {steps} steps with {workers} workers within {within_s:.0f} s")
            time.sleep(0.05)

    def end(self, *, within_s: float) -> None:
        """Ask the training to end after its epoch, and see that it does."""
        self.stop.touch()
        until = time.time() + within_s
        while self._running:
            self.tick()
            if time.time() > until:
                raise Failed(f"the training does not end:\n{self._where_they_hang()}")
            time.sleep(0.02)

    def _where_they_hang(self) -> str:
        stuck = self._running
        for life in stuck:
            self._signal(life, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"worker {life.slot}: {life.words[-4000:]}" for life in stuck)

    @property
    def _running(self) -> list[Life]:
        return [life for life in self._now.values() if life.code is None]

    def _reap(self, life: Life) -> None:
        life.code = life.worker.poll()
        if life.code is None:
            return
        life.ended = time.time()
        self._roster.died(life.slot, KILLED if life.code == -signal.SIGKILL else f"ended with code {life.code}")
        if life.code == 0 or life.struck:
            return
        if life.code != FLEET_FAILED or not any(text in life.words for text in EXCUSED):
            self._failure = self._failure or f"worker {life.slot} ended with code {life.code}:\n{life.words[-4000:]}"
        elif not self._roster.finished:
            self.restarts += 1
            self._due[life.slot] = time.time() + RESTART_S

    def _signal(self, life: Life, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(life.worker.pid, number)


def _stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def left_behind(lives: Sequence[Life]) -> int:
    """Processes that still run in the sessions of workers that have ended."""
    sessions, found = {life.worker.pid for life in lives}, 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            if entry.name.isdigit():
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                found += int(session) in sessions and state != "Z"
    return found
