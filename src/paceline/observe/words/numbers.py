"""Numbers as people read them: the same in the live view, the plain lines, the verdict and the report."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from paceline.observe.log import sanitise


def number(value: float) -> str:
    """Return a number with three significant digits below 100, and thousands marked above.

    >>> number(1289.4), number(34.26), number(3.4), number(0)
    ('1,289', '34.3', '3.4', '0')
    """
    if not math.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def signed(value: float) -> str:
    """Return a number with its sign: ``signed(57.2)`` is ``+57.2``."""
    return f"{'+' if value > 0 else ''}{number(value)}"


def percent(ratio: float) -> str:
    """Return whole per cents: ``percent(0.934)`` is ``93 %``; a ratio above 0 is never shown as ``0 %``."""
    return "under 1 %" if 0 < ratio < 0.005 else percent_cell(ratio)


def percent_cell(ratio: float) -> str:
    """Return whole per cents for a table, where width counts: a small ratio may be ``0 %``."""
    return f"{100 * ratio:.0f} %" if math.isfinite(ratio) else "? %"


def times(ratio: float) -> str:
    """Return a ratio as a factor: ``times(2.593)`` is ``2.6``."""
    return f"{ratio:.2f}" if ratio < 1.5 else number(float(f"{ratio:.2g}"))


def size(fewest: int, most: int) -> str:
    """Return a count that may vary: ``4``, or ``3 to 4``."""
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def rounds_behind(rounds: int) -> str:
    """Return ``3 rounds behind``."""
    return f"{rounds} round{'' if rounds == 1 else 's'} behind"


def duration(seconds: float) -> str:
    """Return seconds in the units that people use.

    >>> duration(0.034), duration(12.3), duration(125), duration(7260), duration(200000)
    ('34 ms', '12 s', '2 min 05 s', '2 h 01 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "under 1 ms"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600} h"


def machine(info: Mapping[str, Any] | None) -> str:
    """Return a worker's machine from its entry in the ``run`` event: ``cpu, emulated 4x``; empty when not known."""
    info = info or {}
    emulated = str(info.get("emulated") or "")
    if emulated and "emulated" not in emulated:
        emulated = f"emulated {emulated}"
    return ", ".join(part for part in (str(info.get("device") or ""), emulated) if part)


def worker_name(worker: int, machine: str | None = None) -> str:
    """Return ``worker 3 (cpu)``, or ``worker 3`` when its machine is not known."""
    return f"worker {worker}" + (f" ({machine})" if machine else "")


def capital(sentence: str) -> str:
    """Return the sentence with a capital letter in front and the rest unchanged."""
    return sentence[:1].upper() + sentence[1:]


def machines(run: Mapping[str, Any], joined: Iterable[Mapping[str, Any]] = ()) -> dict[int, str]:
    """Return every worker's machine by identity, from the ``run`` event and the entries of workers that ``joined``."""
    entries = run.get("workers")
    known = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, (list, tuple)) else []
    workers = [sanitise.count_or(entry.get("id", entry.get("rank")), rank) for rank, entry in enumerate(known)]
    named = {worker: machine(entry) for worker, entry in zip(workers, known)}
    return named | {int(entry["id"]): machine(entry) for entry in joined}


def wrapped(text: str, stream: TextIO) -> str:
    """Return the text wrapped to the width of the terminal; unchanged where ``stream`` is not a terminal."""
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())
