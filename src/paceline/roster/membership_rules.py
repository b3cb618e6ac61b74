"""The rules of membership: what happens to workers comes in, what they are to be told comes out.

No clock, no sockets, no files. Each event changes the `RosterState`, asks `decide` for the next generation, and leaves
in `MembershipRules.drain` what is to be sent (`Tell`) and what an onlooker may want to know (`Happened`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.roster.decide import Draft, Wait, compose, decide, state_is_lost
from paceline.roster.generation import Gone
from paceline.roster.identity import adopt, free_id, is_member, known_process
from paceline.roster.state import Hello, Last, Ready, RegisteredWorker, RosterState, Seat
from paceline.roster.wire import Refused

FINISHED = "finished"
"""What a worker says when it leaves because the training has ended."""
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
    """Who is in, who waits, and which generation is the last.

    ``store_port``: of the torch store that serves the generations. ``leap``: a number beyond all that a roster before
    this one may have given, to go on from when its workers come back and the state of that roster is lost.
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
        """What was decided since the last call, in order."""
        out, self._out = self._out, []
        return out

    # -- coming ----------------------------------------------------------------------------------------------------

    def expect(self, more: int) -> None:
        """So many processes were started that will register."""
        self.roster.expected = max(0, self.roster.expected + more)
        self.consider()

    def register(self, hello: Hello) -> RegisteredWorker:
        """A process presents itself, for the first time or after its connection broke; raises `Refused`."""
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
        """A new process comes under this name: the old one, if any, is given up, unless it is there or awaited."""
        id = self.roster.ids.get(name, -1)
        old, seat = self.roster.workers.get(id), self.roster.seat(id)
        if (old is not None and old.present) or (old is None and seat is not None and seat.gone is None):
            raise Refused("busy", f"another process is there as {name!r}: give each worker its own PACELINE_WORKER")
        if old is not None or (seat is not None and not seat.sure):
            self._remove(id, "was replaced by a new process", sure=True)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ready(self, id: int, asked: Ready) -> None:
        """This worker has left generation ``asked.after`` and wants the next."""
        worker, last = self.roster.workers[id], self.roster.last
        worker.asked = True
        if self.ended or (self.roster.finishing and self.roster.seat_of(worker) is None):
            self._tell([id], {"ended": ENDED})
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
        """A silent or lost worker is there again. Nothing happens to one that was never away."""
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
        """Nothing was heard of this worker for longer than it may be silent; its connection stands."""
        worker = self.roster.workers[id]
        worker.present = False
        self._lose(id, text, sure=False)
        self.consider()

    def lost(self, id: int, text: str, *, sure: bool) -> None:
        """This worker's connection is closed. ``sure``: its process has ended; otherwise it may come back."""
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
        """This process was lost, and will not come back."""
        worker, seat = self.roster.workers.get(id), self.roster.seat(id)
        if worker is not None and worker.session == session and worker.away:
            del self.roster.workers[id]
            self._forget_failure()
        if seat is not None and seat.session == session and seat.gone is not None:
            seat.sure = True
        self.consider()

    def give_up_absent(self, text: str) -> list[tuple[int, str]]:
        """Members of before the roster's restart that have not come back are lost; returns their ids and sessions."""
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
        """This worker goes on its own."""
        worker = self.roster.workers.get(id)
        if worker is None:
            return
        if why == FINISHED and self.roster.seat_of(worker) is not None:
            self._finish()
            self.unsaved = True
        self._remove(id, why, sure=True)
        self.consider()

    def died(self, name: str, how: str) -> None:
        """The launcher saw the process of this name end."""
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
        """Whether a restarted roster waits for the process of this name to come back."""
        seat = self.roster.seat(self.roster.ids.get(name, -1))
        return seat is not None and not seat.sure

    def fail(self, kind: str, text: str) -> None:
        """End the run for everybody."""
        if self.failure is None:
            self.failure = (kind, text)
            self._tell(self.roster.workers, {"fail": kind, "text": text})
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
        """The last generation's rounds can no longer end: the members still in it must leave it."""
        last = self.roster.last
        assert last is not None
        if not last.over:
            last.over = True
            inside = [id for id in last.alive() if id in self.roster.workers and not self.roster.workers[id].ready]
            self._tell(inside, {"over": last.number, "why": why})
            self._note("over", number=last.number, text=why)

    def _spread_news(self) -> None:
        """Somebody waits to enter, or the store is gone: the members re-form at their next step boundary."""
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
        self._tell([worker.id for worker in self.roster.newcomers()], {"ended": ENDED})

    def _end_if_finished(self) -> None:
        last = self.roster.last
        if not self.roster.finishing or self.ended:
            return
        if last is None or not last.alive() or state_is_lost(self.roster, last):
            self.ended = True
            self._tell(self.roster.workers, {"ended": ENDED})
            self._note("finished")

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
