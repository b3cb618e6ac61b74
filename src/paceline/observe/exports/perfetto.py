"""A run as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One track per worker: a slice for each step, and in it compute, lateness, waiting, the round and the rest. Counters hold
the shares, samples per second and the loss. Arrows lead from the worker that was last to those who waited for it.
Times are microseconds from the first step on, with nanoseconds behind the decimal point, as the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.observe.analysis.timeline import KINDS, Slice, TimedStep, lay_out
from paceline.observe.log.reader import RunLog
from paceline.observe.words.lines import describe
from paceline.observe.words.numbers import worker_name

Event = dict[str, Any]

MOST_ROWS = 250_000
"""Steps times workers that are written at most, the last ones: the viewer takes a few hundred megabytes at most."""
WORTH_AN_ARROW = 0.05
"""Part of a step that a worker must have waited for an arrow to be drawn."""
PROCESS = 1


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
