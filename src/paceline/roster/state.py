"""What the roster decides on: generations, as it publishes them, and what it stores of each worker and seat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import FleetError

Facts = Mapping[str, Any]
"""What a worker says of itself: host, pid, device, name, emulated."""


FINISHED = "finished"
"""What a worker says when it leaves because the training has ended."""


class RunOver(FleetError):
    """The run has ended: there is no further generation to wait for."""


@dataclass(frozen=True)
class Gone:
    """Why somebody is no longer in."""

    id: int
    text: str


@dataclass(frozen=True)
class Generation:
    """One membership. While it lasts its members never change, and its rounds need all of them.

    A process that died and came back under its name, between two generations, stands in `left` and in `joined`: the
    id is the same, what the old process held is not.
    """

    number: int
    """Counted up by the roster; never given twice."""
    workers: tuple[int, ...]
    """Ids in rank order: those that hold the training's state in their old order, then newcomers by id."""
    fresh: tuple[int, ...]
    """Those among them that have no state and take a peer's. All of them: the training starts anew."""
    joined: tuple[int, ...]
    """Processes in this one and not in the one before."""
    left: tuple[Gone, ...]
    """Processes in the one before and not in this one."""
    facts: Mapping[int, Facts]
    store: tuple[str, int]
    """Host and port of the torch TCPStore that serves this generation."""
    orderly: bool
    """Every member came from a step boundary, or is fresh."""
    wanting: int
    """How many more workers the minimum needs."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "left": [[gone.id, gone.text] for gone in self.left]}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Generation:
        return cls(
            number=int(said["number"]),
            workers=tuple(int(id) for id in said["workers"]),
            fresh=tuple(int(id) for id in said["fresh"]),
            joined=tuple(int(id) for id in said["joined"]),
            left=tuple(Gone(int(id), str(text)) for id, text in said["left"]),
            facts={int(id): dict(facts) for id, facts in said["facts"].items()},
            store=(str(said["store"][0]), int(said["store"][1])),
            orderly=bool(said["orderly"]),
            wanting=int(said["wanting"]),
        )


# -- what the roster stores ----------------------------------------------------------------------------------------

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
    """That generation in full, for a roster that has lost its state."""
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
    since: int = 0
    """The first generation that it was in, as far as this roster knows; 0: none yet."""
    refused: bool = False
    """It was told that its calls are not the fleet's, and ends."""


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
    """Each worker's id by its name; never forgotten."""

    def seat(self, id: int) -> Seat | None:
        """Return the seat of this id in the last generation."""
        return self.last.seats.get(id) if self.last else None

    def seat_of(self, worker: RegisteredWorker) -> Seat | None:
        """Return the seat of this very process in the last generation, if it is still its own."""
        seat = self.seat(worker.id)
        return seat if seat is not None and seat.fits(worker) and seat.gone is None else None

    def newcomers(self) -> list[RegisteredWorker]:
        """Return those that ask to enter and are not members, by id."""
        asking = [worker for worker in self.workers.values() if worker.ready and worker.present]
        return sorted((worker for worker in asking if self.seat_of(worker) is None), key=lambda worker: worker.id)

    def called(self, ids: Iterable[int]) -> str:
        """Name workers and what each does, ``worker 2 (its own code after step 40)``; of many the first."""
        named = list(ids)
        few = ", ".join(f"worker {id} ({self._doing(id)})" for id in named[:MOST_NAMED])
        return f"{few} and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else few

    def _doing(self, id: int) -> str:
        worker = self.workers.get(id)
        if worker is None or not worker.present:
            return "silent" if worker else "not back yet"
        return worker.doing

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive the roster."""
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
        """Restore what `to_json` saved. A run that had ended leaves its numbers and names, not its members."""
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
