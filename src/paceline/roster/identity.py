"""Who is it that comes? A new process, one that was here before, or a member of a fleet whose book is lost."""

from __future__ import annotations

from paceline.roster.state import Book, Hello, Last, Seat, Worker


def is_member(book: Book, hello: Hello) -> bool:
    """Whether this very process has a seat in the last generation."""
    seat = book.last.seats.get(book.ids.get(hello.name, -1)) if book.last else None
    return seat is not None and seat.session == hello.session


def known_process(book: Book, hello: Hello) -> Worker | None:
    """The worker that this process already is; one that returns to a restarted roster is entered again, as away."""
    id = book.ids.get(hello.name, -1)
    worker, last = book.workers.get(id), book.last
    if worker is not None:
        return worker if worker.session == hello.session else None
    seat = last.seats.get(id) if last else None
    if last is None or seat is None or seat.sure:
        return None
    if seat.session != hello.session and (seat.session or hello.generation != last.number):
        return None
    seat.session = hello.session
    book.workers[id] = Worker(id, hello.name, hello.session, hello.facts, asked=True, present=False)
    return book.workers[id]


def adopt(book: Book, hello: Hello, *, leap: int) -> bool:
    """The roster knows nothing, and a worker comes that was here before: take its fleet over from what it says.

    ``leap``: a number beyond all that may have been given, to go on from. Returns whether the book has changed.
    """
    was, found_out = hello.was, hello.returning and not book.number
    if found_out:
        book.number, book.searching = leap, True
    if was is None or was.number != hello.generation or not book.searching:
        return found_out
    if book.last is not None and was.number <= book.last.number:  # of several, the youngest is the living one
        return found_out
    ids = {str(was.facts[id]["name"]): id for id in was.workers}
    if any(ids.get(name, -1) != id for name, id in book.ids.items() if name in ids or id in ids.values()):
        return found_out  # newcomers were sooner, and have these numbers
    book.ids.update(ids)
    book.number = max(book.number, was.number)
    book.last = Last(was, {id: Seat(id, "") for id in was.workers}, stale=True)
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
