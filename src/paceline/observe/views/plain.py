"""The view for logs, pipes and notebooks: one line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from paceline.observe.analysis.progress import (
    Progress,
    ProgressSnapshot,
    count_text,
    deadline_text,
    describe,
    left_text,
    loss_text,
    of,
    rounds_behind,
)
from paceline.observe.words.numbers import number, percent

SHORTEST_S, LONGEST_S = 2.0, 30.0
"""Seconds between two lines: the shorter at the start; a run of hours is not worth a line every two seconds."""
MOST_SHARES = 16


class PlainView:
    """Prints the first step, the last, and one every few seconds between; notes and results at once."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
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
        elif (said := describe(event)) is not None:
            self._print(line_of(*said))
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
        """A reader that went away, or a terminal without the character, is no reason to stop training."""
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError, LookupError):
            pass


def line_of(level: str, text: str) -> str:
    """What is described, with its level where that is worth a word."""
    return text if level in ("info", "news") else f"{level}: {text}"


def run_line(event: Mapping[str, Any]) -> str:
    """``digits: 4 workers, pace adaptive, combine gradients, gloo``."""
    workers = event.get("workers")
    count = len(workers) if isinstance(workers, (list, tuple)) else 0
    said = [f"{count} worker{'' if count == 1 else 's'}"] if count else []
    said += [f"{key} {event[key]}" for key in ("pace", "combine") if event.get(key)]
    said += [str(event["backend"])] if event.get("backend") else []
    return f"{event.get('name') or 'run'}: {', '.join(said)}"


def step_line(now: ProgressSnapshot) -> str:
    """``step 40/113  epoch 2/3  1,204 samples/s (93 % of limit)  shares 93 93 47 23  loss 0.412  12 s left``.

    With deadlines also ``121 of 128 samples  deadline 106 ms  worker 2 late, 3 rounds behind``.
    """
    said = [f"step {of(now.step, now.steps)}", f"epoch {of(now.epoch, now.epochs)}"]
    limit = f" ({percent(now.of_limit)} of limit)" if now.limit else ""
    said.append(f"{number(now.samples_per_s)} samples/s{limit}")
    here = now.present
    more = f" and {len(here) - MOST_SHARES} more" if len(here) > MOST_SHARES else ""
    said.append("shares " + " ".join(str(row.samples) for row in here[:MOST_SHARES]) + more)
    said += [text for text in (count_text(now), deadline_text(now), late_text(now)) if text]
    said += [f"loss {loss_text(now.loss)}"] if now.loss is not None else []
    said += [left_text(now)] if now.left_s is not None else []
    return "  ".join(said)


def late_text(now: ProgressSnapshot) -> str:
    """Who is late; of many, how many and who is furthest behind."""
    if not now.late:
        return ""
    worst = max(now.late, key=lambda row: row.behind)
    if len(now.late) == 1:
        return f"worker {worst.worker} {worst.mark}"
    furthest = f" (worker {worst.worker}: {rounds_behind(worst.behind)})" if worst.behind else ""
    return f"{len(now.late)} workers late{furthest}"
