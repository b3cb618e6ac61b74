"""Worker processes as a launcher sees them: started so that none can outlive it, and described when they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG = 1
FLEET_FAILED = 75
"""Exit code of a worker that was ended by the fleet's failure and not by its own."""

GUARD = """
import os, signal, sys
if not sys.stdin.buffer.read(1):
    for group in sys.argv[1:]:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except OSError:
            pass
"""
"""Waits for one byte; when the launcher dies without sending it, ends every worker with all its descendants."""


class Worker:
    """One worker process, in a session of its own: a signal to its group reaches its loader processes as well."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.code: int | None = None
        """How it ended, as `subprocess` says it (negative: by a signal); None while it runs."""
        self.stopped = False
        """Whether the launcher itself sent the signal that may have ended it."""
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_dies_with_parent(),
        )

    @property
    def running(self) -> bool:
        return self.code is None

    def reap(self) -> bool:
        """Whether it has just ended; what it left running in its group is ended too."""
        if not self.running or self.process.poll() is None:
            return False
        self.code = self.process.returncode
        self._kill_group()
        return True

    def send(self, number: int) -> None:
        """Send a signal to the worker itself; SIGKILL goes to all it started as well."""
        if not self.running:
            return
        self.stopped = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def ended(self) -> str:
        """How it ended, in words that follow its name: ``was killed by signal 9 (SIGKILL)``."""
        assert self.code is not None
        return how(self.code)


class Guard:
    """A tiny process that ends the workers when the launcher is killed and cannot."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        groups = [str(worker.process.pid) for worker in workers]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *groups],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The workers have ended: there is nothing left to guard."""
        with contextlib.suppress(OSError):
            self._process.communicate(b".")


def how(code: int) -> str:
    """An exit code in words.

    >>> how(-9)
    'was killed by signal 9 (SIGKILL)'
    >>> how(3)
    'ended with exit code 3'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_code(code: int) -> int:
    """The code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def _dies_with_parent() -> Callable[[], None] | None:
    """To be called in the new process: has Linux kill it when its parent dies, whatever the parent dies of."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return prepare
