"""What is wrong with one run of chaos.py, and the stacks of all its processes where it hangs.

Its end is judged by: how every process ended, the sample ledger (in the run's log, and in the model where there is one
there), the replicas of those who ended well, and what is left of it.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from _chaos_fleet import MOST_RESTARTS, Fleet, Life, send
from _chaos_program import Program

from paceline.errors import FLEET_FAILED, describe_exit
from paceline.observe import read_log
from paceline.observe.analysis.audit import audit
from paceline.roster import RosterServer
from paceline.worker_exit import LEFT

PYTHON_ERROR = re.compile(r"^(\[rank\d+\]: )?Traceback \(most recent call last\):", re.MULTILINE)
ALLOWED = {"kill": {-signal.SIGKILL}, "leave": {LEFT, -signal.SIGTERM}, "cut peer": {-signal.SIGABRT}}
"""Exit codes that a fault explains, besides 0 and 75."""


@dataclass
class Verdict:
    """What was found in one run."""

    seed: int
    program: str
    faults: dict[str, int] = field(default_factory=dict)
    """How many of each kind have hit somebody."""
    hang: bool = False
    crashes: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    unequal: bool = False
    left: list[str] = field(default_factory=list)
    """Processes and temporary files that remained."""
    restarts: int = 0
    steps: int = 0
    ended: int = 0
    """Workers that ended well."""
    note: str = ""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.hang or self.crashes or self.lost or self.doubled or self.unequal or self.left)

    def __str__(self) -> str:
        parts = ["hangs"] * self.hang + [f"crash: {text.splitlines()[0]}" for text in self.crashes]
        parts += [f"{count} {name}" for name, count in (("lost", self.lost), ("doubled", self.doubled)) if count]
        parts += ["replicas unequal"] * self.unequal + [f"left: {', '.join(self.left)}"] * bool(self.left)
        return "; ".join(parts) or "sound"


def judge(fleet: Fleet, program: Program, verdict: Verdict) -> None:
    """Complete the verdict on a run that has ended, or hangs."""
    verdict.restarts = fleet.restarts
    well = [(life, value) for life in fleet.lives if life.code == 0 and (value := life.value) is not None]
    verdict.ended = len(well)
    verdict.crashes += [text for life in fleet.lives if (text := _crash(life))]
    if fleet.restarts > MOST_RESTARTS:
        verdict.crashes.append(f"{fleet.restarts} exits with {FLEET_FAILED}: the fleet does not go on")
    if verdict.hang:
        return
    if not well and not verdict.crashes:
        verdict.crashes.append("nobody ended well")
    verdict.left = [*_left_running(fleet), *_left_files(fleet.folder)]
    if not well:
        return
    newest = max(value["last"] for _, value in well)
    ended = [value for _, value in well if value["last"] == newest]
    behind = [life for life, value in well if 0 <= value["last"] < newest and not life.struck]
    verdict.unequal = len({value["replica"] for value in ended}) > 1 or bool(behind)
    _count(program, ended[0]["counted"], fleet.folder, verdict)


def _crash(life: Life) -> str:
    """Return how a worker ended, if no fault explains it."""
    words = life.words()
    allowed = {0, FLEET_FAILED}.union(*(ALLOWED.get(kind, set()) for kind in life.struck))
    named = f"worker {life.slot} ({Path(life.files[0]).name})"
    found = PYTHON_ERROR.search(words)
    error = f" ({last_line(words[found.start() :])})" if found else ""
    if life.code is not None and life.code not in allowed:
        return f"{named} {describe_exit(life.code)}{error}\n{words[-3000:]}"
    if found and not (len(life.files) > 1 and "kill" in life.struck):  # the rest of a group ends by an error
        return f"{named} wrote a traceback{error}\n{words[-3000:]}"
    return ""


def last_line(trace: str) -> str:
    """Return the error of a traceback, its first line that is not indented.

    >>> last_line("Traceback (most recent call last):\\n  File ...\\nKeyError: 3\\nmore")
    'KeyError: 3'
    """
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in trace.splitlines()[1:]]  # torch names its rank
    return next((line for line in lines if line and not line.startswith(" ")), "an error without a name")


def _count(program: Program, counted: list[list[float]] | None, folder: Path, verdict: Verdict) -> None:
    """Note samples that were not counted exactly once, in the log and in the model's ledger."""
    log = read_log(folder / "run")
    verdict.steps = len(log.records)
    epochs = audit(log)
    missed = max(0, program.epochs - len({epoch.epoch for epoch in epochs})) * program.length
    lost = missed + sum(max(epoch.missing, program.length - epoch.counted + epoch.twice) for epoch in epochs)
    doubled = sum(epoch.twice for epoch in epochs)
    if counted is not None:
        lost = max(lost, sum(round(count) < 1 for epoch in counted for count in epoch))
        doubled = max(doubled, sum(round(count) > 1 for epoch in counted for count in epoch))
    verdict.lost, verdict.doubled = lost, doubled


# -- what is left ------------------------------------------------------------------------------------------------------


def _left_running(fleet: Fleet) -> list[str]:
    """Return processes in the sessions of workers that have ended."""
    sessions = {worker.pid for life in fleet.lives for worker in life.processes}
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            if entry.name.isdigit():
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                found += [f"process {entry.name}"] if int(session) in sessions and state not in "ZX" else []
    return found


def _left_files(folder: Path) -> list[str]:
    """Return what half-written checkpoints have left."""
    return [str(file.relative_to(folder)) for file in folder.rglob("*.tmp")]


# -- a hang ------------------------------------------------------------------------------------------------------------


def dump(folder: Path, pids: Sequence[int], roster: RosterServer | None) -> None:
    """Leave the Python stacks of all processes, twice, and where their threads are in the kernel."""
    for number in range(2):
        for pid in pids:
            send(pid, signal.SIGUSR1)
            (folder / f"kernel.{pid}.{number}").write_text(threads_of(pid))
        time.sleep(1.0)
    with (folder / "roster.stacks").open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        if roster is not None:
            file.write(f"\n{roster.snapshot()}\n")


def threads_of(pid: int) -> str:
    """Return name, state and place in the kernel of each thread of a process."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        facts = [task.name]
        for name in ("comm", "wchan", "syscall"):
            with suppress(OSError):
                facts.append(f"{name} {(task / name).read_text().strip()}")
        with suppress(OSError):
            facts += [line for line in (task / "status").read_text().splitlines() if line.startswith("State")]
        lines.append("  ".join(facts))
    return "\n".join(lines) + "\n"
