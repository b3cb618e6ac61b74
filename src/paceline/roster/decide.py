"""When is there a next generation, and who is in it? One pure function of the roster's book.

Three rules keep two fleets from ever both going on: a generation's rounds need all its members; the next is drafted
only when every living member has said that it left; and a training is begun anew only when all that held its state
are known to be gone, not merely silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.roster.generation import Generation, Gone
from paceline.roster.state import Book, Last, Ready, Worker


@dataclass(frozen=True)
class Draft:
    """A generation that can be published now."""

    workers: tuple[int, ...]
    fresh: tuple[int, ...]
    orderly: bool
    wanting: int = 0


@dataclass(frozen=True)
class Wait:
    """Somebody asks, but nothing can be published yet."""

    text: str


def decide(book: Book) -> Draft | Wait | None:
    """The next generation, or what it waits for; None when nobody asks for one."""
    if not any(worker.ready and worker.present for worker in book.workers.values()):
        return None
    if book.last is None or state_is_lost(book, book.last):
        return _begin(book)
    return _go_on(book, book.last)


def compose(book: Book, draft: Draft, *, store_port: int) -> Generation:
    """The generation that a draft becomes, numbered, with who came and who left since the one before."""
    old = book.last.seats if book.last else {}
    stayed = {id for id in draft.workers if id in old and old[id].fits(book.workers[id]) and not old[id].gone}
    return Generation(
        number=book.number + 1,
        workers=draft.workers,
        fresh=draft.fresh,
        joined=tuple(id for id in draft.workers if id not in stayed),
        left=tuple(seat.gone or Gone(id, "was left out") for id, seat in old.items() if id not in stayed),
        facts={id: book.workers[id].facts for id in draft.workers},
        store=("", store_port),
        orderly=draft.orderly,
        wanting=draft.wanting,
    )


def _begin(book: Book) -> Draft | Wait:
    """The first generation, or the first after all that held the training's state are gone."""
    asking = sorted(id for id, worker in book.workers.items() if worker.ready and worker.present)
    starting = sorted(id for id, worker in book.workers.items() if worker.present and not worker.asked)
    if book.last is None and book.searching:
        return Wait("waiting for the fleet that was there before the roster restarted without its book")
    if book.last is None and book.expected > 0:
        return Wait(f"waiting for {_count(book.expected)} that {_was(book.expected)} started and not heard of yet")
    if starting:
        return Wait(f"waiting for {book.called(starting)}")
    if len(asking) < book.minimum:
        return _too_few(book, len(asking))
    chosen = tuple(asking[: book.maximum])
    return Draft(chosen, fresh=chosen, orderly=True)


def _go_on(book: Book, last: Last) -> Draft | Wait:
    members = {id: _request(book, last, id) for id in last.alive()}
    busy = [id for id, request in members.items() if request is None]
    if busy:
        return Wait(f"waiting for {book.called(busy)}")
    requests = {id: request for id, request in members.items() if request is not None}
    holders = [id for id, request in requests.items() if not request.fresh]
    if not holders:
        silent = [id for id, seat in last.seats.items() if seat.gone is not None and not seat.sure]
        return Wait(f"waiting for {book.called(silent)}: nobody else holds the training's state")
    empty = [id for id, request in requests.items() if request.fresh]
    if not all(request.orderly or request.fresh for request in requests.values()):
        # In the middle of a step nobody can give its state: those that still lack one come in at the next boundary.
        return Draft(tuple(holders), (), orderly=False, wanting=max(0, book.minimum - len(holders)))
    return _with_newcomers(book, holders, empty)


def _with_newcomers(book: Book, holders: list[int], empty: list[int]) -> Draft | Wait:
    room = 0 if book.finishing else max(0, book.maximum - len(holders) - len(empty))
    entering = [worker.id for worker in book.newcomers()[:room]]
    chosen = (*holders, *empty, *entering)
    if len(chosen) < book.minimum and not book.finishing:
        return _too_few(book, len(chosen))
    return Draft(chosen, (*empty, *entering), orderly=True)


def _request(book: Book, last: Last, id: int) -> Ready | None:
    """What a member of the last generation has said on leaving it; None when it has not."""
    worker: Worker | None = book.workers.get(id)
    if worker is None or not last.seats[id].fits(worker) or worker.ready is None:
        return None
    return worker.ready if worker.ready.after == last.number else None


def state_is_lost(book: Book, last: Last) -> bool:
    """Whether every process that may hold the training's state is known to be gone."""
    left = [id for id, seat in last.seats.items() if not seat.sure]
    requests = [_request(book, last, id) if last.seats[id].gone is None else None for id in left]
    return all(request is not None and request.fresh for request in requests)


def _too_few(book: Book, there: int) -> Wait:
    missing = book.minimum - there
    return Wait(f"waiting for {_count(missing, more=True)}: {there} of at least {book.minimum} {_is(there)} ready")


def _count(number: int, *, more: bool = False) -> str:
    return f"{number}{' more' if more else ''} worker{'' if number == 1 else 's'}"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
