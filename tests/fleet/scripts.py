"""Runs the scripts of examples/ as a user would: alone, under torchrun, under ``paceline run``; or, sooner, in forks of
a process that has torch loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from crew import nursery
from nursery import Worker, end_all

from ports import own_port

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EMULATED = ("-m", "paceline.cli", "run", "-n", "2", "--emulate", "1,2", "--sample-ms", "3")

FORKED, FORKED_ALONE, FORKED_FOUR = ("forked", "2"), ("forked", "1"), ("forked", "4")
"""Two processes with torchrun's variables, and no torchrun; one by itself; and four."""


class Script:
    """A script under way, in a folder of its own. Use as a context manager: nothing survives it."""

    def __init__(self, name: str, *args: object, folder: Path, launcher: tuple[str, ...] = (), **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "TORCHELASTIC"))}
        env = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | env
        self._out, self._err = (folder / "out").open("wb"), (folder / "err").open("wb")
        self._workers: Sequence[Worker] = ()
        if launcher[:1] == ("forked",):
            self._workers = _forked(EXAMPLES / name, folder, args, env, size=int(launcher[1]))
            return
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(EXAMPLES / name), *map(str, args)],
            cwd=folder,
            env=kept | env,
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
        files = sorted(self.folder.glob("out*"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [line for line in lines if "[Gloo] Rank " not in line]  # torch 2.9's Gloo writes there, too

    @property
    def err(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("err*")))

    def kill(self) -> None:
        """SIGKILL to the launcher and to all it started."""
        if self._workers:
            end_all(self._workers)
            return
        for pid in sorted(_family(self._process.pid), reverse=True):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def wait(self, *, within: float = 300.0) -> Script:
        """Until it has ended, as it should: with 0."""
        codes = [process.wait(timeout=within) for process in self._workers or [self._process]]
        assert not any(codes), f"ended with {codes}:\n{self.err[-4000:]}"
        return self

    def wait_for(self, text: str, *, within: float = 300.0) -> None:
        """Until a line of standard output begins so."""
        until, ended = time.monotonic() + within, False
        while not any(line.startswith(text) for line in self.out):
            assert time.monotonic() < until, f"no line began with {text!r}:\n{self.err[-4000:]}"
            assert not ended, f"it ended before {text!r}:\n{self.err[-4000:]}"
            ended = all(
                one.poll() is not None for one in self._workers or [self._process]
            )  # it may have said so at the very end
            time.sleep(0.01)


def run(name: str, *args: object, folder: Path, launcher: tuple[str, ...] = (), **env: str) -> Script:
    """Run a script to its end."""
    with Script(name, *args, folder=folder, launcher=launcher, **env) as script:
        return script.wait()


def _forked(script: Path, folder: Path, args: Sequence[object], env: dict[str, str], *, size: int) -> list[Worker]:
    nursery().load("sklearn.datasets")
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)] if size > 1 else [{}]
    told = [str(script), str(folder), *map(str, args)]
    return [
        nursery().start(
            "crew:program",
            *told,
            env=env | place,
            out=folder / f"out.{rank}",
            err=folder / f"err.{rank}",
            quick=True,
        )
        for rank, place in enumerate(places)
    ]


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
