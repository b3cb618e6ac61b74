"""The views for logs, pipes and notebooks: one line every few seconds, or warnings alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from paceline import concurrency
from paceline.observe.analysis.progress import Progress
from paceline.observe.words.lines import describe, line_of, run_line, step_line

SHORTEST_S, LONGEST_S = 2.0, 30.0
"""Seconds between two lines, at the start and after half an hour: a long run is not worth a line every two seconds."""


class PlainView:
    """A view that prints the first step, the last, and one every few seconds between; notes and results at once."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress()
        self._started: float | None = None
        self._printed_at = 0.0
        self._unprinted = False

    def show(self, event: Mapping[str, Any]) -> None:
        self._progress.add(event)
        kind = event.get("event")
        if kind == "run":
            self._print(run_line(event))
        elif kind == "step":
            self._unprinted = True
            if self._due():
                self._print_step()
        elif (note := describe(event)) is not None:
            self._print(line_of(*note))
        if kind == "end":
            self.close()

    def close(self) -> None:
        if self._unprinted:
            self._print_step()

    def _due(self) -> bool:
        now = self._clock()
        if self._started is None:
            self._started = now
            return True
        every = min(LONGEST_S, max(SHORTEST_S, (now - self._started) / 60))
        return now - self._printed_at >= every

    def _print_step(self) -> None:
        self._unprinted = False
        self._printed_at = self._clock()
        self._print(step_line(self._progress.snapshot()))

    def _print(self, text: str) -> None:
        print_line(self._stream, text)


class WarningsView:
    """A view that prints the run's warnings alone: what a quiet run still shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, event: Mapping[str, Any]) -> None:
        note = describe(event) if event.get("event") == "note" else None
        if note is not None and note[0] not in ("info", "news"):
            print_line(self._stream, line_of(*note))

    def close(self) -> None:
        pass


def print_line(stream: TextIO, text: str) -> None:
    """Print a line; a reader that went away, or an encoding without the character, does not stop the training."""
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError, LookupError):
        pass
