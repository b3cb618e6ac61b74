"""The workers' output, and why workers failed.

Worker 0's lines are printed unchanged, the others' with their number in front.

Error messages are held back. A traceback, a usage message or a ``paceline: `` line may be the last that a worker
writes, and when one worker fails the others soon follow with the same lines or with complaints about the first. So from
such a line on, a worker's stderr is held until the worker ends, or for two seconds if it lives on: a process that has
loaded torch takes most of a second to end. Then the first failure is printed in full, and the others are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.errors import FLEET_FAILED
from paceline.launcher.worker_process import LaunchedWorker
from paceline.roster.calls import listed

if TYPE_CHECKING:
    from paceline.observe import RunLog


HOLD_S = 2.0
MOST_HELD = 5000
"""The most lines that are held back; a worker that writes more lives on."""
PARTIAL_S = 0.1
"""Time after which worker 0's unfinished line (a progress bar, a prompt) is printed."""

ERROR_START = re.compile(r'.*Traceback \(most recent call last\):$|  File "[^"]*", line \d+$|paceline: |usage: ')
ENGINE_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""The prefix of torch.distributed before each line of a traceback; the launcher has a prefix of its own."""


class OutputStream:
    """Stdout or stderr of one worker, cut into lines; ``out`` receives text ready to print, line ends included."""

    def __init__(self, number: int, out: Callable[[str], None], *, holds: bool) -> None:
        self.held: list[str] = []
        """Lines held back, without prefix and line end."""
        self.held_since: float | None = None
        self.shown: list[str] = []
        """The lines that were held back last, and then printed because the worker lived on."""
        self.shown_since: float | None = None
        self._number, self._out, self._holds = number, out, holds
        self._partial = b""
        self._partial_since = 0.0
        self._mid_line = False

    def feed(self, data: bytes, now: float) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line.decode(errors="replace").removesuffix("\r"), now)
        self._partial_since = now if lines or not self._partial else self._partial_since
        self._partial = rest

    def tick(self, now: float, *, failing: bool) -> None:
        """Print what has waited long enough; while the fleet is failing, held lines wait for the worker's end."""
        if self.held_since is not None and not failing and now - self.held_since > HOLD_S:
            self.release()
        if self._number == 0 and self._partial and self.held_since is None and now - self._partial_since > PARTIAL_S:
            self._show_partial(self._partial.decode(errors="replace"))

    def _show_partial(self, text: str) -> None:
        if not (self._holds and ERROR_START.match(text)):  # else it is held back, once the line is complete
            self._out(text)
            self._partial, self._mid_line = b"", True

    def close(self, now: float) -> None:
        """End the stream: an unfinished line counts as a line."""
        if self._partial:
            self.feed(b"\n", now)

    def release(self) -> None:
        """Print the lines that were held back."""
        self.shown, self.shown_since = self.held, self.held_since
        self.held, self.held_since = [], None
        for line in self.shown:
            self._print(line)

    def _line(self, text: str, now: float) -> None:
        text = ENGINE_PREFIX.sub("", text) if self._holds else text
        if self.held_since is None and not (self._holds and ERROR_START.match(text)):
            self._print(text)
            return
        self.held_since = now if self.held_since is None else self.held_since
        self.held.append(text)
        if len(self.held) > MOST_HELD:
            self.release()

    def _print(self, text: str) -> None:
        if self._number:
            text = text.rpartition("\r")[2]  # the last state of a progress bar, as a terminal would show it
        self._out(f"{text}\n" if self._mid_line else prefixed(self._number, text))
        self._mid_line = False


def prefixed(number: int, text: str) -> str:
    r"""Return a worker's line as it is printed.

    >>> prefixed(2, "loss 0.3")
    '[2] loss 0.3\n'
    """
    return f"[{number}] {text}\n" if number else f"{text}\n"


