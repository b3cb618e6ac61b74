"""Why a fleet failed, in as few words as possible: the first failure speaks, the others are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.launcher.output import Voice, headline, prefixed
from paceline.launcher.workers import FLEET_FAILED, Worker

if TYPE_CHECKING:
    from paceline.observe import RunLog

RECENT_S = 10.0
"""Last words that were already shown belong to a death when they are not older than this."""


class Failure:
    """A worker that ended by itself and not well, and what it said last."""

    def __init__(self, worker: Worker, at: float, voice: Voice) -> None:
        assert worker.code is not None
        self.rank, self.code, self.at = worker.rank, worker.code, at
        self.ended = worker.ended
        self._voice = voice

    @property
    def began(self) -> float:
        """When its last words began, else when it ended: the first to begin is the cause."""
        since = [self._voice.held_since, self._voice.shown_since]
        return min([time for time in since if time is not None and self.at - time < RECENT_S], default=self.at)

    @property
    def shown(self) -> bool:
        """Whether its last words are already on the screen: it took long to end after them."""
        return not self._voice.held and self.began < self.at

    @property
    def lines(self) -> list[str]:
        return self._voice.held or (self._voice.shown if self.shown else [])

    @property
    def words(self) -> list[str]:
        """Its last words, ready to print."""
        if self.shown:
            return []
        if self.code == FLEET_FAILED:  # what it names is somebody else's failure
            return [f"{line}\n" for line in self.lines if line.startswith("paceline: ")]
        return [prefixed(self.rank, line) for line in self.lines]

    @property
    def told(self) -> str:
        """What happened, in one line."""
        said = headline(self.lines).removeprefix("paceline: ")
        if said and self.code == FLEET_FAILED:  # it names somebody else
            return said
        return f"worker {self.rank} {self.ended}" + (f": {_cut(said)}" if said else "")

    def said_by(self, voice: Voice) -> bool:
        """Whether the same words are on the screen already: a worker that takes long to end has shown them."""
        recent = voice.shown_since is not None and self.at - voice.shown_since < RECENT_S
        return recent and bool(self.lines) and headline(voice.shown) == headline(self.lines)

    def like(self, other: Failure) -> bool:
        """Whether both ended in the same way with the same words."""
        return self.code == other.code and headline(self.lines) == headline(other.lines)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The cause: the first that failed by itself. One that the fleet's failure ended is the cause only if all were."""
    return min(failures, key=lambda failure: (failure.code == FLEET_FAILED, failure.began))


def others(first: Failure, failures: Sequence[Failure]) -> list[str]:
    """Lines, ready to print, about those that failed too; what the fleet's failure ended is not worth one."""
    rest = [f for f in failures if f is not first and f.code != FLEET_FAILED]
    same = [failure.rank for failure in rest if failure.like(first)]
    lines = [f"({named(same)} failed the same way)\n"] if same else []
    for failure in rest:
        if not failure.like(first):
            said = headline(failure.lines)
            lines.append(f"({named([failure.rank])} then {failure.ended}{': ' + _cut(said) if said else ''})\n")
    return lines


def closing(first: Failure, failures: Sequence[Failure], workers: Sequence[Worker]) -> str:
    """One line that names the cause and says what became of the others; empty when all is said."""
    by_themselves = {failure.rank for failure in failures if failure.code != FLEET_FAILED}
    stopped = [worker.rank for worker in workers if worker.code != 0 and worker.rank not in by_themselves]
    killed = first.code < 0
    if first.code == FLEET_FAILED or (first.lines and not stopped and not killed) or (len(workers) == 1 and not killed):
        return ""
    what = f"worker {first.rank} {first.ended}"
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


def named(ranks: Sequence[int]) -> str:
    """
    >>> named([1, 2, 3])
    'workers 1, 2 and 3'
    """
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return "workers " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"


def _cut(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."


def _the_others(stopped: int, size: int) -> str:
    if stopped == 1:
        return "the other one was stopped" if size == 2 else "one other was stopped"
    return f"the other {stopped} were stopped" if stopped == size - 1 else f"{stopped} others were stopped"
