"""A worker's place on this computer, through all its processes: when it starts again, and when that is hopeless."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.launcher.failures import Failure
from paceline.launcher.workers import FLEET_FAILED, Worker

FIRST_S, LONGEST_S = 0.5, 30.0
CALM_S = 60.0
"""A process that has lived so long begins with a clean sheet."""
MOST_CRASHES = 3
LEFT = (143, -15)
"""How a worker ends that was asked to leave, by itself or before it could listen."""


@dataclass(eq=False)
class Slot:
    """One worker of this launcher, by number; its processes come and go."""

    number: int
    worker: Worker | None = None
    """Its process, until all it said was heard."""
    due: float | None = None
    """When it starts (again); None while it runs, and when it does not return."""
    born: float = 0.0
    struck: bool = False
    """Whether this process was ended by a fault that the user asked for."""
    returns: bool = True
    """Whether it is started again after such a fault."""
    deaths: int = 0
    """In a row, each after less than `CALM_S` of life."""
    entered: bool = False
    """Whether any of its processes was ever in the fleet."""
    crashes: int = 0
    """Crashes of the script before that."""
    news: str = ""
    """What became of its last process, to be told when the next is started."""
    failure: Failure | None = None
    """How its last process failed, until one has lived for `CALM_S`."""

    @property
    def running(self) -> bool:
        return self.worker is not None and self.worker.running

    @property
    def active(self) -> bool:
        """Whether it runs or will."""
        return self.worker is not None or self.due is not None

    def begin(self, worker: Worker, now: float) -> None:
        self.worker, self.due, self.born, self.struck = worker, None, now, False

    def aged(self, now: float, *, entered: bool) -> None:
        """Forgive what lies behind a process that has lived long enough."""
        calm = self.running and now - self.born > CALM_S
        if calm:
            self.deaths, self.failure = 0, None
        self.entered = self.entered or entered or calm

    def retry(self, now: float) -> float:
        """Start again after a pause, twice as long after each death; the pause in seconds."""
        self.deaths += not self.struck
        pause = FIRST_S if self.struck else pause_s(self.deaths)
        self.due = now + pause
        return pause


def pause_s(deaths: int) -> float:
    """
    >>> [pause_s(n) for n in (1, 2, 3, 7, 100)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(FIRST_S * 2.0 ** min(deaths - 1, 10), LONGEST_S)


def hopeless(slot: Slot, slots: Iterable[Slot], *, outsiders: int = 0) -> str:
    """Why the run should end after this slot's failure, in words; empty when a restart may help.

    ``outsiders`` is how many train on that were started elsewhere.
    """
    assert slot.failure is not None
    if slot.crashes >= MOST_CRASHES and not slot.entered:
        return f"worker {slot.number} failed {slot.crashes} times without ever being in the fleet"
    if outsiders:
        return ""
    others = [other.failure for other in slots if other is not slot and other.active]
    if all(failure is not None and alike(failure, slot.failure) for failure in others):
        return "every worker failed the same way" if others else "its only worker failed"
    return ""


def alike(one: Failure, other: Failure) -> bool:
    """Whether two failures have one cause: the script's, or the fleet's (which each worker tells in its own words)."""
    return one.like(other) or one.code == other.code == FLEET_FAILED