def headline(lines: list[str]) -> str:
    """Return the most telling line of an error message: the one with the exception's name, else the last line.

    >>> headline(["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no", "a warning"])
    'ValueError: no'
    """
    starts = [i for i, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    after = lines[starts[-1] + 1 :] if starts else []
    unindented = [line for line in after if line.strip() and not line.startswith(" ")]
    return (unindented or [line for line in reversed(lines) if line.strip()] or [""])[0].strip()


RECENT_S = 10.0
"""Greatest age of an error message, already printed, that is taken for the cause of a death."""


class WorkerFailure:
    """The failure of one worker that ended by itself, and its error message: its last lines on stderr."""

    def __init__(self, worker: LaunchedWorker, at: float) -> None:
        assert worker.code is not None
        self.number, self.code, self.at = worker.number, worker.code, at
        self.ended = worker.ended
        self._stderr = worker.stderr

    @property
    def began(self) -> float:
        """When the worker's message began, else when the worker ended: the first failure to begin is the cause."""
        since = [self._stderr.held_since, self._stderr.shown_since]
        return min([time for time in since if time is not None and self.at - time < RECENT_S], default=self.at)

    @property
    def shown(self) -> bool:
        """Whether the message was already printed, because the worker took long to end after it."""
        return not self._stderr.held and self.began < self.at

    @property
    def lines(self) -> list[str]:
        return self._stderr.held or (self._stderr.shown if self.shown else [])

    @property
    def report(self) -> list[str]:
        """The worker's message, ready to print."""
        if self.shown:
            return []
        if self.code == FLEET_FAILED:  # the message names another worker
            return [f"{line}\n" for line in self.lines if line.startswith("paceline: ")]
        return [prefixed(self.number, line) for line in self.lines]

    @property
    def summary(self) -> str:
        """What happened, in one line."""
        message = headline(self.lines).removeprefix("paceline: ")
        if message and self.code == FLEET_FAILED:  # the message names another worker
            return message
        return f"worker {self.number} {self.ended}" + (f": {_cut(message)}" if message else "")

    def printed_by(self, output: OutputStream) -> bool:
        """Return whether another worker, which takes long to end, has printed the same message already."""
        recent = output.shown_since is not None and self.at - output.shown_since < RECENT_S
        return recent and bool(self.lines) and headline(output.shown) == headline(self.lines)

    def like(self, other: WorkerFailure) -> bool:
        """Return whether both ended in the same way with the same message."""
        return self.code == other.code and headline(self.lines) == headline(other.lines)

    def same_cause(self, other: WorkerFailure) -> bool:
        """Return whether both have one cause: the same error of the script, or the fleet's failure.

        Each worker describes the fleet's failure in its own words, so there the messages may differ.
        """
        return self.like(other) or self.code == other.code == FLEET_FAILED


def first_of(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Return the cause: the first failure that the fleet's failure did not cause, or the first of all without one."""
    return min(failures, key=lambda failure: (failure.code == FLEET_FAILED, failure.began))


def others(first: WorkerFailure, failures: Sequence[WorkerFailure]) -> list[str]:
    """Return lines, ready to print, about the other workers that failed by themselves."""
    rest = [f for f in failures if f is not first and f.code != FLEET_FAILED]
    same = [failure.number for failure in rest if failure.like(first)]
    lines = [f"({listed(same, {})} failed the same way)\n"] if same else []
    for failure in rest:
        if not failure.like(first):
            message = headline(failure.lines)
            lines.append(f"(worker {failure.number} then {failure.ended}{': ' + _cut(message) if message else ''})\n")
    return lines


def closing(first: WorkerFailure, failures: Sequence[WorkerFailure], workers: Sequence[LaunchedWorker]) -> str:
    """Return one line with the cause and what became of the others; empty when the messages above suffice."""
    by_themselves = {failure.number for failure in failures if failure.code != FLEET_FAILED}
    stopped = [worker.number for worker in workers if worker.code != 0 and worker.number not in by_themselves]
    killed = first.code < 0
    if first.code == FLEET_FAILED or (first.lines and not stopped and not killed) or (len(workers) == 1 and not killed):
        return ""
    what = f"worker {first.number} {first.ended}"
    what += f"; {_the_others(len(stopped), len(workers))}." if stopped else "."
    return what + (" (Often the machine ran out of memory.)" if first.code == -9 else "")


def resume_hint(log: RunLog | None) -> str:
    """Return how to continue the training, as far as the run's log shows."""
    if log is None or not log.records:
        return ""
    return checkpoint_hint(log) or "Nothing was saved with fleet.save: the next run starts from the beginning."


def checkpoint_hint(log: RunLog | None) -> str:
    """Return a sentence on the last checkpoint in the log, saved or loaded, and how to use it; empty without one."""
    kept = [event for event in log.others if event.get("event") in ("save", "load")] if log is not None else []
    if not kept:
        return ""
    which = f"{kept[-1].get('path')} (step {kept[-1].get('step')})"
    if kept[-1]["event"] == "load":
        return f"Nothing was saved since {which} was loaded: a script that calls fleet.load starts from it again."
    return f"The last checkpoint is {which}: start again with a script that calls fleet.load on it."


def joined(*parts: str) -> str:
    """Return the sentences on one line, without the empty ones."""
    return " ".join(filter(None, parts))


def _cut(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."


def _the_others(stopped: int, size: int) -> str:
    if stopped == 1:
        return "the other one was stopped" if size == 2 else "one other was stopped"
    return f"the other {stopped} were stopped" if stopped == size - 1 else f"{stopped} others were stopped"
