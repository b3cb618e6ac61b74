"""The roster's server: one thread at its door, one `MembershipRules` that decides, and the torch store beside it.

Run by the launcher, or by ``paceline host`` on its own. It holds no state of the training: if it dies the fleet
trains on, and if it comes back with its state file the workers find it again by themselves.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.roster import persistence, wire
from paceline.roster.calls import Beat
from paceline.roster.door import MAX_UNSENT, Closed, SocketDoor, WorkerConnection
from paceline.roster.membership_rules import CLOSED, Happened, MembershipRules
from paceline.roster.state import Generation, Hello, Ready, RosterState
from paceline.roster.timeouts import TICK_S, Timeouts
from paceline.roster.wire import Certificate

logger = logging.getLogger("paceline")

PROVE_S = 5.0
"""Seconds within which a connection must have proven that it knows the token."""
MUTE_S = 2.5
"""Seconds after which one that has said nothing is told, in the clear, to speak TLS: workers of version 1 wait for the
roster's word, for 5 s."""
UNPROVEN = 64
"""Connections that may be without proof at a time; a further one takes the oldest one's place."""


class RosterServer:
    """Decides who is in the fleet, and tells the workers.

    ``expect``: workers that are being started, for whom the first generation waits. ``state``: a file from which a
    restarted roster goes on. ``certificate``: the file that keeps its certificate, by default beside ``state``; without
    either it has a new one each time. ``on_event(kind, data)`` is called on the roster's thread with *registered*,
    *refused*, *generation*, *over*, *left*, *returned*, *waiting*, *holding*, *failed* and *finished*. ``door``: where
    workers connect, by default sockets at ``host`` and ``port``; ``store``: by default torch's, on ``host``.
    """

    def __init__(
        self,
        *,
        minimum: int,
        maximum: int,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        state: Path | None = None,
        certificate: Path | None = None,
        expect: int = 0,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        door: SocketDoor | None = None,
        store: persistence.StoreHost | None = None,
    ) -> None:
        if not 1 <= minimum <= maximum:
            raise ValueError(f"a fleet of {minimum} to {maximum} workers cannot be: write 1 <= minimum <= maximum")
        if not token:
            raise ValueError("the roster needs a token: whoever knows it may join the run")
        self._token, self._state, self._on_event = token, state, on_event
        roster = RosterState(minimum, maximum, expected=expect)
        saved = persistence.load(state) if state else None
        if saved:
            roster.restore(saved)
        kept = certificate or (persistence.beside(state) if state else None)
        self._door = door or SocketDoor(host, port, Certificate(kept))
        self.port, self.fingerprint = self._door.port, self._door.fingerprint
        self.address = wire.written(self._door.host, self.port, self.fingerprint)
        self._store = store or persistence.StoreHost(host)
        self._rules = MembershipRules(roster, store_port=self._store.port, leap=int(concurrency.time()))
        self._lock = concurrency.RLock()
        self._connections: dict[WorkerConnection, None] = {}
        """Set in the order of arrival."""
        self._by_worker: dict[int, WorkerConnection] = {}
        self._timeouts = Timeouts(self._rules, self._by_worker, lose=partial(self._lose, cut=False), note=self._note)
        self._happened: deque[Happened] = deque()
        self._closing = False
        self._unsavable = False
        self._thread = concurrency.Thread(target=self._run, name="paceline-roster", daemon=True)

    # -- for the launcher ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; returns at once."""
        self._store.start()
        self._thread.start()

    def died(self, name: str, how: str) -> None:
        """Note that the process of this name has ended, as ``how`` says: ``was killed by signal 9 (SIGKILL)``."""
        with self._lock:
            self._rules.died(name, how)
            self._carry_out()
            id = self._rules.roster.ids.get(name, -1)
            if id in self._by_worker and id not in self._rules.roster.workers:  # a child of it may hold its socket open
                self._drop(self._by_worker[id])
        self._door.wake()

    def expect(self, more: int) -> None:
        """Expect more processes (fewer, when negative): the first generation waits for them."""
        with self._lock:
            self._rules.expect(more)
            self._carry_out()
        self._door.wake()

    def snapshot(self) -> dict[str, Any]:
        """Return members, those who wait, the generation's number, whether the run finished, and what is waited for."""
        with self._lock:
            roster, last = self._rules.roster, self._rules.roster.last
            inside = last.alive() if last else []
            outside = [
                worker for worker in roster.workers.values() if roster.seat_of(worker) is None and worker.present
            ]
            return {
                "generation": last.number if last else 0,
                "members": [{"id": id, "name": self._name(id)} for id in inside],
                "waiting": [{"id": worker.id, "name": worker.name} for worker in outside],
                "minimum": roster.minimum,
                "maximum": roster.maximum,
                "waiting_for": self._rules.waiting,
                "finished": self._rules.ended,
                "failure": self._rules.failure[1] if self._rules.failure else None,
            }

    def close(self) -> None:
        """Stop serving. Workers that are still there train on, and look for the roster."""
        with self._lock:
            self._closing = True
        self._door.wake()
        if self._thread.is_alive() and concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        with self._lock:
            for connection in list(self._connections):
                connection.close()
            self._door.close()
            self._store.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            events = self._door.wait(TICK_S)
            with self._lock:
                now = concurrency.monotonic()  # one reading for both: while the roster is held up, nobody is silent
                self._timeouts.forgive(now)
                for connection, writable in events:
                    self._attend(connection, writable)
                self._tick(now)
                self._carry_out()
                self._arm()
            self._report()
        self._door.release()

    def _attend(self, connection: WorkerConnection | None, writable: bool) -> None:
        if connection is None:
            self._accept()
        elif connection in self._connections:
            if writable:
                connection.flush()
            try:
                self._read(connection)
            except Exception:  # whatever one connection brings, the others are served
                logger.exception("the roster gives up the connection from %s", connection.peer)
                self._lose(connection, cut=False)

    def _accept(self) -> None:
        connection = self._door.accept()
        if connection is None:
            return
        unproven = [one for one in self._connections if not one.proven]
        if len(unproven) >= UNPROVEN:
            self._drop(min(unproven, key=lambda one: one.opened))
        self._connections[connection] = None
        if not connection.proven:
            connection.send({"paceline": wire.VERSION, "challenge": connection.challenge})

    def _read(self, connection: WorkerConnection) -> None:
        try:
            for message in connection.read():
                self._hear(connection, message)
        except Closed as closed:
            self._lose(connection, cut=closed.cut)
        except wire.Refused as refused:
            self._refuse(connection, refused.kind, str(refused))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            self._refuse(connection, "garbled", f"sent what makes no sense ({str(error)[:100]})")

    def _hear(self, connection: WorkerConnection, message: dict[str, Any]) -> None:
        if connection not in self._connections:  # dropped by a message before this one
            return
        if not connection.proven:
            self._check_proof(connection, message)
        elif connection.worker is None:
            self._admit(connection, message["hello"])
        else:
            self._hear_worker(connection, connection.worker, message)

    def _check_proof(self, connection: WorkerConnection, message: dict[str, Any]) -> None:
        theirs, mine = str(message["challenge"]), connection.challenge
        if not wire.proven(message["proof"], wire.proof(self._token, "worker", mine, theirs, self.fingerprint)):
            advice = "give it as PACELINE_TOKEN or --token-file"
            self._refuse(connection, "token", f"it does not know this run's token: {advice}")
            return
        connection.prove()
        connection.send({"proof": wire.proof(self._token, "roster", mine, theirs, self.fingerprint)})

    def _admit(self, connection: WorkerConnection, said: dict[str, Any]) -> None:
        hello = _read_hello(said)
        process = (int(said["process"][0]), str(said["process"][1]))
        self._give_up_if_gone(hello)
        try:
            worker = self._rules.register(hello)
        except wire.Refused as refused:
            self._refuse(connection, refused.kind, str(refused), name=hello.name)
            return
        old = self._by_worker.get(worker.id)
        if old is not None:
            self._drop(old)
        connection.worker, connection.session, connection.process = worker.id, hello.session, process
        self._by_worker[worker.id] = connection
        self._timeouts.is_back(worker.id, worker.session)
        welcome = {"welcome": worker.id, "running": self._running(worker.id), "store": self._store.port}
        connection.send({**welcome, "now": concurrency.time()})

    def _give_up_if_gone(self, hello: Hello) -> None:
        """Give up the process that had this name if it has ended: a child of it may hold its connection open."""
        id = self._rules.roster.ids.get(hello.name, -1)
        old, connection = self._rules.roster.workers.get(id), self._by_worker.get(id)
        if old and connection and old.session != hello.session and connection.process_state().gone:
            self._lose(connection, cut=False)

    def _running(self, id: int) -> bool:
        last = self._rules.roster.last
        return last is not None and any(other in self._rules.roster.workers for other in last.alive() if other != id)

    def _hear_worker(self, connection: WorkerConnection, id: int, message: dict[str, Any]) -> None:
        now = concurrency.monotonic()
        beat = Beat.read(message) if "beat" in message else None
        if beat:
            connection.note_beat(beat, now)
            self._rules.roster.workers[id].doing = beat.doing[:200]
            connection.send({"ack": message["beat"]})
        back = connection.given_up
        if back:
            connection.note_return(now)
        connection.last_heard, connection.silence = now, None
        if back:
            self._rules.heard(id)
        if "ready" in message:
            after, fresh, orderly = message["ready"]
            self._rules.ready(id, Ready(int(after), bool(fresh), bool(orderly)))
        if "leave" in message:
            self._rules.leave(id, str(message["leave"])[:1000])
            connection.send({"bye": True})
            self._drop(connection)

    # -- consequences ----------------------------------------------------------------------------------------------

    def _lose(self, connection: WorkerConnection, *, cut: bool) -> None:
        """Give up a connection that is closed, or through which nothing passes any more."""
        id = connection.worker
        self._drop(connection)
        if id is None:
            return
        gone = not cut and connection.process_state().gone
        if not gone:
            self._timeouts.may_return(id, connection.session, connection.process_state, cut=cut)
        self._rules.lost(id, "was cut off (nothing gets through to it)" if cut else CLOSED, sure=gone)

    def _refuse(self, connection: WorkerConnection, kind: str, text: str, *, name: str = "") -> None:
        connection.send({"refused": kind, "text": text})
        self._note("refused", {"kind": kind, "text": text, "from": connection.peer, "name": name})
        self._lose(connection, cut=False)

    def _drop(self, connection: WorkerConnection) -> None:
        self._connections.pop(connection, None)
        if connection.worker is not None and self._by_worker.get(connection.worker) is connection:
            del self._by_worker[connection.worker]
        connection.worker = None
        self._door.forget(connection)
        connection.close()

    def _tick(self, now: float) -> None:
        for connection in [one for one in self._connections if not one.proven]:
            if now - connection.opened > PROVE_S:
                self._drop(connection)
            elif connection.mute and now - connection.opened > MUTE_S:
                self._refuse(connection, "plain", str(connection.refuse_plain()))
        self._timeouts.tick(now)

    def _note(self, kind: str, data: dict[str, Any]) -> None:
        self._happened.append(Happened(kind, data))

    def _carry_out(self) -> None:
        """Send what the rules have decided; what must outlive the roster is on disk before anybody hears of it."""
        decided = self._rules.drain()
        if self._rules.unsaved:
            self._save()
        for one in decided:
            if isinstance(one, Happened):
                self._happened.append(one)
                continue
            line = wire.encode(one.message)  # once: a generation holds every member's facts
            for id in one.to:
                if id in self._by_worker:
                    self._by_worker[id].send(line)

    def _save(self) -> None:
        self._rules.unsaved = False
        if self._state is None:
            return
        try:
            persistence.save(self._state, self._rules.roster.to_json())
        except OSError as error:
            if not self._unsavable:
                logger.warning("the roster cannot write %s (%s): a restart could not go on from it", self._state, error)
            self._unsavable = True

    def _arm(self) -> None:
        """Wait for room to write exactly where something waits to be sent; give up a worker that never reads."""
        for connection in list(self._connections):
            if connection.backlog > MAX_UNSENT:
                self._lose(connection, cut=True)
            else:
                self._door.arm(connection)

    def _report(self) -> None:
        while self._happened:
            one = self._happened.popleft()
            logger.debug("roster: %s %s", one.kind, one.data)
            try:
                if self._on_event:
                    self._on_event(one.kind, one.data)
            except Exception:
                logger.exception("the roster's onlooker failed")

    def _name(self, id: int) -> str:
        last, worker = self._rules.roster.last, self._rules.roster.workers.get(id)
        return worker.name if worker else str(last.generation.facts[id].get("name", "")) if last else ""


def _read_hello(said: dict[str, Any]) -> Hello:
    """Return what a process says of itself, checked: everything bounded, nothing trusted that could break the state."""
    name, session, facts = str(said["name"]), str(said["session"]), said["facts"]
    if not 0 < len(name) <= 200 or not 0 < len(session) <= 100:
        raise ValueError("a worker's name has 1 to 200 characters")
    if not isinstance(facts, dict) or len(json.dumps(facts)) > wire.MAX_FACTS:
        raise ValueError(f"a worker's facts are a JSON object of at most {wire.MAX_FACTS} bytes")
    was = Generation.from_json(said["was"]) if said.get("was") else None
    if was is not None and not all(id in was.facts and "name" in was.facts[id] for id in was.workers):
        raise ValueError("a generation names all its members")
    return Hello(name, session, {**facts, "name": name}, int(said["generation"]), was, bool(said["returning"]))
