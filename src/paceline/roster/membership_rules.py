"""The roster's mind: what happens to workers comes in, what they are to be told comes out.

No clock, no sockets, no files. Each event changes the `Book`, asks `decide` for the next generation, and leaves in
`Roll.take` what is to be sent (`Tell`) and what an onlooker may want to know (`Happened`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.roster.decide import Draft, Wait, compose, decide, state_is_lost
from paceline.roster.generation import Gone
from paceline.roster.identity import adopt, free_id, is_member, known_process
from paceline.roster.state import Book, Hello, Last, Ready, Seat, Worker

FINISHED = "finished"
LEFT = "left (SIGTERM)"
ENDED = "the run has ended"
CLOSED = "is gone: its connection closed"


class Refused(Exception):
    """This process may not enter. ``kind``: ended, failed, full, busy (its name is in use; it may try again)."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


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


class Roll:
    """Who is in, who waits, and which generation is the last.

    ``store_port``: of the torch store that serves the generations. ``leap``: a number beyond all that a roster before
    this one may have given, to go on from when its workers come back and its book is lost.
    """

    def __init__(self, book: Book, *, store_port: int = 0, leap: int = 0) -> None:
        self.book = book
        self.ended = False
        self.failure: tuple[str, str] | None = None
        """Kind and text of what ended the run for everybody."""
        self.waiting = ""
        """Why nothing is published although somebody asks."""
        self.unsaved = True
        """The book has changed in what must outlive the roster."""
        self._store_port, self._leap = store_port, leap
        self._out: list[Tell | Happened] = []
        self._undead: set[str] = set()
        """Names whose last registered process the launcher has not seen end."""

    def take(self) -> list[Tell | Happened]:
        """What was decided since the last call, in order."""
        out, self._out = self._out, []
        return out

    # -- coming ----------------------------------------------------------------------------------------------------

    def expect(self, more: int) -> None:
        """So many processes were started that will register."""
        self.book.expected = max(0, self.book.expected + more)
        self.consider()

    def register(self, hello: Hello) -> Worker:
        """A process presents itself, for the first time or after its connection broke; raises `Refused`."""
        if self.ended or (self.book.finishing and not is_member(self.book, hello)):
            raise Refused("ended", ENDED)
        if self.failure:
            raise Refused("failed", self.failure[1])
        self.unsaved = adopt(self.book, hello, leap=self._leap) or self.unsaved
        known = known_process(self.book, hello)
        if known is not None:
            self._undead.add(hello.name)
            self._come_back(known, hello)
            return known
        return self._enter(hello)

    def _come_back(self, worker: Worker, hello: Hello) -> None:
        worker.facts, worker.ready, worker.present = hello.facts, None, False  # what it asked for it asks again
        self.heard(worker.id)
        if hello.generation and self.book.seat_of(worker) is None:
            self._tell([worker.id], {"dropped": hello.generation})

    def _enter(self, hello: Hello) -> Worker:
        book = self.book
        self._replace(hello.name)
        here = sum(worker.present for worker in book.workers.values())
        if here >= book.maximum:
            raise Refused("full", f"the fleet is full: {here} of at most {book.maximum} are there")
        if hello.name not in book.ids:
            book.ids[hello.name] = free_id(hello.name, set(book.ids.values()))
            self.unsaved = True
        book.expected = max(0, book.expected - 1)
        worker = Worker(book.ids[hello.name], hello.name, hello.session, hello.facts)
        book.workers[worker.id] = worker
        self._undead.add(hello.name)
        self._note("registered", id=worker.id, name=worker.name, facts=dict(worker.facts))
        if hello.generation:  # it was in one that went on without it
            self._tell([worker.id], {"dropped": hello.generation})
        self.consider()
        return worker

    def _replace(self, name: str) -> None:
        """A new process comes under this name: the old one, if any, is given up, unless it is there or awaited."""
        id = self.book.ids.get(name, -1)
        old, last = self.book.workers.get(id), self.book.last
        seat = last.seats.get(id) if last else None
        if (old is not None and old.present) or (old is None and seat is not None and seat.gone is None):
            raise Refused("busy", f"another process is there as {name!r}: give each worker its own PACELINE_WORKER")
        if old is not None or (seat is not None and not seat.sure):
            self._remove(id, "was replaced by a new process", sure=True)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ready(self, id: int, asked: Ready) -> None:
        """This worker has left generation ``asked.after`` and wants the next."""
        worker, last = self.book.workers[id], self.book.last
        worker.asked = True
        if self.ended or (self.book.finishing and self.book.seat_of(worker) is None):
            self._tell([id], {"ended": ENDED})
            return
        member = last is not None and self.book.seat_of(worker) is not None
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
        """A silent or lost worker is there again. Nothing happens to one that was never away."""
        worker, last = self.book.workers[id], self.book.last
        if worker.present:
            return
        worker.present, worker.away = True, False
        self._note("returned", id=id, name=worker.name)
        seat = last.seats.get(id) if last else None
        if last is not None and seat is not None and seat.fits(worker) and not seat.sure:
            seat.gone, seat.has_news = None, False
            if last.over:
                self._tell([id], {"over": last.number, "why": "this worker was silent"})
        self.consider()

    # -- going -----------------------------------------------------------------------------------------------------

    def silent(self, id: int, text: str) -> None:
        """Nothing was heard of this worker for longer than it may be silent; its connection stands."""
        worker = self.book.workers[id]
        worker.present = False
        self._lose(id, text, sure=False)
        self.consider()

    def lost(self, id: int, text: str, *, sure: bool) -> None:
        """This worker's connection is closed. ``sure``: its process has ended; otherwise it may come back."""
        self._remove(id, text, sure=sure)
        self.consider()

    def _remove(self, id: int, text: str, *, sure: bool) -> None:
        worker, last = self.book.workers.get(id), self.book.last
        seat = last.seats.get(id) if last else None
        returns = not sure and worker is not None and seat is not None and seat.fits(worker)
        if worker is not None and returns:
            worker.present, worker.away, worker.ready = False, True, None
        elif worker is not None:
            del self.book.workers[id]
        self._lose(id, text, sure=sure, worker=worker)
        self._forget_failure()

    def confirm(self, id: int, session: str) -> None:
        """This process was lost, and will not come back."""
        worker, last = self.book.workers.get(id), self.book.last
        seat = last.seats.get(id) if last else None
        if worker is not None and worker.session == session and worker.away:
            del self.book.workers[id]
            self._forget_failure()
        if seat is not None and seat.session == session and seat.gone is not None:
            seat.sure = True
        self.consider()

    def give_up_absent(self, text: str) -> list[tuple[int, str]]:
        """Members of before the roster's restart that have not come back are lost; returns their ids and sessions."""
        last = self.book.last
        absent = [id for id in last.alive() if not last.seats[id].fits(self.book.workers.get(id))] if last else []
        for id in absent:
            assert last is not None
            last.seats[id].gone = Gone(id, text)
            self._note("left", id=id, name=self._name(id), text=text, sure=False)
            self._end_generation(f"worker {id} {text}")
        self.book.searching = False
        self.consider()
        return [(id, last.seats[id].session) for id in absent] if last else []

    def leave(self, id: int, why: str) -> None:
        """This worker goes on its own."""
        worker = self.book.workers.get(id)
        if worker is None:
            return
        if why == FINISHED and self.book.seat_of(worker) is not None:
            self._finish()
            self.unsaved = True
        self._remove(id, why, sure=True)
        self.consider()

    def died(self, name: str, how: str) -> None:
        """The launcher saw the process of this name end."""
        if name not in self._undead and not self._awaited(name):  # it ended before it had registered
            self.expect(-1)
            return
        self._undead.discard(name)
        id = self.book.ids[name]
        last = self.book.last
        seat = last.seats.get(id) if last else None
        if seat is not None and seat.gone is not None and seat.gone.text == CLOSED:  # the socket told sooner, and less
            seat.gone = Gone(id, how)
        if id in self.book.workers or (seat is not None and not seat.sure):
            self._remove(id, how, sure=True)
            self.consider()

    def _awaited(self, name: str) -> bool:
        """Whether a restarted roster waits for the process of this name to come back."""
        last, id = self.book.last, self.book.ids.get(name, -1)
        return last is not None and id in last.seats and not last.seats[id].sure

    def fail(self, kind: str, text: str) -> None:
        """End the run for everybody."""
        if self.failure is None:
            self.failure = (kind, text)
            self._tell(self.book.workers, {"fail": kind, "text": text})
            self._note("failed", error=kind, text=text)

    # -- consequences ----------------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Publish the next generation if it can be, or tell those who ask what it waits for."""
        self._end_if_finished()
        decision = None if self.ended or self.failure else decide(self.book)
        if isinstance(decision, Draft):
            self._publish(decision)
        self._spread_news()
        text = decision.text if isinstance(decision, Wait) else ""
        self.waiting = text
        untold = [worker for worker in self.book.workers.values() if text and worker.ready and worker.told != text]
        self._tell([worker.id for worker in untold], {"wait": text})
        for worker in untold:
            worker.told = text

    def _lose(self, id: int, text: str, *, sure: bool, worker: Worker | None = None) -> None:
        last = self.book.last
        seat = last.seats.get(id) if last else None
        worker = worker or self.book.workers.get(id)
        self._note("left", id=id, name=worker.name if worker else self._name(id), text=text, sure=sure)
        if seat is None or (worker is not None and not seat.fits(worker)):
            return
        seat.sure = seat.sure or sure
        if seat.gone is None:
            seat.gone = Gone(id, text)
            if text not in (FINISHED, LEFT):  # of both the others know, and come by themselves
                self._end_generation(f"worker {id} {text}")

    def _name(self, id: int) -> str:
        return next((name for name, known in self.book.ids.items() if known == id), "")

    def _end_generation(self, why: str) -> None:
        """The last generation's rounds can no longer end: whoever is still in it must leave it."""
        last = self.book.last
        assert last is not None
        if not last.over:
            last.over = True
            inside = [id for id in last.alive() if id in self.book.workers and not self.book.workers[id].ready]
            self._tell(inside, {"over": last.number, "why": why})
            self._note("over", number=last.number, text=why)

    def _spread_news(self) -> None:
        """Somebody waits to enter, or the store is gone: the members re-form at their next step boundary."""
        last, book = self.book.last, self.book
        if last is None or last.over or book.finishing:
            return
        if last.stale or (len(last.alive()) < book.maximum and book.newcomers()):
            unaware = [id for id in last.alive() if id in book.workers and not last.seats[id].has_news]
            self._tell([id for id in unaware if not book.workers[id].ready], {"news": last.number})
            for id in unaware:
                last.seats[id].has_news = True

    def _finish(self) -> None:
        if self.book.finishing:
            return
        self.book.finishing = True
        self._tell([worker.id for worker in self.book.newcomers()], {"ended": ENDED})

    def _end_if_finished(self) -> None:
        last = self.book.last
        if not self.book.finishing or self.ended:
            return
        if last is None or not last.alive() or state_is_lost(self.book, last):
            self.ended = True
            self._tell(self.book.workers, {"ended": ENDED})
            self._note("finished")

    def _forget_failure(self) -> None:
        if self.failure and not self.book.workers:
            self.failure = None

    def _publish(self, draft: Draft) -> None:
        book, before = self.book, self.book.last
        old = before.seats if before else {}
        generation = compose(book, draft, store_port=self._store_port)
        book.number = generation.number
        out = [id for id in old if id not in draft.workers]
        dropped = [id for id in out if old[id].fits(book.workers.get(id))]
        book.last = Last(generation, {id: Seat(id, book.workers[id].session) for id in draft.workers})
        stale = [id for id in dropped if (asked := book.workers[id].ready) and not asked.fresh]
        for id in (*draft.workers, *stale):  # a dropped one that holds state has to ask again, without it
            book.workers[id].ready = None
        self.unsaved, book.searching = True, False
        self._tell(draft.workers, {"generation": generation.to_json()})
        self._note("generation", **generation.to_json(), names=[book.workers[id].name for id in draft.workers])
        if before:
            self._tell(dropped, {"dropped": before.number})

    def _tell(self, to: Iterable[int], message: dict[str, Any]) -> None:
        ids = tuple(to)
        if ids:
            self._out.append(Tell(ids, message))

    def _note(self, kind: str, **data: Any) -> None:
        self._out.append(Happened(kind, data))
