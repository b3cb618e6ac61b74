"""Worker processes as a launcher sees them: started so that none can outlive it, and described when they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.launcher.output import Voice

PR_SET_PDEATHSIG = 1
FLEET_FAILED = 75
"""Exit code of a worker that was ended by the fleet's failure and not by its own."""

GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
"""Is told by those who start (their number), and by the launcher of those who have ended (minus their number); when the
launcher dies, ends those that are left with all their descendants."""


class Worker:
    """One worker process, in a session of its own: a signal to its group reaches its loader processes as well."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], *, guard: Guard | None = None
    ) -> None:
        self.rank = rank
        self.code: int | None = None
        """How it ended, as `subprocess` says it (negative: by a signal); None while it runs."""
        self.words: Voice
        """What it says on stderr; whoever listens to it sets this."""
        self.stopped = False
        """Whether the launcher itself sent the signal that may have ended it."""
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_prepared(guard),
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

    def freeze(self) -> None:
        """Stop it with all it started, as a machine that stands still."""
        self._send_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send_group(signal.SIGCONT)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send_group(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    @property
    def ended(self) -> str:
        """How it ended, in words that follow its name: ``was killed by signal 9 (SIGKILL)``."""
        assert self.code is not None
        return how(self.code)


class Guard:
    """A tiny process that ends the workers when the launcher is killed and cannot."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def enter(self) -> None:
        """To be called in a new process that leads its group, before it is a worker: told by the launcher, the guard
        might hear of it too late, for a busy computer may run the worker long before the launcher again."""
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # where somebody ended the guard
        self._tell(os.getpid())
        signal.signal(signal.SIGPIPE, before)

    def release(self, worker: Worker) -> None:
        """It has ended: its number may soon be somebody else's."""
        self._tell(-worker.process.pid)

    def dismiss(self) -> None:
        """The workers have ended: there is nothing left to guard."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody ended it: Linux still ends the workers with us
            os.write(self._process.stdin.fileno(), f"{number}\n".encode())


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


def _prepared(guard: Guard | None) -> Callable[[], None]:
    """To be called in the new process: has it ended with its parent, whatever the parent dies of, by the guard and, on
    Linux, by the system too."""
    linux, parent = sys.platform.startswith("linux"), os.getpid()
    prctl = ctypes.CDLL(None).prctl if linux else None

    def prepare() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)
        if guard is not None:
            guard.enter()

    return prepare
