"""Who is it that comes? A new process, one that was here before, or a member of a fleet unknown to this roster."""

from __future__ import annotations

from paceline.roster.state import Hello, Last, RegisteredWorker, RosterState, Seat

LEAP = 1_000_000
"""More generations than a fleet has while one of its workers is away."""


def is_member(roster: RosterState, hello: Hello) -> bool:
    """Whether this very process has a seat in the last generation."""
    seat = roster.seat(roster.ids.get(hello.name, -1))
    return seat is not None and seat.session == hello.session


def known_process(roster: RosterState, hello: Hello) -> RegisteredWorker | None:
    """The worker that this process already is; one that returns to a restarted roster is entered again, as away."""
    id = roster.ids.get(hello.name, -1)
    worker, last = roster.workers.get(id), roster.last
    if worker is not None:
        return worker if worker.session == hello.session else None
    seat = roster.seat(id)
    if last is None or seat is None or seat.sure:
        return None
    if seat.session != hello.session and (seat.session or hello.generation != last.number):
        return None
    seat.session = hello.session
    roster.workers[id] = RegisteredWorker(id, hello.name, hello.session, hello.facts, asked=True, present=False)
    return roster.workers[id]


def adopt(roster: RosterState, hello: Hello, *, leap: int) -> bool:
    """The roster knows nothing, and a worker comes that was here before: take its fleet over from what it says.

    ``leap``: a number to go on from, by this computer's clock beyond all that may have been given; where the roster
    before was on a computer whose clock is ahead, `LEAP` beyond what this worker knows of is. Returns whether the state
    has changed.
    """
    was, found_out = hello.was, hello.returning and not roster.number
    if found_out:
        roster.number, roster.searching = max(leap, hello.generation + LEAP), True
    behind = was is not None and roster.last is not None and roster.last.stale and was.number > roster.last.number
    if was is None or was.number != hello.generation or not (roster.searching or behind):
        return found_out
    if roster.last is not None and was.number <= roster.last.number:  # of several, the youngest is the living one
        return found_out
    ids = {str(was.facts[id]["name"]): id for id in was.workers}
    if any(ids.get(name, -1) != id for name, id in roster.ids.items() if name in ids or id in ids.values()):
        return found_out  # newcomers were sooner, and have these numbers
    roster.ids.update(ids)
    roster.number = max(roster.number, was.number)
    roster.last = Last(was, {id: Seat(id, "") for id in was.workers}, stale=True)
    return True


def free_id(name: str, taken: set[int]) -> int:
    """The id of a new name: its own slot number where that is free, else the lowest free one.

    >>> free_id("host/2", {0, 1}), free_id("other/2", {0, 1, 2}), free_id("host/by hand", {0})
    (2, 3, 1)
    """
    slot = name.rpartition("/")[2]
    if slot.isascii() and slot.isdigit() and len(slot) <= 3 and int(slot) not in taken:
        return int(slot)
    return next(id for id in range(len(taken) + 1) if id not in taken)
