"""Trials that kill, freeze and cut: each in a process of its own, of which nothing is left, however it ends."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
VERDICT = "verdict.json"


@dataclass(frozen=True)
class Ended:
    """A trial that has ended."""

    name: str
    facts: dict[str, Any] | None
    """What it found; None where its process ended without a result."""
    words: str
    """What its process wrote."""


class Trials:
    """Trials under way, a number of them at a time. Use as a context manager: nothing survives it."""

    def __init__(self, folder: Path, *, at_once: int, stuck_s: float) -> None:
        """``stuck_s``: seconds after which a trial's own process is killed."""
        self._folder, self._at_once, self._stuck_s = folder, at_once, stuck_s
        self._under_way: dict[int, tuple[str, float]] = {}
        """Name and beginning of each trial, by its process."""
        if sys.platform == "linux":  # whoever is orphaned becomes a child of this process, which waits for it
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._under_way:
            os.kill(process, signal.SIGKILL)
        until = time.monotonic() + 10.0
        with suppress(ChildProcessError):
            while self._under_way or time.monotonic() < until:
                process, _status = os.waitpid(-1, os.WNOHANG)
                self._under_way.pop(process, None)
                if not process:
                    time.sleep(0.02)

    @property
    def full(self) -> bool:
        """Whether no further trial may begin now."""
        return len(self._under_way) >= self._at_once

    @property
    def empty(self) -> bool:
        """Whether no trial is under way."""
        return not self._under_way

    def begin(self, name: str, play: Callable[[Path], dict[str, Any]]) -> None:
        """Start a trial: ``play`` gets a folder that does not exist yet, and returns what it found."""
        sys.stdout.flush()
        sys.stderr.flush()
        if process := os.fork():
            self._under_way[process] = (name, time.monotonic())
            return
        try:
            _live(play, self._folder / name)
        finally:
            os._exit(1)

    def next_ended(self) -> Ended:
        """Wait for a trial to end, and return what it found."""
        while True:
            with suppress(ChildProcessError):
                process, _ = os.waitpid(-1, os.WNOHANG)
                if process in self._under_way:
                    return self._result_of(self._under_way.pop(process)[0])
            for process, (_, began) in self._under_way.items():
                if time.monotonic() - began > self._stuck_s:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)

    def _result_of(self, name: str) -> Ended:
        folder, facts = self._folder / name, None
        with suppress(OSError, ValueError):
            facts = json.loads((folder / VERDICT).read_text())
        err = folder.with_suffix(".err")
        return Ended(name, facts, err.read_text(errors="replace").strip() if err.exists() else "")

    def forget(self, name: str) -> None:
        """Remove the files of a trial."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".err").unlink(missing_ok=True)


def _live(play: Callable[[Path], dict[str, Any]], folder: Path) -> None:
    """Make one trial in this process, a fork, and leave what it found in a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one ends it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    for number in (1, 2):
        os.dup2(os.open(folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    try:
        found = play(folder)
        (folder / VERDICT).write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
