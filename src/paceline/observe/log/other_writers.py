"""What other processes append to a log that this one writes too.

An elastic run has one writer at a time, its leader. A leader that froze, or was cut off, and that the fleet went on
without, does not know it when it wakes: its thread would write steps that the others have made again since. So before
each write it reads what others have appended, and leaves out what a later generation of theirs voids. It may freeze
just then and write all the same: readers leave such lines out too (`paceline.observe.analysis.membership`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.observe.analysis.membership import GenerationEvent, parse_generation
from paceline.observe.log import sanitise
from paceline.observe.log.reader import parse_line

RUN, GENERATION = b'{"event": "run"', b'{"event": "generation"'
"""How the lines begin that are parsed; all others are passed over unread."""
AT_ONCE = 1 << 20
"""Bytes read at once."""


class OtherWriters:
    """The generations that others have announced in a log, read on from where it was last looked at."""

    def __init__(self, file: int, position: int) -> None:
        """``file``: the log, open for reading; ``position``: where to begin, in bytes."""
        self._file, self._position = file, position
        self._generations: list[GenerationEvent] = []
        self._begun = False
        """Whether others have begun the log."""

    def look(self) -> None:
        """Read what was appended since, as far as there are whole lines; the file may be unreadable."""
        try:
            for line in self._lines():
                self._add(line)
        except OSError:
            return

    def passed(self, written: int) -> None:
        """Pass over ``written`` bytes of this process, unless somebody wrote between the last look and them."""
        if os.lseek(self._file, 0, os.SEEK_CUR) == self._position + written:
            self._position += written

    def void(self, event: Mapping[str, Any]) -> bool:
        """Whether it is a step that a later generation began at or before, a generation earlier than theirs, or the
        beginning of a log that they have begun."""
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
