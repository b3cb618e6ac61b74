"""When is there a next generation, and who is in it? One pure function of the roster's state.

Three rules keep two fleets from ever both going on: a generation's rounds need all its members; the next is drafted
only when every living member has said that it left; and a training is begun anew only when all that held its state
are known to be gone, not merely silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.roster.state import Generation, Gone, Last, Ready, RegisteredWorker, RosterState


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


def decide(roster: RosterState) -> Draft | Wait | None:
    """Return the next generation, or what it waits for; None when nobody asks for one."""
    if not any(worker.ready and worker.present for worker in roster.workers.values()):
        return None
    if roster.last is None or state_is_lost(roster, roster.last):
        return _begin(roster)
    return _go_on(roster, roster.last)


def compose(roster: RosterState, draft: Draft, *, store_port: int) -> Generation:
    """Return the generation that a draft becomes: numbered, with who came and who left since the one before."""
    old = roster.last.seats if roster.last else {}
    stayed = {id for id in draft.workers if id in old and old[id].fits(roster.workers[id]) and not old[id].gone}
    return Generation(
        number=roster.number + 1,
        workers=draft.workers,
        fresh=draft.fresh,
        joined=tuple(id for id in draft.workers if id not in stayed),
        left=tuple(seat.gone or Gone(id, "was left out") for id, seat in old.items() if id not in stayed),
        facts={id: roster.workers[id].facts for id in draft.workers},
        store=("", store_port),
        orderly=draft.orderly,
        wanting=draft.wanting,
    )


def _begin(roster: RosterState) -> Draft | Wait:
    """Return the first generation, or the first after all that held the training's state are gone."""
    asking = sorted(id for id, worker in roster.workers.items() if worker.ready and worker.present)
    starting = sorted(id for id, worker in roster.workers.items() if worker.present and not worker.asked)
    if roster.last is None and roster.searching:
        return Wait("waiting for the fleet that was there before the roster restarted without its book")
    if roster.last is None and roster.expected > 0:
        return Wait(f"waiting for {_count(roster.expected)} that {_was(roster.expected)} started and not heard of yet")
    if starting:
        return Wait(f"waiting for {roster.called(starting)}")
    if len(asking) < roster.minimum:
        return _too_few(roster, len(asking))
    chosen = tuple(asking[: roster.maximum])
    return Draft(chosen, fresh=chosen, orderly=True)


def _go_on(roster: RosterState, last: Last) -> Draft | Wait:
    members = {id: _request(roster, last, id) for id in last.alive()}
    busy = [id for id, request in members.items() if request is None]
    if busy:
        return Wait(f"waiting for {roster.called(busy)}")
    requests = {id: request for id, request in members.items() if request is not None}
    holders = [id for id, request in requests.items() if not request.fresh]
    if not holders:
        silent = [id for id, seat in last.seats.items() if seat.gone is not None and not seat.sure]
        return Wait(f"waiting for {roster.called(silent)}: nobody else holds the training's state")
    empty = [id for id, request in requests.items() if request.fresh]
    if not all(request.orderly or request.fresh for request in requests.values()):
        # In the middle of a step nobody can give its state: those that still lack one come in at the next boundary.
        return Draft(tuple(holders), (), orderly=False, wanting=max(0, roster.minimum - len(holders)))
    return _with_newcomers(roster, holders, empty)


def _with_newcomers(roster: RosterState, holders: list[int], empty: list[int]) -> Draft | Wait:
    room = 0 if roster.finishing else max(0, roster.maximum - len(holders) - len(empty))
    entering = [worker.id for worker in roster.newcomers()[:room]]
    chosen = (*holders, *empty, *entering)
    if len(chosen) < roster.minimum and not roster.finishing:
        return _too_few(roster, len(chosen))
    return Draft(chosen, (*empty, *entering), orderly=True)


def _request(roster: RosterState, last: Last, id: int) -> Ready | None:
    """Return the request with which a member left the last generation; None when it has not left."""
    worker: RegisteredWorker | None = roster.workers.get(id)
    if worker is None or not last.seats[id].fits(worker) or worker.ready is None:
        return None
    return worker.ready if worker.ready.after == last.number else None


def state_is_lost(roster: RosterState, last: Last) -> bool:
    """Return whether every process that may hold the training's state is known to be gone."""
    left = (id for id, seat in last.seats.items() if not seat.sure)
    requests = (_request(roster, last, id) if last.seats[id].gone is None else None for id in left)
    return all(request is not None and request.fresh for request in requests)


def _too_few(roster: RosterState, there: int) -> Wait:
    missing = roster.minimum - there
    return Wait(f"waiting for {_count(missing, more=True)}: {there} of at least {roster.minimum} {_is(there)} ready")


def _count(number: int, *, more: bool = False) -> str:
    return f"{number}{' more' if more else ''} worker{'' if number == 1 else 's'}"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
