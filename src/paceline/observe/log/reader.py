"""The event log's reader, for a log that is complete (`read_log`) or still being written (`follow`).

`evaluations` are the results of `fleet.evaluate` in it, and `logged_figures` those of `fleet.log`.

Both accept what happens to logs: a last line cut off by a kill, lines that are not JSON, unknown events and fields, a
newer version.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.analysis import generations
from paceline.observe.log import sanitise
from paceline.observe.log.run_folder import log_file
from paceline.observe.log.sanitise import sanitised
from paceline.observe.words.numbers import machines
from paceline.records import LOG_VERSION, StepRecord

logger = logging.getLogger("paceline.observe")

Event = dict[str, Any]

ELASTIC_VERSION = LOG_VERSION + 1
"""Version in the logs of elastic runs: some of their records are void, and an older reader would count them."""


@dataclass(frozen=True)
class RunLog:
    """A run as it stands in its log. When a run was restarted into the same folder, the last start counts."""

    path: Path
    run: Mapping[str, Any] = field(default_factory=dict)
    """The ``run`` event: name, pace, workers and so on. Empty when the log has none."""
    loops: tuple[Mapping[str, Any], ...] = ()
    """The ``steps`` events, one per loop that was started."""
    records: tuple[StepRecord, ...] = ()
    times: tuple[float, ...] = ()
    """Unix seconds at which each record was logged; NaN where the log has no time."""
    others: tuple[Mapping[str, Any], ...] = ()
    """Notes, evaluations, saves, generations, and events unknown to this version, in order."""
    end: Mapping[str, Any] | None = None
    """The ``end`` event; None while the run goes on, or when it was killed."""
    unreadable: int = 0
    """Number of lines that could not be parsed, a cut-off last one included."""

    @property
    def elastic(self) -> bool:
        """Return whether workers could come and go."""
        return self.run.get("transport") == "elastic"

    @property
    def changes(self) -> list[generations.GenerationEvent]:
        """Return the changes of membership, in order."""
        return generations.changes(self.others)

    @property
    def machines(self) -> dict[int, str]:
        """Return every worker's machine, by identity."""
        return machines(self.run, (entry for change in self.changes for entry in change.machines))


def read_log(path: Path) -> RunLog:
    """Read a run's folder or its ``events.jsonl``. Raises ValueError when there is no such log."""
    file = log_file(path)
    parser = _LogParser()
    try:
        with file.open("rb") as lines:
            for line in lines:
                parser.add(line)
    except OSError as error:
        advice = "give a run's folder or its events.jsonl"
        raise ValueError(f"no event log at {file} ({error.strerror or error}): {advice}") from error
    log = parser.log(file)
    if isinstance(version := log.run.get("version"), int) and version > ELASTIC_VERSION:
        logger.warning("%s was written by a newer Paceline (log version %d, known %d)", file, version, ELASTIC_VERSION)
    return log


def follow(path: Path, *, stop: concurrency.Event | None = None, poll_s: float = 0.1) -> Iterator[Event]:
    """Yield the events of a log as they are written, from its beginning; the file need not exist yet.

    After ``stop`` is set, what is still in the file is yielded and the generator ends. Without ``stop`` it never ends
    by itself: leave it at an ``end`` event, or when the writers are gone.
    """
    stop = stop or concurrency.Event()
    file, position, rest = Path(path), 0, b""
    while True:
        last_look = stop.is_set()
        data, position, restarted = _read_on(log_file(file), position)
        *lines, rest = ((b"" if restarted else rest) + data).split(b"\n")
        yield from (event for line in lines if line.strip() and (event := parse_line(line)) is not None)
        if data:
            continue
        if last_look:
            return
        stop.wait(poll_s)


