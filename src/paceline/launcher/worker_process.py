"""One worker's process as a launcher sees it, started so that it cannot outlive the launcher; and stop signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, TYPE_CHECKING

from paceline import concurrency
from paceline.errors import FLEET_FAILED, describe_exit

if TYPE_CHECKING:
    from paceline.launcher.output import OutputStream

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
"""The C library, loaded in advance: a process that was only just forked should load nothing."""

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
"""Program of the watchdog.

It reads one line per worker that starts (its process id) and one per worker that has ended (minus its process id).
When the launcher dies, stdin ends, and the watchdog kills the process groups of the workers that are left.
"""


class LaunchedWorker:
    """One process of a worker as the launcher sees it, wherever it runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.code: int | None = None
        """The exit code as `subprocess` gives it (negative: a signal's number); None while the process runs."""
        self.stderr: OutputStream
        """The process's stderr; set by the pool that reads it."""
        self._signalled_at: float | None = None

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """The pipes from which stdout and stderr are read."""
        raise NotImplementedError

    def reap(self) -> bool:
        """Return whether the process has just ended; kill what it left running in its group."""
        raise NotImplementedError

    def send(self, number: int) -> None:
        """Send a signal to the process itself; SIGKILL goes to all processes that it started as well."""
        raise NotImplementedError

    def suspend(self) -> None:
        """Stop the process and all that it started, as if the machine stood still, until `resume`."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the process has ended; the caller has sent SIGKILL."""
        raise NotImplementedError

    @property
    def ended(self) -> str:
        """How the process ended, in words that follow its name: ``was killed by signal 9 (SIGKILL)``."""
        assert self.code is not None
        return describe_exit(self.code)

    @property
    def interrupted(self) -> bool:
        """Whether the process ended because the run was stopped or the fleet failed: its last lines are not printed.

        A traceback that begins after the launcher's signal tells of nothing else, whatever exception it names: a
        package that is interrupted while it is imported may fail later, with an error of its own.
        """
        held, began, stopped = self.stderr.held, self.stderr.held_since, self._signalled_at
        if self.code == FLEET_FAILED or any("KeyboardInterrupt" in line for line in held):
            return True
        if self.code == 0 or began is None or stopped is None:
            return False
        return began >= stopped and held[0].endswith("Traceback (most recent call last):")

    @property
    def signalled(self) -> bool:
        """Whether the launcher itself sent a signal that may have ended the process."""
        return self._signalled_at is not None

    def _note_signal(self) -> None:
        self._signalled_at = self._signalled_at or concurrency.monotonic()


class WorkerProcess(LaunchedWorker):
    """A worker's process on this computer, in its own session: signals to its group reach its loader processes too."""

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
        self._note_signal()
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
    """A tiny process that kills the workers when the launcher was killed and cannot end them itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def enter(self) -> None:
        """Register this process, a new one that leads its group, before it becomes a worker.

        The launcher might register it too late: a busy computer may run the worker long before the launcher again.
        """
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # where somebody ended the watchdog
        self._send(os.getpid())
        signal.signal(signal.SIGPIPE, before)

    def release(self, worker: WorkerProcess) -> None:
        """Unregister a worker that has ended: its process id may soon be another process's."""
        self._send(-worker.process.pid)

    def close(self) -> None:
        """End the watchdog; all workers have ended."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _send(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody ended the watchdog: Linux still kills workers with the launcher
            os.write(self._process.stdin.fileno(), f"{number}\n".encode())


def exit_code(code: int) -> int:
    """Return the exit code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def _prepared(watchdog: Watchdog | None) -> Callable[[], None]:
    """Return a function for the new process to call: it will be killed when its parent dies, for whatever reason.

    The watchdog kills it and, on Linux, the system too.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        if watchdog is not None:
            watchdog.enter()

    return prepare


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, for whatever reason."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(1)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Collected stop signals. While open, a stop signal or a child's end makes ``waker`` readable for a selector."""

    def __init__(self) -> None:
        self.waker, self._write = os.pipe()
        self._arrived: list[int] = []

    def __enter__(self) -> Signals:
        for end in (self.waker, self._write):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A signal that the caller ignores (nohup, a shell's background job) stays ignored.
        handled = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.waker)
        os.close(self._write)

    def take(self) -> list[int]:
        """Return the stop signals that arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def wake(self) -> None:
        """Make ``waker`` readable, from any thread."""
        with contextlib.suppress(OSError):  # full: the pipe is readable already; closed: nobody waits any more
            os.write(self._write, b"\0")

    def drain(self) -> None:
        """Empty the waker."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.waker, 4096)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
