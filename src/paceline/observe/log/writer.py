"""The event log's writer: one JSON object per line in ``<run>/events.jsonl``, written on a thread of its own.

`EventLog.write` only builds a shallow dict and puts it on a queue; a daemon thread encodes and writes a few times per
second. The log never stops a run: a full disk or a vanished folder is one warning.

An elastic run has one writer at a time, its leader. A leader that froze or was cut off, and that the fleet went on
without, does not notice it when it wakes: its thread would write steps that the others have repeated since. So before
each write it reads what others have appended (`OtherWriters`), and leaves out what a later generation of theirs voids.
It may freeze just then and write all the same: readers leave such lines out too
(`paceline.observe.analysis.generations`).
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from paceline import concurrency
from paceline.observe.analysis.generations import GenerationEvent, parse_generation
from paceline.observe.log import sanitise
from paceline.observe.log.reader import ELASTIC_VERSION, parse_line
from paceline.observe.log.run_folder import LOG_NAME
from paceline.records import LOG_VERSION

logger = logging.getLogger("paceline.observe")

PERIOD_S = 0.2
"""Seconds between two writes of the thread; nothing stays unwritten longer than 0.5 s."""
MOST_EVENTS = 50_000
"""Events kept in memory while the disk does not keep up; later ones are dropped, and a note in the log counts them."""
MOST_BYTES = 16 << 20
"""Bytes of encoded lines kept while the disk refuses them."""
SLOW_DISK_S = 5.0
"""Seconds for which `EventLog.flush` and `EventLog.close` wait."""

Event = dict[str, Any]
Item = TypeVar("Item")
RUN, GENERATION = b'{"event": "run"', b'{"event": "generation"'
"""First bytes of the lines that are parsed; all others are skipped."""
AT_ONCE = 1 << 20
"""Bytes per read."""


def encode(event: Mapping[str, Any]) -> bytes:
    r"""Return an event as one line of the log. NaN and infinity are null; NumPy and torch scalars are numbers.

    >>> encode({"event": "note", "x": float("nan")})
    b'{"event": "note", "x": null}\n'
    """
    try:
        text = json.dumps(event, allow_nan=False)
    except (TypeError, ValueError):  # rare: the common event is encoded in one call
        text = json.dumps(_plain(event), allow_nan=False)
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _taken(queue: concurrency.SimpleQueue[Item]) -> Iterator[Item]:
    """Take items off a queue until it is empty."""
    with suppress(concurrency.Empty):
        while True:
            yield queue.get_nowait()


class EventLog:
    """The writer of a run's events. ``write`` never blocks and never raises; ``close`` waits for what was written.

    A step is logged with ``log.write("step", **vars(record))``: the record is frozen, so the shallow copy is safe, and
    ``record.to_json()`` would copy deeply on the training thread. The event is returned, ready for `View.show`.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = concurrency.time, goes_on: bool = False) -> None:
        """Open the log in ``folder``.

        ``clock`` returns the events' time in Unix seconds. ``goes_on``: another worker began the run's log.
        """
        self.path, self._clock = Path(folder) / LOG_NAME, clock
        self._queue: concurrency.SimpleQueue[Event] = concurrency.SimpleQueue()
        self._dropped = 0
        self._warned = False
        self._unwritten = b""
        self._file = self._open()
        size = os.fstat(self._file).st_size if self._file >= 0 else 0
        self._others = OtherWriters(self._file, 0 if goes_on else size)
        self._stop, self._wake = concurrency.Event(), concurrency.Event()
        self._flushes: concurrency.SimpleQueue[concurrency.Event] = concurrency.SimpleQueue()
        """One per `flush` under way, set when its events are written."""
        self._thread = concurrency.Thread(target=self._run, name="paceline-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, event: str, /, **fields: Any) -> Event:
        """Put an event on the queue with the time, and return it; the values must not change afterwards."""
        if event == "run":
            fields.setdefault("version", ELASTIC_VERSION if fields.get("transport") == "elastic" else LOG_VERSION)
        line = {"event": event, "t": self._clock(), **fields}
        if self._stop.is_set() or self._queue.qsize() >= MOST_EVENTS:
            self._dropped += 1
        else:
            self._queue.put(line)
        return line

    def flush(self) -> None:
        """Write what is on the queue now, waiting at most 5 s for a slow disk."""
        written = concurrency.Event()
        self._flushes.put(written)
        self._wake.set()
        if self._thread.is_alive():
            written.wait(SLOW_DISK_S)

    def close(self) -> None:
        """Write what is left, waiting at most 5 s for a slow disk, and end the thread."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=SLOW_DISK_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            self._write_out()
        self._write_out()
        if self._file >= 0:
            os.close(self._file)

    def _write_out(self) -> None:
        asked = list(_taken(self._flushes))
        self._drain()
        for written in asked:
            written.set()

    def _drain(self) -> None:
        lines, size = [self._unwritten], len(self._unwritten)
        new: list[tuple[Event, bytes]] = []
        if self._dropped and not self._unwritten:  # the disk takes lines again: log how many are missing
            dropped, self._dropped = self._dropped, 0
            text = f"{dropped} events are missing here: the disk did not keep up"
            lines.append(encode({"event": "note", "t": self._clock(), "level": "warning", "text": text}))
        for event in _taken(self._queue):
            line = self._encode(event)
            if size + len(line) > MOST_BYTES:
                self._dropped += 1
                continue
            new.append((event, line))
            size += len(line)
            concurrency.sleep(0)  # releases the interpreter: a long batch of lines never stalls the training
        if new and self._file >= 0:
            self._others.look()  # as late as possible: this process may have been frozen since the events
        lines += [line for event, line in new if not self._others.void(event)]
        self._unwritten = self._put(b"".join(lines))

    def _encode(self, event: Event) -> bytes:
        try:
            return encode(event)
        except Exception as error:
            self._warn(f"an event of kind {event.get('event')!r} could not be written as JSON ({error})")
            return b""

    def _put(self, data: bytes) -> bytes:
        """Write what the disk takes and return the rest; unbuffered, so that a forked child repeats nothing."""
        if self._file < 0:
            return b""
        try:
            while data:
                written = os.write(self._file, data)
                self._others.passed(written)
                data = data[written:]
        except OSError as error:
            self._warn(f"cannot write {self.path} ({error.strerror or error}): the run goes on, its log may have gaps")
            return data
        if os.fstat(self._file).st_nlink == 0:
            self._warn(f"{self.path} was deleted: the run goes on without a log")
            os.close(self._file)
            self._file = -1
        return b""

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._warn(f"cannot write {self.path} ({error.strerror or error}): the run goes on without a log")
            return -1
        if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
            self._unwritten = b"\n"  # an earlier writer was cut off in the middle of a line
        return file

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)


class OtherWriters:
    """The generations that other processes have announced in a log; each `look` reads what was appended since."""

    def __init__(self, file: int, position: int) -> None:
        """Begin at byte ``position`` of the log ``file``, which is open for reading."""
        self._file, self._position = file, position
        self._generations: list[GenerationEvent] = []
        self._begun = False
        """Whether another process has begun the log."""

    def look(self) -> None:
        """Read the complete lines that were appended since the last call; an unreadable file is ignored."""
        try:
            for line in self._lines():
                self._add(line)
        except OSError:
            return

    def passed(self, written: int) -> None:
        """Skip ``written`` bytes of this process, unless another one wrote between the last look and them."""
        if os.lseek(self._file, 0, os.SEEK_CUR) == self._position + written:
            self._position += written

    def void(self, event: Mapping[str, Any]) -> bool:
        """Return whether the others have voided this event.

        That is a step at or after which a later generation began, a generation earlier than theirs, or the beginning of
        a log that they have begun.
        """
        if event["event"] == "run":
            return self._begun
        if event["event"] == "generation":
            return any(each.number > sanitise.count_or(event.get("number"), 0) for each in self._generations)
        if event["event"] != "step":
            return False
        step, number = (sanitise.count_or(event.get(name), 0) for name in ("step", "generation"))
        return any(each.number > number and each.step <= step for each in self._generations)

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        while data := os.pread(self._file, AT_ONCE, self._position + len(rest)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._position += len(line) + 1
                yield line

    def _add(self, line: bytes) -> None:
        if line.startswith(RUN):
            self._generations, self._begun = [], True
        elif line.startswith(GENERATION) and (change := parse_generation(parse_line(line) or {})) is not None:
            self._generations.append(change)