def parse_line(line: bytes) -> Event | None:
    """Return the event in a line of the log; None for anything that is not one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if event["event"] == "run" and "wire" in event:  # its name until 0.2
        event.setdefault("comm_dtype", event.pop("wire"))
    return event


def parse_step(event: Mapping[str, Any]) -> StepRecord | None:
    """Return the record in a ``step`` event, `sanitised`; None when a necessary field is missing or wrong."""
    try:
        record = sanitised(StepRecord.from_json(event))
        size = len(record.workers)
    except (TypeError, ValueError, OverflowError):
        return None
    complete = size > 0 and len(record.planned) == len(record.samples) == len(record.seconds) == size
    numbers = (record.step, record.epoch, record.generation, *record.workers)
    numbered = all(sanitise.count_or(number, -1) >= 0 for number in numbers) and len({*record.workers}) == size
    return record if complete and numbered and isinstance(record.ranges, tuple) else None


def _read_on(file: Path, position: int) -> tuple[bytes, int, bool]:
    """Return the bytes after ``position``, the new position, and whether a shorter file took the place of this one."""
    try:
        with file.open("rb") as stream:
            restarted = os.fstat(stream.fileno()).st_size < position
            stream.seek(0 if restarted else position)
            data = stream.read(1 << 20)
            return data, stream.tell(), restarted
    except OSError:
        return b"", position, False


class _LogParser:
    """The parts of a `RunLog`, collected line by line: a long log is never in memory as text."""

    def __init__(self) -> None:
        self._unreadable = 0
        self._begin({})

    def _begin(self, run: Event) -> None:
        self._run = run
        self._loops: list[Event] = []
        self._steps: list[generations.Timed] = []
        self._filter = generations.RecordFilter()
        self._others: list[Event] = []
        self._end: Event | None = None

    def add(self, line: bytes) -> None:
        event = parse_line(line)
        if event is None:
            self._unreadable += bool(line.strip())
        elif event["event"] == "step":
            self._add_step(event)
        elif event["event"] == "run" and self._steps and not self._run:
            self._run = event  # the first writer froze before it wrote this line, and wrote it late
        elif event["event"] == "run":
            self._begin(event)
        elif event["event"] == "steps":
            self._loops.append(event)
        elif event["event"] == "end":
            self._end = event
        else:
            self._others.append(event)
            if (change := generations.parse_generation(event)) is not None:
                self._filter.begin_generation(change, self._steps)

    def _add_step(self, event: Event) -> None:
        if (record := parse_step(event)) is None:
            self._unreadable += 1
            return
        if self._filter.is_void(record):
            return
        step = (record, sanitise.timestamp(event.get("t")))
        self._filter.take_note(record, self._steps)
        if self._filter.is_late(record):
            generations.insert_late(self._steps, step)
        else:
            self._steps.append(step)

    def log(self, path: Path) -> RunLog:
        return RunLog(
            path=path,
            run=self._run,
            loops=tuple(self._loops),
            records=tuple(record for record, _ in self._steps),
            times=tuple(t for _, t in self._steps),
            others=tuple(self._others),
            end=self._end,
            unreadable=self._unreadable,
        )


MEANS = {"correct": "accuracy"}
"""Name of the mean of a sum over samples, where it has one of its own."""


@dataclass(frozen=True)
class Evaluation:
    """Results after a step, as means over the samples where a count was given."""

    step: int
    t: float
    """Unix seconds; NaN when not logged."""
    means: Mapping[str, float]


def evaluations(events: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return the evaluations among a log's events, in order; results that are no numbers are left out."""
    found = [event for event in events if event.get("event") == "evaluate"]
    return [
        Evaluation(step, t, _means(numbers, event.get("means")))
        for event in found
        for step, t, numbers in _figures([event], "evaluate", "result")
    ]


def logged_figures(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield, per call of `fleet.log`, step, Unix seconds (NaN when not logged), and the figures that are numbers."""
    yield from _figures(events, "log", "figures")


def _figures(events: Iterable[Mapping[str, Any]], kind: str, key: str) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield, for each event of a ``kind``, step, Unix seconds, and the numbers under ``key``."""
    for event in events:
        values, step = event.get(key), sanitise.count_or(event.get("step"), -1)
        if event.get("event") == kind and isinstance(values, Mapping) and step >= 0:
            yield step, sanitise.timestamp(event.get("t")), _numbers(values)


def _means(numbers: dict[str, float], already: Any) -> dict[str, float]:
    """Divide the sums by the number of samples; ``already`` names those that are means already."""
    count, means = numbers.pop("count", 0.0), already if isinstance(already, list) else []
    if count < 1:
        return numbers
    return {MEANS.get(k, k): v if k in means else v / count for k, v in numbers.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in ((k, _number(v)) for k, v in values.items()) if v is not None}


def _number(value: Any) -> float | None:
    try:
        return sanitise.figure(value) if sanitise.is_number(value) else None
    except OverflowError:  # a whole number beyond every float
        return None
