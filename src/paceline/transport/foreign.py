"""A collective of torch.distributed that the script, or a library, calls itself: where this worker stands in one.

The fleet's rounds and such a call wait for each other when workers run unequal numbers of micro-batches. The thread of
the heartbeat looks at the stack of the main thread, so that those who wait for this worker can name what it waits in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from paceline import concurrency

WRAPPERS = "torch.distributed.c10d_logger"
"""The module whose functions stand around torch's collectives."""


class ForeignCalls:
    """Looks at the main thread of this process."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        """The call under way when last looked at; held, or a later one might have its address."""
        self._since = 0.0

    def look(self) -> tuple[str, float]:
        """Return the call that the main thread is in and for how many seconds it has been seen there; "" for none."""
        # Where a test owns the threads, none of them is the main one.
        frame = sys._current_frames().get(getattr(concurrency.main_thread(), "ident", None) or 0)
        said = described(frame)
        if not said:
            self._frame = None
            return "", 0.0
        now = concurrency.monotonic()
        if frame is not self._frame:
            self._frame, self._since = frame, now
        return said, now - self._since


def described(frame: FrameType | None) -> str:
    """The collective that this stack ends in, with the line that called it; "" where it ends elsewhere, or in one of
    the library's own."""
    name, outer = "", frame
    while outer is not None and _module(outer).startswith("torch."):
        if _module(outer).startswith("torch.distributed."):
            name = outer.f_code.co_name if _module(outer) != WRAPPERS else name
        elif not name:
            return ""
        outer = outer.f_back
    if not name or outer is None or _module(outer).startswith("paceline."):
        return ""
    return f"torch.distributed.{name}, called in {Path(outer.f_code.co_filename).name}, line {outer.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
