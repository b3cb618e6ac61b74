"""The rules of membership: what happens to workers comes in, what they are to be told comes out.

No clock, no sockets, no files. Each event changes the `RosterState`, asks `decide` for the next generation, and leaves
in `MembershipRules.drain` what is to be sent (`Tell`) and what an onlooker may want to know (`Happened`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.roster.decide import Draft, Wait, compose, decide, state_is_lost
from paceline.roster.state import FINISHED, Gone, Hello, Last, Ready, RegisteredWorker, RosterState, Seat
from paceline.roster.wire import Refused

LEFT = "left (SIGTERM)"
ENDED = "the run has ended"
CLOSED = "is gone: its connection closed"


@dataclass(frozen=True)
class Tell:
    """Send this to these workers."""

    to: tuple[int, ...]
    message: dict[str, Any]


@dataclass(frozen=True)
class Happened:
    """For onlookers."""

    kind: str
    data: dict[str, Any]


class MembershipRules:
    """The rules of who is in, who waits, and which generation is the last.

    ``store_port`` is that of the torch store that serves the generations. ``leap`` is a number beyond all that an
    earlier roster may have given, to continue from when its workers come back and its state is lost.
    """

    def __init__(self, roster: RosterState, *, store_port: int = 0, leap: int = 0) -> None:
        self.roster = roster
        self.ended = False
        self.failure: tuple[str, str] | None = None
        """Kind and text of what ended the run for everybody."""
        self.waiting = ""
        """Why nothing is published although somebody asks."""
        self.unsaved = True
        """The state has changed in what must outlive the roster."""
        self._store_port, self._leap = store_port, leap
        self._out: list[Tell | Happened] = []
        self._not_seen_to_end: set[str] = set()
        """Names whose last registered process the launcher has not seen end."""

    def drain(self) -> list[Tell | Happened]:
        """Return what was decided since the last call, in order."""
        out, self._out = self._out, []
        return out

    # -- coming ----------------------------------------------------------------------------------------------------

    def expect(self, more: int) -> None:
        """Expect ``more`` processes to register that were started."""
        self.roster.expected = max(0, self.roster.expected + more)
        self.consider()

    def register(self, hello: Hello) -> RegisteredWorker:
        """Register a process, for the first time or after its connection broke; raises `Refused`."""
        if self.ended or (self.roster.finishing and not is_member(self.roster, hello)):
            raise Refused("ended", ENDED)
        if self.failure:
            raise Refused("failed", self.failure[1])
        self.unsaved = adopt(self.roster, hello, leap=self._leap) or self.unsaved
        known = known_process(self.roster, hello)
        if known is not None:
            self._not_seen_to_end.add(hello.name)
            self._come_back(known, hello)
            return known
        return self._enter(hello)

    def _come_back(self, worker: RegisteredWorker, hello: Hello) -> None:
        worker.facts, worker.ready, worker.present = hello.facts, None, False  # what it asked for it asks again
        self.heard(worker.id)
        if hello.generation and self.roster.seat_of(worker) is None:
            self._tell([worker.id], {"dropped": hello.generation})

    def _enter(self, hello: Hello) -> RegisteredWorker:
        roster = self.roster
        self._replace(hello.name)
        here = sum(worker.present for worker in roster.workers.values())
        if here >= roster.maximum:
            raise Refused("full", f"the fleet is full: {here} of at most {roster.maximum} are there")
        if hello.name not in roster.ids:
            roster.ids[hello.name] = free_id(hello.name, set(roster.ids.values()))
            self.unsaved = True
        roster.expected = max(0, roster.expected - 1)
        worker = RegisteredWorker(roster.ids[hello.name], hello.name, hello.session, hello.facts)
        roster.workers[worker.id] = worker
        self._not_seen_to_end.add(hello.name)
        self._note("registered", id=worker.id, name=worker.name, facts=dict(worker.facts))
        if hello.generation:  # it was in one that went on without it
            self._tell([worker.id], {"dropped": hello.generation})
        self.consider()
        return worker

    def _replace(self, name: str) -> None:
        """Give up the old process of this name, if there is one, unless it is there or awaited."""
        id = self.roster.ids.get(name, -1)
        old, seat = self.roster.workers.get(id), self.roster.seat(id)
        if (old is not None and old.present) or (old is None and seat is not None and seat.gone is None):
            raise Refused("busy", f"another process is there as {name!r}: give each worker its own PACELINE_WORKER")
        if old is not None or (seat is not None and not seat.sure):
            self._remove(id, "was replaced by a new process", sure=True)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ready(self, id: int, asked: Ready) -> None:
        """Note that a worker has left generation ``asked.after`` and wants the next."""
        worker, last = self.roster.workers[id], self.roster.last
        worker.asked = True
        if self.ended or (self.roster.finishing and self.roster.seat_of(worker) is None):
            self._tell([id], self._end())
            return
        member = last is not None and self.roster.seat_of(worker) is not None
        if last is not None and member and asked.after < last.number:
            if last.stale:
                self._end_generation("the roster restarted before all had heard of it")
            if not last.over:  # its answer was lost with a connection
                self._tell([id], {"generation": last.generation.to_json()})
                return
            asked = Ready(last.number, asked.fresh or id in last.generation.fresh, asked.orderly)
        if not member and asked.after and not asked.fresh:  # it holds the state of a step that the fleet left behind
            self._tell([id], {"dropped": asked.after})
            return
        worker.ready, worker.told = asked, ""
        if member and (asked.fresh or not asked.orderly):
            self._end_generation(f"a round failed on worker {id}")
        self.consider()

    def heard(self, id: int) -> None:
        """Note that a silent or lost worker is there again; nothing happens to one that was never away."""
        worker, last = self.roster.workers[id], self.roster.last
        if worker.present:
            return
        worker.present, worker.away = True, False
        self._note("returned", id=id, name=worker.name)
        seat = self.roster.seat(id)
        if last is not None and seat is not None and seat.fits(worker) and not seat.sure:
            seat.gone, seat.has_news = None, False
            if last.over:
                self._tell([id], {"over": last.number, "why": "this worker was silent"})
        self.consider()

    # -- going -----------------------------------------------------------------------------------------------------

    def silent(self, id: int, text: str) -> None:
        """Note that a worker was silent for longer than it may be, while its connection stands."""
        worker = self.roster.workers[id]
        worker.present = False
        self._lose(id, text, sure=False)
        self.consider()

    def lost(self, id: int, text: str, *, sure: bool) -> None:
        """Note that a worker's connection is closed. ``sure``: its process has ended; otherwise it may come back."""
        self._remove(id, text, sure=sure)
        self.consider()

    def _remove(self, id: int, text: str, *, sure: bool) -> None:
        worker, seat = self.roster.workers.get(id), self.roster.seat(id)
        returns = not sure and worker is not None and seat is not None and seat.fits(worker)
        if worker is not None and returns:
            worker.present, worker.away, worker.ready = False, True, None
        elif worker is not None:
            del self.roster.workers[id]
        self._lose(id, text, sure=sure, worker=worker)
        self._forget_failure()

    def confirm(self, id: int, session: str) -> None:
        """Note that a lost process will not come back."""
        worker, seat = self.roster.workers.get(id), self.roster.seat(id)
        if worker is not None and worker.session == session and worker.away:
            del self.roster.workers[id]
            self._forget_failure()
        if seat is not None and seat.session == session and seat.gone is not None:
            seat.sure = True
        self.consider()

    def give_up_absent(self, text: str) -> list[tuple[int, str]]:
        """Give up members of before the roster's restart that have not come back; returns their ids and sessions."""
        last = self.roster.last
        absent = [id for id in last.alive() if not last.seats[id].fits(self.roster.workers.get(id))] if last else []
        for id in absent:
            assert last is not None
            last.seats[id].gone = Gone(id, text)
            self._note("left", id=id, name=self._name(id), text=text, sure=False)
            self._end_generation(f"worker {id} {text}")
        self.roster.searching = False
        self.consider()
        return [(id, last.seats[id].session) for id in absent] if last else []

    def leave(self, id: int, why: str) -> None:
        """Let a worker leave that asks to."""
        worker = self.roster.workers.get(id)
        if worker is None:
            return
        if why == FINISHED and self.roster.seat_of(worker) is not None:
            self._finish()
            self.unsaved = True
        self._remove(id, why, sure=True)
        self.consider()

    def died(self, name: str, how: str) -> None:
        """Note that the launcher saw the process of this name end."""
        if name not in self._not_seen_to_end and not self._awaited(name):  # it ended before it had registered
            self.expect(-1)
            return
        self._not_seen_to_end.discard(name)
        id = self.roster.ids[name]
        seat = self.roster.seat(id)
        if seat is not None and seat.gone is not None and seat.gone.text == CLOSED:  # the socket told sooner, and less
            seat.gone = Gone(id, how)
        if id in self.roster.workers or (seat is not None and not seat.sure):
            self._remove(id, how, sure=True)
            self.consider()

    def _awaited(self, name: str) -> bool:
        """Return whether a restarted roster waits for the process of this name to come back."""
        seat = self.roster.seat(self.roster.ids.get(name, -1))
        return seat is not None and not seat.sure

    def fail(self, kind: str, text: str) -> None:
        """End the run for everybody."""
        if self.failure is None:
            self.failure = (kind, text)
            self._tell(self.roster.workers, {"fail": kind, "text": text})
            self._note("failed", error=kind, text=text)

    def refuse(self, ids: Sequence[int], kind: str, text: str) -> None:
        """End the run for these workers alone."""
        for id in ids:
            self.roster.workers[id].refused = True
        self._tell(ids, {"fail": kind, "text": text})
        self._note("failed", error=kind, text=text)

    # -- consequences ----------------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Publish the next generation if it can be, or note what it waits for."""
        self._end_if_finished()
        decision = None if self.ended or self.failure else decide(self.roster)
        if isinstance(decision, Draft):
            self._publish(decision)
        self._spread_news()
        self.waiting = decision.text if isinstance(decision, Wait) else ""

    def tell_waiting(self) -> None:
        """Tell those who ask what the next generation waits for, where that has changed.

        Not at every change: when n workers come, each changes it for all that came before.
        """
        text = self.waiting
        untold = [worker for worker in self.roster.workers.values() if text and worker.ready and worker.told != text]
        self._tell([worker.id for worker in untold], {"wait": text})
        for worker in untold:
            worker.told = text

    def _lose(self, id: int, text: str, *, sure: bool, worker: RegisteredWorker | None = None) -> None:
        seat, worker = self.roster.seat(id), worker or self.roster.workers.get(id)
        self._note("left", id=id, name=worker.name if worker else self._name(id), text=text, sure=sure)
        if seat is None or (worker is not None and not seat.fits(worker)):
            return
        seat.sure = seat.sure or sure
        if seat.gone is None:
            seat.gone = Gone(id, text)
            if text not in (FINISHED, LEFT):  # of both the others know, and come by themselves
                self._end_generation(f"worker {id} {text}")

    def _name(self, id: int) -> str:
        return next((name for name, known in self.roster.ids.items() if known == id), "")

    def _end_generation(self, why: str) -> None:
        """End the last generation: its rounds can no longer end, and the members still in it must leave it."""
        last = self.roster.last
        assert last is not None
        if not last.over:
            last.over = True
            inside = [id for id in last.alive() if id in self.roster.workers and not self.roster.workers[id].ready]
            self._tell(inside, {"over": last.number, "why": why})
            self._note("over", number=last.number, text=why)

    def _spread_news(self) -> None:
        """Ask the members to re-form at their next step boundary: somebody waits to enter, or the store is gone."""
        last, roster = self.roster.last, self.roster
        if last is None or last.over or roster.finishing:
            return
        if last.stale or (len(last.alive()) < roster.maximum and roster.newcomers()):
            unaware = [id for id in last.alive() if id in roster.workers and not last.seats[id].has_news]
            self._tell([id for id in unaware if not roster.workers[id].ready], {"news": last.number})
            for id in unaware:
                last.seats[id].has_news = True

    def _finish(self) -> None:
        if self.roster.finishing:
            return
        self.roster.finishing = True
        self._tell([worker.id for worker in self.roster.newcomers()], self._end())

    def _end_if_finished(self) -> None:
        last = self.roster.last
        if not self.roster.finishing or self.ended:
            return
        if last is None or not last.alive() or state_is_lost(self.roster, last):
            self.ended = True
            self._tell(self.roster.workers, self._end())
            self._note("finished")

    def _end(self) -> dict[str, Any]:
        """Return the message of the run's end: a worker of its last generation has missed nothing but the farewell."""
        return {"ended": ENDED, "last": self.roster.last.number if self.roster.last else 0}

    def _forget_failure(self) -> None:
        if self.failure and not self.roster.workers:
            self.failure = None

    def _publish(self, draft: Draft) -> None:
        roster, before = self.roster, self.roster.last
        old = before.seats if before else {}
        generation = compose(roster, draft, store_port=self._store_port)
        roster.number = generation.number
        out = [id for id in old if id not in draft.workers]
        dropped = [id for id in out if old[id].fits(roster.workers.get(id))]
        roster.last = Last(generation, {id: Seat(id, roster.workers[id].session) for id in draft.workers})
        stale = [id for id in dropped if (asked := roster.workers[id].ready) and not asked.fresh]
        for id in (*draft.workers, *stale):  # a dropped one that holds state has to ask again, without it
            roster.workers[id].ready = None
        for id in draft.workers:
            roster.workers[id].since = roster.workers[id].since or generation.number
        self.unsaved, roster.searching = True, False
        self._tell(draft.workers, {"generation": generation.to_json()})
        self._note("generation", **generation.to_json(), names=[roster.workers[id].name for id in draft.workers])
        if before:
            self._tell(dropped, {"dropped": before.number})

    def _tell(self, to: Iterable[int], message: dict[str, Any]) -> None:
        ids = tuple(to)
        if ids:
            self._out.append(Tell(ids, message))

    def _note(self, kind: str, **data: Any) -> None:
        self._out.append(Happened(kind, data))


