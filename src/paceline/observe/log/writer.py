"""The event log: one JSON object a line in ``<run>/events.jsonl``, written behind the training loop's back.

`EventLog.write` only builds a shallow dict and puts it on a queue; a daemon thread encodes and writes a few times a
second. The log only watches and never stops a run: a full disk or a vanished folder is one warning.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.observe.log.folders import LOG_NAME
from paceline.observe.log.other_writers import OtherWriters
from paceline.observe.log.reader import ELASTIC_VERSION
from paceline.records import LOG_VERSION

logger = logging.getLogger("paceline.observe")

PERIOD_S = 0.2
"""The thread writes what has gathered this often; nothing stays unwritten longer than 0.5 s."""
MOST_EVENTS = 50_000
"""Events kept in memory while the disk does not keep up; what comes after is dropped, and the log says so."""
MOST_BYTES = 16 << 20
"""Encoded lines kept while the disk refuses them."""

Event = dict[str, Any]


def encode(event: Mapping[str, Any]) -> bytes:
    """One line of the log. NaN and infinity are null; NumPy and torch scalars are numbers.

    >>> encode({"event": "note", "x": float("nan")})
    b'{"event": "note", "x": null}\\n'
    """
    try:
        text = json.dumps(event, allow_nan=False)
    except (TypeError, ValueError):  # the rare event that needs a walk: the common one is encoded in one call
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


class EventLog:
    """Writes a run's events. ``write`` never blocks and never raises; ``close`` waits for what was written.

    A step is logged with ``log.write("step", **vars(record))``: the record is frozen, so the shallow copy is safe, and
    ``record.to_json()`` would copy deeply on the training thread. The event is returned, ready for `View.show`.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = concurrency.time, goes_on: bool = False) -> None:
        """``clock`` gives the events' time, in unix seconds. ``goes_on``: another worker began the run's log."""
        self.path, self._clock = Path(folder) / LOG_NAME, clock
        self._queue: concurrency.SimpleQueue[Event] = concurrency.SimpleQueue()
        self._dropped = 0
        self._warned = False
        self._unwritten = b""
        self._file = self._open()
        size = os.fstat(self._file).st_size if self._file >= 0 else 0
        self._others = OtherWriters(self._file, 0 if goes_on else size)
        self._stop = concurrency.Event()
        self._thread = concurrency.Thread(target=self._run, name="paceline-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, event: str, /, **fields: Any) -> Event:
        """Put an event on the queue with the time; the values must not change afterwards."""
        if event == "run":
            fields.setdefault("version", ELASTIC_VERSION if fields.get("transport") == "elastic" else LOG_VERSION)
        line = {"event": event, "t": self._clock(), **fields}
        if self._stop.is_set() or self._queue.qsize() >= MOST_EVENTS:
            self._dropped += 1
        else:
            self._queue.put(line)
        return line

    def close(self) -> None:
        """Write what is left (waiting a few seconds at most for a slow disk) and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._drain()
        self._drain()
        if self._file >= 0:
            os.close(self._file)

    def _drain(self) -> None:
        lines, size = [self._unwritten], len(self._unwritten)
        new: list[tuple[Event, bytes]] = []
        if self._dropped and not self._unwritten:  # the disk takes lines again: say what is missing
            dropped, self._dropped = self._dropped, 0
            text = f"{dropped} events are missing here: the disk did not keep up"
            lines.append(encode({"event": "note", "t": self._clock(), "level": "warning", "text": text}))
        while (event := self._next()) is not None:
            line = self._encode(event)
            if size + len(line) > MOST_BYTES:
                self._dropped += 1
                continue
            new.append((event, line))
            size += len(line)
            concurrency.sleep(0)  # hands the interpreter back: a long batch of lines never stalls the training
        if new and self._file >= 0:
            self._others.look()  # as late as can be: this process may have stood still since the events
        lines += [line for event, line in new if not self._others.void(event)]
        self._unwritten = self._put(b"".join(lines))

    def _next(self) -> Event | None:
        try:
            return self._queue.get_nowait()
        except concurrency.Empty:
            return None

    def _encode(self, event: Event) -> bytes:
        try:
            return encode(event)
        except Exception as error:
            self._warn(f"an event of kind {event.get('event')!r} could not be written as JSON ({error})")
            return b""

    def _put(self, data: bytes) -> bytes:
        """Write what can be written and return the rest. Unbuffered, so a forked child has nothing to write twice."""
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
