"""What the roster knows of each worker, and of each seat in the last generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.roster.generation import Facts, Generation, Gone

MOST_NAMED = 12
"""Workers that a sentence names."""


class Ready(NamedTuple):
    """A worker's request for the next generation."""

    after: int
    """The generation it has left; 0: none."""
    fresh: bool
    """It has no state of the training."""
    orderly: bool
    """It comes from a step boundary."""


@dataclass(frozen=True)
class Hello:
    """How a process presents itself."""

    name: str
    session: str
    """Random, one for each process: a restarted worker has the old name and a new session."""
    facts: Facts
    generation: int = 0
    """The last generation it was in, when it comes back after its connection broke."""
    was: Generation | None = None
    """The same in full, for a roster that has lost its state."""
    returning: bool = False
    """It was let in before, by this roster or by one that it takes this one for."""


@dataclass
class RegisteredWorker:
    """A living process, in the last generation or not."""

    id: int
    name: str
    session: str
    facts: Facts
    ready: Ready | None = None
    asked: bool = False
    """Whether it has ever asked for a generation; before that it is starting."""
    present: bool = True
    """Heard from: connected and not silent."""
    away: bool = False
    """Its connection is closed; it may come back."""
    doing: str = "starting"
    told: str = ""
    """The reason for its wait that it was last told."""


@dataclass
class Seat:
    """A place in the last generation, and what became of the process that had it."""

    id: int
    session: str
    """Empty when taken over from what a returning worker said: then any process of that generation fits."""
    gone: Gone | None = None
    sure: bool = False
    """A gone one that will not come back: it left, or its process has ended. A silent one may."""
    has_news: bool = False
    """It was told to re-form at its next step boundary."""

    def fits(self, worker: RegisteredWorker | None) -> bool:
        return worker is not None and worker.session == self.session


@dataclass
class Last:
    """The last generation that was published, and its seats in rank order."""

    generation: Generation
    seats: dict[int, Seat]
    over: bool = False
    """Somebody was lost or has left it in mid-step: its rounds can no longer end."""
    stale: bool = False
    """It was published before the roster's own restart: it is valid, but its store is gone."""

    @property
    def number(self) -> int:
        return self.generation.number

    def alive(self) -> list[int]:
        return [id for id, seat in self.seats.items() if seat.gone is None]


@dataclass
class RosterState:
    """Everything the roster decides from."""

    minimum: int
    maximum: int
    expected: int = 0
    """Workers that were started and have not registered yet."""
    finishing: bool = False
    """A member has finished the training: nobody enters any more."""
    searching: bool = False
    """There was a fleet before this roster, whose state the roster has lost: its members may come back and tell."""
    number: int = 0
    """The last number given to a generation."""
    workers: dict[int, RegisteredWorker] = field(default_factory=dict)
    last: Last | None = None
    ids: dict[str, int] = field(default_factory=dict)
    """By name; never forgotten."""

    def seat(self, id: int) -> Seat | None:
        """The place of this id in the last generation."""
        return self.last.seats.get(id) if self.last else None

    def seat_of(self, worker: RegisteredWorker) -> Seat | None:
        """The place of this very process in the last generation, if it is still its own."""
        seat = self.seat(worker.id)
        return seat if seat is not None and seat.fits(worker) and seat.gone is None else None

    def newcomers(self) -> list[RegisteredWorker]:
        """Those that ask to enter and are not members, by id."""
        asking = [worker for worker in self.workers.values() if worker.ready and worker.present]
        return sorted((worker for worker in asking if self.seat_of(worker) is None), key=lambda worker: worker.id)

    def called(self, ids: Iterable[int]) -> str:
        """These workers, and what each does: ``worker 2 (its own code after step 40)``; of many the first."""
        named = list(ids)
        few = ", ".join(f"worker {id} ({self._doing(id)})" for id in named[:MOST_NAMED])
        return f"{few} and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else few

    def _doing(self, id: int) -> str:
        worker = self.workers.get(id)
        if worker is None or not worker.present:
            return "silent" if worker else "not back yet"
        return worker.doing

    def to_json(self) -> dict[str, Any]:
        """What must outlive the roster."""
        last = self.last
        return {
            "version": 1,
            "number": self.number,
            "ids": self.ids,
            "finishing": self.finishing,
            "searching": self.searching,
            "generation": last.generation.to_json() if last else None,
            "over": last is not None and last.over,
            "sessions": {str(id): seat.session for id, seat in last.seats.items()} if last else {},
            "gone": {str(id): seat.gone.text for id, seat in last.seats.items() if seat.gone and seat.sure}
            if last
            else {},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from `to_json`. A run that had ended leaves its numbers and names, not its members."""
        self.number, self.ids = int(saved["number"]), {str(name): int(id) for name, id in saved["ids"].items()}
        self.searching = bool(saved["searching"])
        if not saved["generation"]:
            return
        generation = Generation.from_json(saved["generation"])
        seats = {id: Seat(id, str(saved["sessions"][str(id)])) for id in generation.workers}
        for id, text in saved["gone"].items():
            seats[int(id)].gone, seats[int(id)].sure = Gone(int(id), str(text)), True
        last = Last(generation, seats, over=bool(saved["over"]), stale=True)
        if last.alive() or not saved["finishing"]:
            self.last, self.finishing = last, bool(saved["finishing"])