# -- who a process is ----------------------------------------------------------------------------------------------

LEAP = 1_000_000
"""More generations than a fleet has while one of its workers is away."""


def is_member(roster: RosterState, hello: Hello) -> bool:
    """Return whether this very process has a seat in the last generation."""
    seat = roster.seat(roster.ids.get(hello.name, -1))
    return seat is not None and seat.session == hello.session


def known_process(roster: RosterState, hello: Hello) -> RegisteredWorker | None:
    """Return the worker that this process already is.

    One that returns to a restarted roster is entered again, as away.
    """
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
    """Take a fleet over from what a returning worker says, where this roster has lost its state.

    ``leap`` is a number to continue from, by this computer's clock beyond all that may have been given; where the clock
    of the roster before was ahead, `LEAP` beyond this worker's generation is. Returns whether the state has changed.
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
    """Return the id of a new name: its own slot number where that is free, else the lowest free one.

    >>> free_id("host/2", {0, 1}), free_id("other/2", {0, 1, 2}), free_id("host/by hand", {0})
    (2, 3, 1)
    """
    slot = name.rpartition("/")[2]
    if slot.isascii() and slot.isdigit() and len(slot) <= 3 and int(slot) not in taken:
        return int(slot)
    return next(id for id in range(len(taken) + 1) if id not in taken)
