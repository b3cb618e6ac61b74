"""A finished run's figures as files: a CSV table, and TensorBoard's event file.

The table has one line per step and worker, in the order of the log; a cell is empty where nothing was recorded. The
event file is written by torch's own `SummaryWriter`, which needs TensorBoard's package.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.analysis.evaluations import evaluations, logged_figures
from paceline.observe.exports.trackers import scalars
from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog
from paceline.observe.log.sanitise import PER_STEP, PER_WORKER
from paceline.records import StepRecord

FIRST = ("planned", "samples", "seconds", "forecast_s", "slowest_s")
LEFT_OUT = ("behind", "shortfall_s", "wait_for", "weight")
OF_THE_STEP = ("step", "epoch", "generation")
OF_THE_WORKER = [name for name in dict.fromkeys((*FIRST, *PER_WORKER)) if name not in LEFT_OUT]
OF_THE_FLEET = [name for name in PER_STEP if name not in LEFT_OUT]
COLUMNS = (*OF_THE_STEP, "t", "worker", "machine", *OF_THE_WORKER, *OF_THE_FLEET)
MOST_STEPS = 10_000
"""Steps that are written at most, evenly spread: TensorBoard draws a thousand points per curve."""
LARGEST = 3.4e38
"""Largest value that the 32-bit float of an event holds."""
MISSING = "TensorBoard's files need its package, which is not installed: pip install 'paceline[tensorboard]'"


def write_csv(log: RunLog, path: Path) -> Path:
    """Write the table and return its path; ``t`` is in Unix seconds, times are in seconds."""
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
    """Quote text that begins like a formula, which a spreadsheet would run."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def write_tensorboard(log: RunLog, folder: Path) -> Path:
    """Write ``folder/events.out.tfevents…`` with every figure of `scalars`, and what was evaluated and logged.

    A second export of the run into the same folder replaces the first: TensorBoard would draw both. Raises ValueError
    without TensorBoard.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(MISSING) from None
    folder.mkdir(parents=True, exist_ok=True)
    started = _started(log)
    suffix = f".paceline-{int(started)}"
    earlier = set(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step, t, figures in _rows(log):
            for name, value in figures.items():
                bounded = min(max(value, -LARGEST), LARGEST)
                writer.add_scalar(name, bounded, step, walltime=t if math.isfinite(t) else started)
    for file in earlier:
        file.unlink()
    return next(folder.glob(f"events.out.tfevents.*{suffix}"))


def _rows(log: RunLog) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Yield step, Unix seconds (NaN when not logged) and figures by name."""
    every = -(-len(log.records) // MOST_STEPS) or 1
    for record, t in list(zip(log.records, log.times))[::every]:
        yield record.step, t, scalars(record)
    for found in evaluations(log.others):
        yield found.step, found.t, {f"evaluate/{name}": value for name, value in found.means.items()}
    yield from logged_figures(log.others)


def _started(log: RunLog) -> float:
    t = sanitise.timestamp(log.run.get("started", log.run.get("t")))
    return t if math.isfinite(t) else concurrency.time()
