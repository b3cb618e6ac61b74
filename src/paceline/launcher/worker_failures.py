"""Failed workers and why they failed, in few words: the first failure is printed in full, the others are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import FLEET_FAILED
from paceline.launcher.output import OutputStream, headline, prefixed
from paceline.launcher.worker_process import LaunchedWorker
from paceline.roster.calls import listed

if TYPE_CHECKING:
    from paceline.observe import RunLog

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
