"""One worker as a launcher sees it: started so that it cannot outlive the launcher, described when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from paceline.errors import FLEET_FAILED, describe_exit

if TYPE_CHECKING:
    from paceline.launcher.output import OutputStream

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
"""Loaded beforehand: a process that was only just forked should not."""

WATCHDOG = """
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
"""Reads a line for each worker that starts (its process id) and each that has ended (minus its process id); when the
launcher dies, stdin ends and the watchdog kills the process groups of those that are left."""


class LaunchedWorker:
    """One process of a worker as the launcher sees it, wherever it runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.code: int | None = None
        """How it ended, as `subprocess` says it (negative: by a signal); None while it runs."""
        self.stderr: OutputStream
        """What it writes to stderr; set by the pool that reads it."""
        self.signalled = False
        """Whether the launcher itself sent the signal that may have ended it."""

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """From which its stdout and its stderr are read."""
        raise NotImplementedError

    def reap(self) -> bool:
        """Whether it has just ended; what it left running in its group is ended too."""
        raise NotImplementedError

    def send(self, number: int) -> None:
        """Send a signal to the worker itself; SIGKILL goes to all it started as well."""
        raise NotImplementedError

    def suspend(self) -> None:
        """Stop it with all it started, as a machine that stands still; `resume` has it go on."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until it has ended; it was sent SIGKILL."""
        raise NotImplementedError

    @property
    def ended(self) -> str:
        """How it ended, in words that follow its name: ``was killed by signal 9 (SIGKILL)``."""
        assert self.code is not None
        return describe_exit(self.code)

    @property
    def interrupted(self) -> bool:
        """Whether it ended because the run was stopped or the fleet failed: what it wrote last is not worth a line."""
        return self.code == FLEET_FAILED or any("KeyboardInterrupt" in line for line in self.stderr.held)


class WorkerProcess(LaunchedWorker):
    """One on this computer, in a session of its own: a signal to its group reaches its loader processes as well."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        watchdog: Watchdog | None = None,
        cwd: str | None = None,
    ) -> None:
        super().__init__(number)
        self._watchdog = watchdog
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_prepared(watchdog),
        )

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def reap(self) -> bool:
        if not self.running or self.process.poll() is None:
            return False
        self.code = self.process.returncode
        self._kill_group()
        self._release()
        return True

    def send(self, number: int) -> None:
        if not self.running:
            return
        self.signalled = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            self._kill_group()

    def suspend(self) -> None:
        self._send_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._send_group(signal.SIGCONT)

    def wait(self) -> None:
        self.process.wait()
        self._release()

    def _release(self) -> None:
        if self._watchdog is not None:
            self._watchdog.release(self)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send_group(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


class Watchdog:
    """A tiny process that ends the workers when the launcher is killed and cannot."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def enter(self) -> None:
        """To be called in a new process that leads its group, before it is a worker: told by the launcher, the watchdog
        might learn of it too late, for a busy computer may run the worker long before the launcher again."""
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # where somebody ended the watchdog
        self._tell(os.getpid())
        signal.signal(signal.SIGPIPE, before)

    def release(self, worker: WorkerProcess) -> None:
        """The worker has ended: its process id may soon be another process's."""
        self._tell(-worker.process.pid)

    def close(self) -> None:
        """All workers have ended."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody ended it: Linux still ends the workers with the launcher
            os.write(self._process.stdin.fileno(), f"{number}\n".encode())


def exit_code(code: int) -> int:
    """The code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def _prepared(watchdog: Watchdog | None) -> Callable[[], None]:
    """To be called in the new process: has it ended with its parent, whatever the parent dies of, by the watchdog and,
    on Linux, by the system too."""
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        if watchdog is not None:
            watchdog.enter()

    return prepare


def end_with_parent(parent: int) -> None:
    """Linux kills this process when its parent dies, whatever the parent dies of."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(1)
