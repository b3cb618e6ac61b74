"""A run's figures for other tools: for trackers while it goes on, and in files when it is finished.

Every worker may log figures of the user's own (``fleet.log``, ``fleet.log_to``), and the leader of the moment writes to
Weights & Biases, TensorBoard, MLflow or a function, so that a figure is written once. None of these packages is needed
here: a writer is recognised by the method that it has. `scalars` gives the figures of one step, for any logger
(docs/monitoring.md).

The files are a CSV table, TensorBoard's event file, and a trace for Perfetto:

- The table has one line per step and worker, in the order of the log; a cell is empty where nothing was recorded.
- The event file is written by torch's own `SummaryWriter`, which needs TensorBoard's package.
- The Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open, has one track per worker: a slice for each
  step, and in it compute, lateness, waiting, the round and the rest. Counters hold the shares, samples per second and
  the loss. Arrows lead from the worker that was last to those who waited for it. Times are microseconds from the first
  step on, with nanoseconds behind the decimal point, as the format requires.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline import concurrency
from paceline.observe.analysis.timeline import KINDS, Slice, TimedStep, lay_out
from paceline.observe.log import sanitise
from paceline.observe.log.reader import RunLog, evaluations, logged_figures
from paceline.observe.log.sanitise import PER_STEP, PER_WORKER
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


# -- trackers ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger("paceline.observe")
Write = Callable[[dict[str, float], int], Any]
"""A function of figures by name and the step that they belong to."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the figures of a step by name, for TensorBoard, Weights & Biases, MLflow or any other logger.

    In a training loop, after the commit: ``wandb.log(scalars(step.record), step=step.index)``.
    What was not measured is left out.
    """
    figures: dict[str, float | None] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "speed/samples_per_s": record.total / record.wall_s if record.wall_s > 0 else None,
        "time/step_s": record.wall_s,
        "time/round_s": record.round_s,
        "time/deadline_s": record.deadline_s,
        "fleet/workers": len(record.workers),
        "fleet/undone": sum(max(0, p - s) for p, s in zip(record.planned, record.samples)),
    }
    figures |= {f"sum/{name}": value for name, value in record.sums.items()}
    figures |= {f"share/worker {worker}": n for worker, n in zip(record.workers, record.samples)}
    figures |= {f"compute_s/worker {worker}": s for worker, s in zip(record.workers, record.seconds)}
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def write_to(writer: Any) -> Write:
    """Return the function that gives figures to this writer.

    >>> write_to(lambda figures, step: print(step, figures))({"loss": 0.5}, 3)
    3 {'loss': 0.5}
    """
    if not isinstance(writer, logging.Logger):
        if callable(getattr(writer, "add_scalar", None)):  # torch's SummaryWriter, tensorboardX
            return lambda figures, step: [writer.add_scalar(name, value, step) for name, value in figures.items()]
        if callable(getattr(writer, "log_metrics", None)):  # mlflow, Lightning's loggers, Comet
            return lambda figures, step: writer.log_metrics(figures, step=step)
        if callable(getattr(writer, "log", None)):  # a run of wandb
            return lambda figures, step: writer.log(figures, step=step)
        if callable(writer):
            return lambda figures, step: writer(figures, step)
    raise ValueError(
        f"fleet.log_to takes a TensorBoard SummaryWriter, a wandb run, the mlflow module or a function of (figures, "
        f"step); {type(writer).__name__} has none of add_scalar, log_metrics and log: write a function that calls it"
    )


def check_figures(figures: Mapping[str, Any]) -> None:
    """Raise ValueError unless all figures are single numbers, without waiting for a device."""
    for name, value in figures.items():
        if not isinstance(name, str):
            raise ValueError(f"fleet.log takes figures by name, got the name {name!r}")
        single = callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", ())) == 1
        if not (single or isinstance(value, (int, float, np.number, np.bool_))):
            raise ValueError(
                f"fleet.log takes numbers, and {name!r} is a {type(value).__name__}: give anything else to your own "
                "logger, under fleet.is_leader"
            )


class Trackers:
    """The writers to which this worker gives figures while it is the leader."""

    def __init__(self, *, leads: Callable[[], bool], log_event: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._leads, self._log_event = leads, log_event
        self._writers: list[_Writer] = []

    def add(self, writer: Any, make: Callable[[], Any] | None) -> None:
        if writer is not None and make is not None:
            raise ValueError("fleet.log_to takes a writer or make=..., a function that makes one, not both")
        if make is not None and not callable(make):
            raise ValueError(f"fleet.log_to(make=...) takes a function that makes a writer, got {type(make).__name__}")
        if writer is not None or make is not None:
            self._writers.append(_Writer(writer, make))

    def log(self, figures: Mapping[str, Any], step: int) -> None:
        check_figures(figures)
        if not figures or not self._leads():
            return
        plain = {name: float(value) for name, value in figures.items()}
        self._log_event("log", {"step": step, "figures": plain})
        for writer in self._writers:
            writer.write(plain, step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class _Writer:
    """One writer, made when it is first needed."""

    def __init__(self, writer: Any, make: Callable[[], Any] | None) -> None:
        self._writer, self._make = writer, make
        self._write = write_to(writer) if writer is not None else None
        self._worked = self._warned = False

    def write(self, figures: dict[str, float], step: int) -> None:
        """Write figures; an error of the first call is raised, one of a later call is a warning.

        An error at first means a wrong set-up. Later a training must not end because a server cannot be reached.
        """
        try:
            if self._write is None:
                assert self._make is not None
                self._writer = self._make()
                self._write = write_to(self._writer)
            self._write(dict(figures), step)
        except Exception as error:
            if not self._worked:
                raise
            if not self._warned:
                name = type(self._writer).__name__
                logger.warning("fleet.log: %s failed (%s): the training goes on, figures may be missing", name, error)
            self._warned = True
        self._worked = True

    def close(self) -> None:
        """Close a writer that was made here; flush one that the user made."""
        calls = ("finish", "close") if self._make is not None else ("flush",)
        end = next((end for call in calls if callable(end := getattr(self._writer, call, None))), None)
        if end is None or self._write is None:
            return
        try:
            end()
        except Exception as error:
            logger.warning("fleet.log: %s could not be ended (%s)", type(self._writer).__name__, error)
