"""Why a fleet failed, in as few words as possible: the first failure is printed, the others are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import FLEET_FAILED
from paceline.launcher.output import OutputStream, headline, prefixed
from paceline.launcher.processes import LaunchedWorker
from paceline.roster.calls import listed

if TYPE_CHECKING:
    from paceline.observe import RunLog

RECENT_S = 10.0
"""An error message that was already printed belongs to a death when it is not older than this."""


class WorkerFailure:
    """A worker that ended by itself and not well, and its error message: what it wrote last to stderr."""

    def __init__(self, worker: LaunchedWorker, at: float) -> None:
        assert worker.code is not None
        self.number, self.code, self.at = worker.number, worker.code, at
        self.ended = worker.ended
        self._stderr = worker.stderr

    @property
    def began(self) -> float:
        """When its message began, else when it ended: the first to begin is the cause."""
        since = [self._stderr.held_since, self._stderr.shown_since]
        return min([time for time in since if time is not None and self.at - time < RECENT_S], default=self.at)

    @property
    def shown(self) -> bool:
        """Whether its message is already on the screen: the worker took long to end after it."""
        return not self._stderr.held and self.began < self.at

    @property
    def lines(self) -> list[str]:
        return self._stderr.held or (self._stderr.shown if self.shown else [])

    @property
    def report(self) -> list[str]:
        """Its message, ready to print."""
        if self.shown:
            return []
        if self.code == FLEET_FAILED:  # the message names another worker
            return [f"{line}\n" for line in self.lines if line.startswith("paceline: ")]
        return [prefixed(self.number, line) for line in self.lines]

    @property
    def told(self) -> str:
        """What happened, in one line."""
        said = headline(self.lines).removeprefix("paceline: ")
        if said and self.code == FLEET_FAILED:  # the message names another worker
            return said
        return f"worker {self.number} {self.ended}" + (f": {_cut(said)}" if said else "")

    def printed_by(self, output: OutputStream) -> bool:
        """Whether the same message is on the screen already: a worker that takes long to end has printed it."""
        recent = output.shown_since is not None and self.at - output.shown_since < RECENT_S
        return recent and bool(self.lines) and headline(output.shown) == headline(self.lines)

    def like(self, other: WorkerFailure) -> bool:
        """Whether both ended in the same way with the same message."""
        return self.code == other.code and headline(self.lines) == headline(other.lines)

    def same_cause(self, other: WorkerFailure) -> bool:
        """Whether both have one cause: the script's, or the fleet's (which each worker tells in its own words)."""
        return self.like(other) or self.code == other.code == FLEET_FAILED


def first_of(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The cause: the first that failed by itself. One that the fleet's failure ended only if all were."""
    return min(failures, key=lambda failure: (failure.code == FLEET_FAILED, failure.began))


def others(first: WorkerFailure, failures: Sequence[WorkerFailure]) -> list[str]:
    """Lines, ready to print, about workers that failed too; those that the fleet's failure ended are not worth one."""
    rest = [f for f in failures if f is not first and f.code != FLEET_FAILED]
    same = [failure.number for failure in rest if failure.like(first)]
    lines = [f"({listed(same, {})} failed the same way)\n"] if same else []
    for failure in rest:
        if not failure.like(first):
            said = headline(failure.lines)
            lines.append(f"(worker {failure.number} then {failure.ended}{': ' + _cut(said) if said else ''})\n")
    return lines


def closing(first: WorkerFailure, failures: Sequence[WorkerFailure], workers: Sequence[LaunchedWorker]) -> str:
    """One line that names the cause and says what became of the others; empty when all is said."""
    by_themselves = {failure.number for failure in failures if failure.code != FLEET_FAILED}
    stopped = [worker.number for worker in workers if worker.code != 0 and worker.number not in by_themselves]
    killed = first.code < 0
    if first.code == FLEET_FAILED or (first.lines and not stopped and not killed) or (len(workers) == 1 and not killed):
        return ""
    what = f"worker {first.number} {first.ended}"
    what += f"; {_the_others(len(stopped), len(workers))}." if stopped else "."
    return what + (" (Often the machine ran out of memory.)" if first.code == -9 else "")


def resume_hint(log: RunLog | None) -> str:
    """How to go on from here, as far as the run's log tells."""
    if log is None or not log.records:
        return ""
    return checkpoint_hint(log) or "Nothing was saved with fleet.save: the next run starts from the beginning."


def checkpoint_hint(log: RunLog | None) -> str:
    """The last checkpoint that the log tells of, saved or loaded, and what it is good for; empty without any."""
    kept = [event for event in log.others if event.get("event") in ("save", "load")] if log is not None else []
    if not kept:
        return ""
    which = f"{kept[-1].get('path')} (step {kept[-1].get('step')})"
    if kept[-1]["event"] == "load":
        return f"Nothing was saved since {which} was loaded: a script that calls fleet.load starts from it again."
    return f"The last checkpoint is {which}: start again with a script that calls fleet.load on it."


def joined(*parts: str) -> str:
    """Sentences on one line, without the empty ones."""
    return " ".join(filter(None, parts))


def _cut(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."


def _the_others(stopped: int, size: int) -> str:
    if stopped == 1:
        return "the other one was stopped" if size == 2 else "one other was stopped"
    return f"the other {stopped} were stopped" if stopped == size - 1 else f"{stopped} others were stopped"
