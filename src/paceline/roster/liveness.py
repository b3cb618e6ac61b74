"""Is a silent worker alive? From how long it is silent, how late its beats are as a rule, and what its process does.

A worker on a busy machine beats late now and then; one on a quiet machine never does. So nobody tunes a timeout
(`SilenceLimit`). A process that computes while its interpreter is held (a long call into a library) cannot beat, yet it
is alive; so is one that waits for a processor, on a computer with too much to do. Only Linux tells, through /proc;
elsewhere, and for workers on other computers, nothing is known of the process and the limit decides.
"""

from __future__ import annotations

import math
import os
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.2
FLOOR_S = 1.2
CEILING_S = 20.0
EXCESS_WEIGHT = 4.0
REMEMBERED = 300
"""Gaps that are remembered: a minute of them."""
CHECK_S = 0.5
"""Silent for so long, a worker's process is looked at."""
HOLDING_S = 120.0
"""How long a process that computes, or waits for a processor, may keep its beats back."""

FINE, BUSY, FROZEN, GONE = "fine", "busy", "frozen", "gone"


class SilenceLimit:
    """The time for which a worker may be silent before it is given up, learned from the gaps between its own beats.

        limit = FLOOR_S + 4 x (largest recent gap - BEAT_S), at most CEILING_S

    A silence for which it was given up is no such gap: a machine that was frozen once beats as before. One that falls
    silent again as soon as it is back is slow, and would be given up for ever, with every generation that has it in.

    >>> calm, loaded = SilenceLimit(), SilenceLimit()
    >>> for gap in (0.2, 0.21, 0.2):
    ...     calm.note(gap)
    ...     loaded.note(gap + 0.5)
    >>> round(calm.limit_s, 2), round(loaded.limit_s, 2)
    (1.24, 3.24)
    """

    def __init__(self) -> None:
        self._excesses: deque[float] = deque(maxlen=REMEMBERED)
        self._returned = -math.inf

    def note(self, gap_s: float) -> None:
        """Note the seconds between two beats."""
        self._excesses.append(max(0.0, gap_s - BEAT_S))

    def note_return(self, silent_s: float, now: float) -> None:
        """Note that the worker is back ``now``, after a silence for which it was given up."""
        if now - silent_s - self._returned < FLOOR_S:
            self.note(silent_s)
        self._returned = now

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the worker is given up."""
        return min(CEILING_S, FLOOR_S + EXCESS_WEIGHT * max(self._excesses, default=0.0))


class ProcessState(NamedTuple):
    """The state of a worker's process, as its computer shows it."""

    gone: bool = False
    stopped: bool = False
    ticks: int | None = None
    """Processor time it has used so far, in clock ticks; None where nothing is known."""
    ready: bool = False
    """One of its threads runs, or would if it were given a processor."""


UNKNOWN = ProcessState()
ENDED = ProcessState(gone=True)


class SilenceCheck:
    """One stretch of a worker's silence, judged again and again while it lasts."""

    def __init__(self, state: ProcessState) -> None:
        self._ticks = state.ticks
        """Processor time of its process at the beginning, and then at each verdict."""
        self._due_s = 0.0
        """Seconds of silence before which there is nothing new to judge."""

    def judge(self, silent_s: float, *, limit_s: float, state: ProcessState) -> str:
        """Judge a silence of ``silent_s`` seconds: fine, busy (waited for, and named), frozen or gone (given up)."""
        if state.gone:
            return GONE
        if silent_s < max(limit_s, self._due_s):
            return FINE
        computes = state.ticks is not None and self._ticks is not None and state.ticks > self._ticks
        if state.stopped or not (computes or state.ready) or silent_s > HOLDING_S:
            return FROZEN
        self._ticks, self._due_s = state.ticks, silent_s + limit_s
        return BUSY


@cache
def computer() -> str:
    """Return a name of this boot and this space of process numbers: a pid of one means nothing in another."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_state_of(pid: int, where: str) -> ProcessState:
    """Return the state of process ``pid`` on computer ``where``.

    >>> process_state_of(os.getpid(), computer()).gone, process_state_of(1, "another computer")
    (False, ProcessState(gone=False, stopped=False, ticks=None, ready=False))
    """
    if not where or where != computer() or pid < 1:
        return UNKNOWN
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return ENDED
    except OSError:
        return UNKNOWN
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return ENDED if state in "ZXx" else ProcessState(stopped=state in "Tt", ticks=ticks, ready=_ready(pid))


def _ready(pid: int) -> bool:
    with suppress(OSError):  # it has ended since
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                if _stat(Path(f"/proc/{pid}/task/{thread}/stat"))[0] == "R":
                    return True
    return False


def _stat(file: Path) -> list[str]:
    """Return /proc's fields of a process or thread after its name, which may contain spaces and brackets."""
    return file.read_text(errors="replace").rpartition(")")[2].split()
