"""Running the command line as a user would: a process of its own, small scripts in a folder of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import paceline

SOURCE = str(Path(paceline.__file__).parents[1])
TIMES = {
    "GRACE_S": "fixed_fleet",
    "INTERRUPT_GRACE_S": "pool",
    "LEAVE_S": "elastic_fleet",
    "FIRST_S": "elastic_fleet",
    "SOON_S": "elastic_fleet",
    "HOLD_S": "output",
    "PARTIAL_S": "output",
}
"""How patient the launcher is, and in which of its modules that stands."""


class Shell:
    """A folder with scripts, and the command ``paceline`` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "train.py") -> None:
        (self.folder / name).write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + text)

    def start(
        self, *args: str, program: str | None = None, ignoring: Sequence[int] = (), **environment: str
    ) -> "subprocess.Popen[str]":
        """The command with these arguments; those of `TIMES` in the environment replace the launcher's own, and
        ``program``, a file here, the command itself. ``ignoring`` these signals, as under nohup or after &."""
        patch = "".join(
            f"import paceline.launcher.{module} as module; module.{name} = {environment.pop(name)}; "
            for name, module in TIMES.items()
            if name in environment
        )
        command = [program] if program else ["-c", f"{patch}from paceline.cli import main; main()"]
        process = subprocess.Popen(
            [sys.executable, *command, *args],
            cwd=self.folder,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignoring] and None,
        )
        self.started.append(process)
        return process

    def run(self, *args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*args, **environment)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    @staticmethod
    def environment(more: dict[str, str]) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "OMP_"))}
        path = os.pathsep.join(filter(None, [SOURCE, clean.get("PYTHONPATH")]))
        return {**clean, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200", **more}

    def pids(self, count: int) -> list[int]:
        """The process numbers that ``count`` workers wrote to files called ``pid-...``."""
        wait_for(lambda: len(list(self.folder.glob("pid-*"))) >= count, 60)
        return [int(path.name.removeprefix("pid-")) for path in self.folder.glob("pid-*")]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for_end(pids: Sequence[int]) -> None:
    """Wait until none of these processes runs."""
    wait_for(lambda: not any(map(alive, pids)))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)
