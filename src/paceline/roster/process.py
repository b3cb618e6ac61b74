"""A look at a silent worker's process, where it runs on the roster's own computer: is it gone, stopped, or busy?

A process that computes while its interpreter is held (a long call into a library) cannot beat, yet it is alive. Only
Linux tells, through /proc; elsewhere, and for workers on other computers, nothing is known and patience decides.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Look(NamedTuple):
    """What /proc says of a process."""

    gone: bool = False
    stopped: bool = False
    ticks: int | None = None
    """Processor time it has used so far, in clock ticks; None where nothing is known."""


UNKNOWN = Look()
GONE = Look(gone=True)


@cache
def computer() -> str:
    """Names this boot of this computer and this space of process numbers: a pid of one means nothing in another.

    Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def look_at(pid: int, where: str) -> Look:
    """How process ``pid`` on computer ``where`` is doing.

    >>> look_at(os.getpid(), computer()).gone, look_at(1, "another computer")
    (False, Look(gone=False, stopped=False, ticks=None))
    """
    if not where or where != computer() or pid < 1:
        return UNKNOWN
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return UNKNOWN
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything, spaces and brackets too
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return GONE if state in "ZXx" else Look(stopped=state in "Tt", ticks=ticks)
