"""Runs the scripts of examples/ as a user would: alone, under torchrun, under ``paceline run``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EMULATED = ("-m", "paceline.cli", "run", "-n", "2", "--emulate", "1,2", "--sample-ms", "3")


class Script:
    """A script under way, in a folder of its own. Use as a context manager: nothing survives it."""

    def __init__(self, name: str, *args: object, folder: Path, launcher: tuple[str, ...] = (), **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "TORCHELASTIC"))}
        self._out, self._err = (folder / "out").open("wb"), (folder / "err").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(EXAMPLES / name), *map(str, args)],
            cwd=folder,
            env=kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | env,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()

    @property
    def out(self) -> list[str]:
        """The lines on standard output so far."""
        return (self.folder / "out").read_text().splitlines()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the launcher and to all it started."""
        for pid in sorted(_family(self._process.pid), reverse=True):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def wait(self, *, within: float = 300.0) -> Script:
        """Until it has ended, as it should: with 0."""
        code = self._process.wait(timeout=within)
        assert code == 0, f"ended with {code}:\n{self.err[-4000:]}"
        return self

    def wait_for(self, text: str, *, within: float = 300.0) -> None:
        """Until a line of standard output begins so."""
        until, ended = time.monotonic() + within, False
        while not any(line.startswith(text) for line in self.out):
            assert time.monotonic() < until, f"no line began with {text!r}:\n{self.err[-4000:]}"
            assert not ended, f"it ended before {text!r}:\n{self.err[-4000:]}"
            ended = self._process.poll() is not None  # it may have said so at the very end
            time.sleep(0.01)


def run(name: str, *args: object, folder: Path, launcher: tuple[str, ...] = (), **env: str) -> Script:
    """Run a script to its end."""
    with Script(name, *args, folder=folder, launcher=launcher, **env) as script:
        return script.wait()


def _family(pid: int) -> set[int]:
    """A process and all its descendants: launchers put their workers into sessions of their own."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family
