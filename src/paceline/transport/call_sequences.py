"""This worker's position in the program: which call of each sequence it is in, and what it does between two of them.

A worker's beats report it to the others, through the store (`paceline.transport.heartbeat`) or the roster.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from paceline import concurrency
from paceline.roster.calls import CALLS, Spot


class CallPosition(NamedTuple):
    """A worker's position in a sequence, replaced as one, so that another thread never reads half of a change."""

    call: int = 0
    label: str = ""
    since: float | None = None
    """When it began to wait there; None while it works towards the next call."""

    def spot(self) -> Spot:
        return Spot(self.call, self.label, self.since is not None)


class CallSequences:
    """This worker's position in each sequence of calls. ``on_change`` is called after each change."""

    def __init__(self, *lanes: str, on_change: Callable[[], None] = lambda: None) -> None:
        self.doing = "starting"
        self.begun = 0
        """Steps that the user's thread has begun."""
        self.positions = dict.fromkeys(lanes, CallPosition())
        self._on_change = on_change

    def note(self, doing: str, *, begun: int | None = None) -> None:
        """Note what this worker does now."""
        self.doing = doing
        if begun is not None:
            self.begun = begun
        self._on_change()

    def enter(self, label: str, *, lane: str, since: float, call: int | None = None) -> int:
        """Begin the next call of this lane, or call number ``call``: from now on this worker waits for the others."""
        position = CallPosition(self.positions[lane].call + 1 if call is None else call, label, since)
        self.positions[lane] = position
        self._on_change()
        return position.call

    def leave(self, *, lane: str) -> None:
        self.positions[lane] = self.positions[lane]._replace(since=None)
        self._on_change()

    def skip_to(self, call: int, *, lane: str = CALLS) -> None:
        """Continue at another worker's position in the training, calls included, which this one has taken over."""
        self.positions[lane] = CallPosition(call)

    def fall_back(self, call: int, *, lane: str) -> None:
        """Return to ``call``, this worker's last: the call under way is not its business any more."""
        self.positions[lane] = self.positions[lane]._replace(call=call)

    def spots(self) -> dict[str, Spot]:
        return {lane: position.spot() for lane, position in self.positions.items()}

    def longest_wait(self) -> tuple[str, float | None]:
        """Return the lane in which this worker has waited longest, and since when; None: it waits nowhere."""
        waits = [(position.since, lane) for lane, position in self.positions.items() if position.since is not None]
        return (min(waits)[1], min(waits)[0]) if waits else (CALLS, None)


# -- collectives of the script's own -------------------------------------------------------------------------------

# The fleet's rounds and a collective of torch.distributed that the script, or a library, calls itself wait for each
# other when workers run unequal numbers of micro-batches. The thread of the heartbeat looks at the stack of the main
# thread, so that those who wait for this worker can name what it waits in.

WRAPPERS = "torch.distributed.c10d_logger"
"""The module whose functions stand around torch's collectives."""


class ForeignCalls:
    """Looks at the main thread of this process."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        """The call under way when last looked at; held, or a later one might have its address."""
        self._since = 0.0

    def current(self) -> tuple[str, float]:
        """Return the call that the main thread is in and for how many seconds it has been seen there; "" for none."""
        main = concurrency.main_thread()
        frame = _frame_of(main.ident) if main is not None else None  # None: a test owns the threads
        call = described(frame)
        if not call:
            self._frame = None
            return "", 0.0
        now = concurrency.monotonic()
        if frame is not self._frame:
            self._frame, self._since = frame, now
        return call, now - self._since


def _frame_of(thread: int | None) -> FrameType | None:
    """Return what a thread runs, with the garbage collector paused.

    Python 3.11 takes a lock here that the end of a `threading.local` takes too: one that is collected meanwhile stops
    the process for ever (CPython's gh-106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread or 0)
    finally:
        if collects:
            gc.enable()


def described(frame: FrameType | None) -> str:
    """Return the collective that this stack ends in, with the line that called it.

    Empty where it ends elsewhere, or in one of the library's own.
    """
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
