"""Recorded traces: the seconds that each worker of a real job took in each step, for equal shares.

The file is CSV: the first column is the step's number, then one column per worker; a header line is optional. Steps are
often recorded in blocks, so their numbers jump; a jump is an ordinary next step.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Row = tuple[int, list[str]]
"""A line's number in the file, from 1, and its cells."""


@dataclass(frozen=True)
class Trace:
    """Seconds of own compute, with one row per recorded step and one column per worker."""

    steps: tuple[int, ...]
    workers: tuple[str, ...]
    seconds: npt.NDArray[np.float64]

    def factors(self) -> npt.NDArray[np.float64]:
        """Return the slowness against the trace's median: ``seconds / median(seconds)``."""
        return np.asarray(self.seconds / np.median(self.seconds), dtype=np.float64)


def read_trace(path: Path) -> Trace:
    """Read a trace; raise ValueError, with the line and the column, for a file that is not one."""
    rows = _rows(path)
    named = bool(rows) and not _is_number(rows[0][1][0])
    header = rows[0][1] if named else []
    body = rows[1:] if named else rows
    if not body:
        raise ValueError(f"{path} holds no steps: a trace has one line per step: its number, then seconds per worker")
    width = len(header) or len(body[0][1])
    if width < 2:
        raise ValueError(
            f"{path}, line {rows[0][0]}: no workers; a trace has the step's number, then one column per worker"
        )
    for line, cells in body:
        if len(cells) != width:
            raise ValueError(f"{path}, line {line}, column {min(len(cells), width) + 1}: {_ragged(len(cells), width)}")
    names = [name.strip() or f"worker {i}" for i, name in enumerate(header[1:])]
    return Trace(
        steps=tuple(_step(path, line, cells[0]) for line, cells in body),
        workers=tuple(names or [f"worker {i}" for i in range(width - 1)]),
        seconds=np.array([_seconds(path, line, cells) for line, cells in body], dtype=np.float64),
    )


def _rows(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file; a trace is CSV") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror or error}") from None


def _seconds(path: Path, line: int, cells: Sequence[str]) -> list[float]:
    return [_second(f"{path}, line {line}, column {i + 2}", cell) for i, cell in enumerate(cells[1:])]


def _second(where: str, cell: str) -> float:
    if not _is_number(cell):
        raise ValueError(f"{where}: {cell.strip()!r} is not a number of seconds")
    second = float(cell)
    if not (math.isfinite(second) and second > 0):
        raise ValueError(f"{where}: seconds are finite and above 0, not {cell.strip()}")
    return second


def _step(path: Path, line: int, cell: str) -> int:
    if not (_is_number(cell) and float(cell).is_integer()):
        raise ValueError(f"{path}, line {line}, column 1: {cell.strip()!r} is not a step's number")
    return int(float(cell))


def _ragged(found: int, wanted: int) -> str:
    return f"{found} values where the first line has {wanted}"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
