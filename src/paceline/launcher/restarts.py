"""One worker of this computer through all its processes: when it starts again, and when the run gives up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.launcher.failures import WorkerFailure
from paceline.launcher.processes import LaunchedWorker

FIRST_S, LONGEST_S = 0.5, 30.0
CALM_S = 60.0
"""After so long a life a process's earlier failures no longer count."""
MOST_CRASHES = 3
LEFT = (143, -15)
"""Exit codes of a worker that was asked to leave: by itself, or before it could handle the signal."""


@dataclass(eq=False)
class WorkerSlot:
    """One worker of this launcher, by number; its processes come and go."""

    number: int
    worker: LaunchedWorker | None = None
    """Its process, until all its output was read."""
    due: float | None = None
    """When it starts (again); None while it runs, and when it does not return."""
    started_at: float = 0.0
    faulted: bool = False
    """Whether this process was ended by a fault that the user asked for."""
    returns: bool = True
    """Whether the worker is started again after such a fault."""
    deaths: int = 0
    """In a row, each after less than `CALM_S` of life."""
    entered: bool = False
    """Whether any of its processes was ever in the fleet."""
    crashes: int = 0
    """Crashes of the script before that."""
    note: str = ""
    """What became of its last process, to be told when the next is started."""
    failure: WorkerFailure | None = None
    """How its last process failed, until one has lived for `CALM_S`."""

    @property
    def running(self) -> bool:
        return self.worker is not None and self.worker.running

    @property
    def active(self) -> bool:
        """Whether it runs or will."""
        return self.worker is not None or self.due is not None

    def begin(self, worker: LaunchedWorker, now: float) -> None:
        self.worker, self.due, self.started_at, self.faulted = worker, None, now, False

    def update(self, now: float, *, entered: bool) -> None:
        """Forget earlier failures once the process has lived for `CALM_S`; ``entered``: whether it is in the fleet."""
        calm = self.running and now - self.started_at > CALM_S
        if calm:
            self.deaths, self.failure = 0, None
        self.entered = self.entered or entered or calm

    def retry(self, now: float) -> float:
        """Start again after a pause, twice as long after each death; the pause in seconds."""
        self.deaths += not self.faulted
        pause = FIRST_S if self.faulted else pause_s(self.deaths)
        self.due = now + pause
        return pause


def pause_s(deaths: int) -> float:
    """
    >>> [pause_s(n) for n in (1, 2, 3, 7, 100)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(FIRST_S * 2.0 ** min(deaths - 1, 10), LONGEST_S)


def give_up_reason(slot: WorkerSlot, slots: Iterable[WorkerSlot], *, outsiders: int = 0) -> str:
    """Why the run should end after this slot's failure, in words; empty when a restart may help.

    ``outsiders`` is how many workers train on that were started elsewhere.
    """
    assert slot.failure is not None
    if slot.crashes >= MOST_CRASHES and not slot.entered:
        return f"worker {slot.number} failed {slot.crashes} times without ever being in the fleet"
    if outsiders:
        return ""
    others = [other.failure for other in slots if other is not slot and other.active]
    if all(failure is not None and failure.same_cause(slot.failure) for failure in others):
        return "every worker failed the same way" if others else "its only worker failed"
    return ""
