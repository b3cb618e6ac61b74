"""A fleet in as many lines as there is room for: one a worker, or one a group of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.analysis.progress import WorkerRow

MOST_WORKERS = 64
"""A larger fleet is shown in groups, however tall the screen."""


@dataclass(frozen=True)
class TableLine:
    """One worker, or the workers of a group together."""

    label: str
    """``3``, or ``8-15``."""
    machine: str
    samples: int
    speed: float
    """Samples a second; of a group, together."""
    waiting: float
    """Of a group, on average."""
    mark: str
    kind: str
    """What the mark is about: ``late``, ``left``, ``waited for``, ``slowest``, ``joined``, ``sits out`` or nothing."""


def group_rows(rows: Sequence[WorkerRow], *, most: int) -> list[TableLine]:
    """At most ``most`` lines. Groups are of a power of two, like the workers of a machine, and stay what they are while
    the fleet and the screen do."""
    size = 1 if len(rows) <= MOST_WORKERS else 2
    while -(-len(rows) // size) > max(1, most):
        size *= 2
    return [_line(rows[start : start + size]) for start in range(0, len(rows), size)]


def _line(rows: Sequence[WorkerRow]) -> TableLine:
    first, last = rows[0], rows[-1]
    mark, kind = _mark(rows)
    names = {row.machine for row in rows}
    at_work = [row.waiting for row in rows if row.samples]
    return TableLine(
        label=str(first.worker) if len(rows) == 1 else f"{first.worker}-{last.worker}",
        machine=first.machine if len(names) == 1 else f"{len(names)} kinds of machine",
        samples=sum(row.samples for row in rows),
        speed=sum(row.speed for row in rows),
        waiting=sum(at_work) / len(at_work) if at_work else 0.0,
        mark=mark,
        kind=kind,
    )


def _mark(rows: Sequence[WorkerRow]) -> tuple[str, str]:
    """A worker's own mark; of a group, the one that matters most."""
    if len(rows) == 1:
        return rows[0].mark, "late" if rows[0].late else "left" if rows[0].left else rows[0].mark
    if late := [row for row in rows if row.late]:
        behind = max(row.behind for row in late)
        return f"{len(late)} late" + (f", by {behind} round{'' if behind == 1 else 's'}" if behind else ""), "late"
    if gone := [row for row in rows if row.left]:
        return f"{len(gone)} left", "left"
    for kind in ("waited for", "slowest", "joined"):
        if named := [row.worker for row in rows if row.mark == kind]:
            return f"{named[0]} {kind}", kind
    out = sum(row.mark == "sits out" for row in rows)
    return (f"{out} sit{'s' if out == 1 else ''} out", "sits out") if out else ("", "")
