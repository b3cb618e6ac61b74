"""Recorded comings and goings of spot machines, played on a small fleet.

A trace is a CSV file without a header, one event per row, in the order of time::

    milliseconds,add|remove,node

`Market` plays it on a fleet with limited room: a node that finds no room waits until another has gone, and the last
worker that holds the training's state is spared until another has it too. Nothing here waits or starts workers: the
caller passes the time and carries out the decisions.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One event of a trace."""

    at_s: float
    """Seconds after the trace's beginning, as recorded."""
    adds: bool
    """Whether the node comes; otherwise it goes."""
    node: str


@dataclass(frozen=True)
class SpotChange:
    """A decision about one node."""

    what: Literal["add", "remove", "wait", "spare"]
    """The decision. ``wait``: there is no room for the node yet. ``spare``: it should go, but it is the last one."""
    node: str


def read_spot(path: Path) -> tuple[Row, ...]:
    """Return the events of a trace; raise ValueError, with the line, for what cannot be understood."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = tuple(_rows(csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read the spot trace {path} ({getattr(error, 'strerror', None) or error})") from None
    except ValueError as error:
        raise ValueError(f"spot trace {path}, {error}") from None
    if not any(row.adds for row in rows):
        raise ValueError(f"the spot trace {path} adds no node: rows are milliseconds,add|remove,node")
    return rows


def _rows(lines: Iterator[list[str]]) -> Iterator[Row]:
    there: set[str] = set()
    before = 0.0
    for number, cells in enumerate(lines, start=1):
        if not any(cell.strip() for cell in cells):
            continue
        try:
            row = _row(cells)
            if row.at_s < before:
                raise ValueError("it is earlier than the row before: sort the rows by time")
            if row.adds == (row.node in there):
                raise ValueError(f"{row.node} is {'there already' if row.adds else 'not there'}")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        (there.add if row.adds else there.remove)(row.node)
        before = row.at_s
        yield row


def _row(cells: list[str]) -> Row:
    if len(cells) != 3 or cells[1].strip() not in ("add", "remove") or not cells[2].strip():
        raise ValueError(f"a row is milliseconds,add|remove,node, not {','.join(cells)!r}")
    try:
        milliseconds = float(cells[0])
    except ValueError:
        milliseconds = math.nan
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise ValueError(f"the time is a number of milliseconds from 0, not {cells[0]!r}")
    return Row(milliseconds / 1000, cells[1].strip() == "add", cells[2].strip())


class Market:
    """The player of a trace, ``speed_up`` times as fast as recorded, with at most ``room`` nodes at once."""

    def __init__(self, rows: Sequence[Row], *, room: int, speed_up: float = 1.0) -> None:
        if not (math.isfinite(speed_up) and speed_up > 0):
            raise ValueError(f"the speed-up is {speed_up:g}; it is a number above 0, such as 300")
        assert room >= 1
        self._rows, self._room, self._speed_up = rows, room, speed_up
        self._next = 0
        self._playing: list[str] = []
        self._waiting: list[str] = []
        self._owed: list[str] = []
        """Nodes that were spared, and go once another worker holds the training's state."""

    @property
    def begins_s(self) -> float:
        """Seconds, as played, before the trace's first event."""
        return self._rows[0].at_s / self._speed_up if self._rows else 0.0

    @property
    def coming(self) -> bool:
        """Whether any node has yet to come."""
        return bool(self._waiting) or any(row.adds for row in self._rows[self._next :])

    def changes(self, elapsed_s: float, *, inside: Set[str]) -> list[SpotChange]:
        """Return the decisions due at ``elapsed_s``, in order.

        ``inside`` holds the nodes whose workers have the training's state.
        """
        made: list[SpotChange] = []
        staying = set(inside)
        for node in [*self._owed]:
            if not self._last(node, staying):
                self._owed.remove(node)
                made += self._take_out(node, staying)
        while self._next < len(self._rows) and self._rows[self._next].at_s <= elapsed_s * self._speed_up:
            row = self._rows[self._next]
            self._next += 1
            made += self._come(row.node) if row.adds else self._go(row.node, staying)
        return made

    def _come(self, node: str) -> list[SpotChange]:
        if node in self._owed:  # it was spared when it should have gone, and now comes again
            self._owed.remove(node)
            return []
        if len(self._playing) < self._room:
            self._playing.append(node)
            return [SpotChange("add", node)]
        self._waiting.append(node)
        return [SpotChange("wait", node)]

    def _go(self, node: str, staying: set[str]) -> list[SpotChange]:
        if node in self._waiting:
            self._waiting.remove(node)
            return []
        if self._last(node, staying):
            self._owed.append(node)
            return [SpotChange("spare", node)]
        return self._take_out(node, staying)

    def _last(self, node: str, staying: set[str]) -> bool:
        return self._playing == [node] or staying == {node}

    def _take_out(self, node: str, staying: set[str]) -> list[SpotChange]:
        self._playing.remove(node)
        staying.discard(node)
        return [SpotChange("remove", node), *(self._come(self._waiting.pop(0)) if self._waiting else [])]
