"""Signals as things that arrive: collected, and waking a loop that waits in a selector."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While open, stop signals are collected for `take`, and these or a child's end make ``waker`` readable."""

    def __init__(self) -> None:
        self.waker, self._write = os.pipe()
        self._arrived: list[int] = []

    def __enter__(self) -> Signals:
        for end in (self.waker, self._write):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # One that the caller ignores (nohup, a shell's background job) stays ignored.
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
        """The stop signals that arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def wake(self) -> None:
        """Make ``waker`` readable, from any thread."""
        with contextlib.suppress(OSError):  # full: it is readable; closed: nobody waits any more
            os.write(self._write, b"\0")

    def drain(self) -> None:
        """Empty the waker."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.waker, 4096)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
