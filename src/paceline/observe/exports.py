"""A finished run as files for other tools: a CSV table, TensorBoard's event file, and a trace for Perfetto.

- The table has one line per step and worker, in the order of the log; a cell is empty where nothing was recorded.
- The event file is written by torch's own `SummaryWriter`, which needs TensorBoard's package.
- The Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open, has one track per worker: a slice for each
  step, and in it compute, lateness, waiting, the round and the rest. Counters hold the shares, samples per second and
  the loss. Arrows lead from the worker that was last to those who waited for it. Times are microseconds from the first
  step on, with nanoseconds behind the decimal point, as the format requires.

`scalars` gives the figures of one step, for any logger (docs/monitoring.md).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.analysis.timeline import KINDS, Slice, TimedStep, lay_out
from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog, evaluations, logged_figures
from paceline.observe.log.sanitise import PER_STEP, PER_WORKER
from paceline.observe.trackers import scalars
from paceline.observe.words.lines import describe
from paceline.observe.words.numbers import worker_name
from paceline.records import StepRecord

__all__ = ["scalars", "write_csv", "write_perfetto", "write_tensorboard"]

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
Event = dict[str, Any]
MOST_ROWS = 250_000
"""Steps times workers that are written at most, the last ones: the viewer takes a few hundred megabytes at most."""
WORTH_AN_ARROW = 0.05
"""Part of a step that a worker must have waited for an arrow to be drawn."""
PROCESS = 1


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


def write_perfetto(log: RunLog, path: Path) -> Path:
    """Write the trace, or only the last steps of a run too long for the viewer, and return its path."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(log)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        file.write("\n]}\n")
    return path


def trace_events(log: RunLog) -> Iterator[Event]:
    """Yield the events of the trace."""
    widest = max((len(record.workers) for record in log.records), default=1)
    kept = slice(-max(1, MOST_ROWS // widest), None)
    steps = list(lay_out(log.records[kept], log.times[kept]))
    zero = steps[0].start if steps else 0.0
    yield from _tracks(log, sorted({worker for step in steps for worker in step.record.workers}))
    arrows = 0
    for step in steps:
        yield from _step(step, zero)
        for event in _arrows(step, zero, first=arrows):
            arrows += event["ph"] == "s"
            yield event
    yield from _notes(log, zero, steps)


def _tracks(log: RunLog, workers: Iterable[int]) -> Iterator[Event]:
    named = log.machines
    yield _meta("process_name", 0, name=str(log.run.get("name") or "run"))
    for worker in workers:
        yield _meta("thread_name", worker + 1, name=worker_name(worker, named.get(worker)))
        yield _meta("thread_sort_index", worker + 1, sort_index=worker)


def _meta(kind: str, track: int, **args: Any) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": track, "name": kind, "args": args}


def _step(step: TimedStep, zero: float) -> Iterator[Event]:
    record = step.record
    for worker, planned, samples in zip(record.workers, record.planned, record.samples):
        args = {"samples": samples, "planned": planned, "epoch": record.epoch}
        yield _slice(f"step {record.step}", Slice(worker, "step", step.start, step.stop), zero, args)
    for piece in step.slices:
        yield _slice(piece.kind, piece, zero, {"what": KINDS[piece.kind]})
    if step.deadline is not None and step.start <= step.deadline <= step.stop:
        yield {"ph": "i", "s": "p", "pid": PROCESS, "tid": 0, "name": "deadline", "ts": _us(step.deadline - zero)}
    yield _counter("share", step, zero, {f"worker {w}": n for w, n in zip(record.workers, record.samples)})
    if record.wall_s > 0:
        yield _counter("samples/s", step, zero, {"fleet": record.total / record.wall_s})
    if record.loss is not None:
        yield _counter("loss", step, zero, {"loss": record.loss})


def _slice(name: str, piece: Slice, zero: float, args: Event) -> Event:
    start, stop = _ns(piece.start - zero), _ns(piece.stop - zero)  # rounded before the difference: slices stay nested
    event = {"ph": "X", "pid": PROCESS, "tid": piece.worker + 1, "name": name, "cat": piece.kind}
    return event | {"ts": start / 1000, "dur": (stop - start) / 1000, "args": args}


def _counter(name: str, step: TimedStep, zero: float, args: dict[str, float]) -> Event:
    return {"ph": "C", "pid": PROCESS, "tid": 0, "name": name, "ts": _us(step.start - zero), "args": args}


def _arrows(step: TimedStep, zero: float, *, first: int) -> Iterator[Event]:
    """Yield arrows from the end of the last worker's own work to the end of each wait for it."""
    culprit = next((p for p in reversed(step.slices) if p.worker == step.last and p.kind in ("compute", "late")), None)
    if culprit is None:
        return
    worth = WORTH_AN_ARROW * (step.stop - step.start)
    waits = [p for p in step.slices if p.kind == "waiting" and p.worker != culprit.worker and p.seconds > worth]
    for number, wait in enumerate(waits, start=first):
        shared = {"pid": PROCESS, "cat": "waited for", "name": f"waited for worker {culprit.worker}", "id": number}
        yield {"ph": "s", "tid": culprit.worker + 1, "ts": _within(culprit, zero), **shared}
        yield {"ph": "f", "bp": "e", "tid": wait.worker + 1, "ts": _within(wait, zero), **shared}


def _within(piece: Slice, zero: float) -> float:
    """Return a moment just before the slice's end: an arrow belongs to the slice that its end lies in."""
    return _us(piece.stop - zero - min(1e-6, piece.seconds / 2))


def _notes(log: RunLog, zero: float, steps: list[TimedStep]) -> Iterator[Event]:
    if not steps:
        return
    for event in [*log.others, *([log.end] if log.end else [])]:
        t, note = event.get("t"), describe(event)
        if note is not None and isinstance(t, (int, float)) and t >= zero:
            yield {"ph": "i", "s": "g", "pid": PROCESS, "tid": 0, "name": note[1], "ts": _us(t - zero)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(seconds: float) -> float:
    return _ns(seconds) / 1000
