"""A look at a silent worker's process, where it runs on the roster's own computer: is it gone, stopped, or busy?

A process that computes while its interpreter is held (a long call into a library) cannot beat, yet it is alive; so is
one that waits for a processor, on a computer with too much to do. Only Linux tells, through /proc; elsewhere, and for
workers on other computers, nothing is known and patience decides.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Look(NamedTuple):
    """What /proc says of a process."""

    gone: bool = False
    stopped: bool = False
    ticks: int | None = None
    """Processor time it has used so far, in clock ticks; None where nothing is known."""
    ready: bool = False
    """One of its threads runs, or would if it were given a processor."""


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
    (False, Look(gone=False, stopped=False, ticks=None, ready=False))
    """
    if not where or where != computer() or pid < 1:
        return UNKNOWN
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return UNKNOWN
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return GONE if state in "ZXx" else Look(stopped=state in "Tt", ticks=ticks, ready=_ready(pid))


def _ready(pid: int) -> bool:
    with suppress(OSError):  # it has ended since
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                if _stat(Path(f"/proc/{pid}/task/{thread}/stat"))[0] == "R":
                    return True
    return False


def _stat(file: Path) -> list[str]:
    """What /proc says of a process or thread, after its name, which may hold anything, spaces and brackets too."""
    return file.read_text(errors="replace").rpartition(")")[2].split()
