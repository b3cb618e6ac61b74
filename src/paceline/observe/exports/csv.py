"""A run as a table: one line a step and worker, in the order of the log. Empty cells are what was not recorded."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.log.reader import RunLog
from paceline.observe.log.record_fields import PER_STEP, PER_WORKER
from paceline.records import StepRecord

FIRST = ("planned", "samples", "seconds", "forecast_s", "slowest_s")
LEFT_OUT = ("behind", "shortfall_s", "wait_for", "weight")
OF_THE_STEP = ("step", "epoch", "generation")
OF_THE_WORKER = [name for name in dict.fromkeys((*FIRST, *PER_WORKER)) if name not in LEFT_OUT]
OF_THE_FLEET = [name for name in PER_STEP if name not in LEFT_OUT]
COLUMNS = (*OF_THE_STEP, "t", "worker", "machine", *OF_THE_WORKER, *OF_THE_FLEET)


def write_csv(log: RunLog, path: Path) -> Path:
    """Write the table; ``t`` is unix seconds, times are seconds."""
    named = log.machines
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for record, t in zip(log.records, log.times):
            table.writerows(_lines(record, t, named))
    return path


def _lines(record: StepRecord, t: float, named: dict[int, str]) -> Iterator[list[Any]]:
    before = [getattr(record, name) for name in OF_THE_STEP]
    after = [getattr(record, name) for name in OF_THE_FLEET]
    for rank, worker in enumerate(record.workers):
        own = [_at(getattr(record, name), rank) for name in OF_THE_WORKER]
        yield [_cell(value) for value in (*before, t, worker, _harmless(named.get(worker, "")), *own, *after)]


def _at(values: Sequence[float] | None, rank: int) -> float | None:
    return values[rank] if values and rank < len(values) else None


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _harmless(text: str) -> str:
    """A spreadsheet takes what begins with these for a formula and runs it."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
