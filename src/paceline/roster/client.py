"""A worker's side of the roster: one connection and one thread that beats, listens, and finds the roster again.

The thread never fails a running round by itself: a roster that is away says nothing about the fleet. Only what the
roster *says* changes `RosterClient.over`, `RosterClient.news` and `RosterClient.dropped`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline import concurrency
from paceline.errors import Dropped, FleetError
from paceline.roster import wire
from paceline.roster.calls import ERRORS, reminder_due_s
from paceline.roster.liveness import BEAT_S, computer
from paceline.roster.state import FINISHED, Generation, RunOver
from paceline.roster.wire import RosterConnection, shake_hands

logger = logging.getLogger("paceline")

CONNECT_S = 60.0
"""How long a new worker looks for the roster."""
BUSY_S = 30.0
"""How long it tries again while its name is in use: the process it replaces may not be given up yet."""
STOOD_STILL_S = 1.0
"""A beat that comes so late shows that this process stood still."""
BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between attempts to find the roster; the last for ever."""
BYE_S = 2.0
"""How long a worker that leaves waits until the roster has heard it."""
END_S = 20.0
"""The same for one that has finished, during which it also looks for a roster that is away.

A roster that comes back after the run's end, and was never told of it, lets the next worker train everything anew.
"""
CLOCK_S = 1.0
QUIET_S = 5.0
"""A roster that has not answered a beat for so long is warned about, once."""


class RosterClient:
    """This worker, as the roster knows it.

    ``name`` is unique in the fleet (``host/slot``) and keeps its id across restarts of the process. ``on_over(g)`` is
    called from the thread when generation g turns out to be over, to unblock this worker's round. ``shake_hands``: the
    way to the roster.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str,
        facts: Mapping[str, Any],
        on_over: Callable[[int], None],
        shake_hands: Callable[..., RosterConnection] = shake_hands,
    ) -> None:
        self._address, self._token = wire.parse_address(address), token
        self._fingerprint = wire.parse_fingerprint(address)
        _check(name, facts, token)
        self._name, self._facts, self._on_over = name, dict(facts), on_over
        self._way, self._session = shake_hands, secrets.token_hex(8)
        self.over = 0
        self.news = False
        self.dropped = False
        self.failure: FleetError | None = None
        self.generation: Generation | None = None
        """The last one this worker was in."""
        self._ended: str | None = None
        self.ended_in = 0
        """The run's last generation, once the roster has told of the end; 0: not known."""
        self._asking: tuple[int, bool, bool] | None = None
        self._reason = ""
        self.network: Callable[[], str] = lambda: ""
        """The places where the network to other workers does not pass, in words."""
        self.foreign: Callable[[], str] = lambda: ""
        """A collective of the script's own that this worker is in, in words."""
        self.on_beat: Callable[[], None] = lambda: None
        """Called on the thread with every beat, while the roster is there."""
        self._answered_at = concurrency.monotonic()
        self._clock_ahead_s = 0.0
        self._said: tuple[str, int, dict[str, tuple[int, str, bool]]] = ("starting", 0, {})
        self._lock = concurrency.Condition()
        self._closing = False
        self._leaving = ""
        """Why this worker leaves; empty while it stays."""
        self._bye = concurrency.Event()
        """The roster has heard that this worker leaves, or does not want to."""
        self.id = -1
        self._connection: RosterConnection | None = self._find_roster()
        self.id = self._connection.id
        self.running = self._connection.running
        self._thread = concurrency.Thread(target=self._run, name="paceline-roster-client", daemon=True)
        self._thread.start()

    @property
    def store(self) -> tuple[str, int]:
        """Address of the roster's store."""
        connection = self._connection
        return self._address[0], connection.store_port if connection is not None else 0

    def clock(self) -> float:
        """Return the Unix time on the roster's clock, which is the fleet's.

        Workers continue each other's logs, and their own clocks may differ by minutes. Differences below `CLOCK_S` come
        from the network.
        """
        if (connection := self._connection) is not None:
            self._clock_ahead_s = connection.clock_ahead_s
        return concurrency.time() + (self._clock_ahead_s if abs(self._clock_ahead_s) > CLOCK_S else 0.0)

    @property
    def away(self) -> bool:
        """The roster does not answer, and is looked for."""
        return self._connection is None

    # -- for the engine --------------------------------------------------------------------------------------------

    def next_generation(
        self, *, after: int, fresh: bool, orderly: bool, still: Callable[[float], None] = lambda waited_s: None
    ) -> Generation:
        """Report that this worker has left generation ``after`` (0: none), and wait for the next that has it in."""
        with self._lock:
            self._asking, self._reason, self.dropped = (after, fresh, orderly), "", False
        self._send({"ready": [after, fresh, orderly]})
        began, reminded = concurrency.monotonic(), 0
        with self._lock:
            while not self._answered(after):
                self._lock.wait(timeout=0.5)
                waited_s = concurrency.monotonic() - began
                reminded = self._remind(waited_s, reminded)
                still(waited_s)
            assert self.generation is not None
            return self.generation

    def _answered(self, after: int) -> bool:
        if self.failure:
            raise self.failure
        if self._ended is not None:
            raise RunOver(self._ended)
        if self._closing:
            raise FleetError("this worker has left the fleet")
        if self.dropped and self._asking is not None and not self._asking[1]:
            self._asking = None
            raise Dropped("this worker was silent for too long, and the fleet went on without it", generation=after)
        return self._asking is None and self.generation is not None and self.generation.number > after

    def _remind(self, waited_s: float, reminded: int) -> int:
        if waited_s < reminder_due_s(reminded):
            return reminded
        silent_s = concurrency.monotonic() - self._answered_at
        how = "is away" if self.away else f"has not answered for {silent_s:.0f} s" if silent_s > QUIET_S / 2 else ""
        where = f"waiting for the roster, which {how}" if how else self._reason or "waiting"
        logger.warning("the next generation of the fleet: %s", where)
        return reminded + 1

    def report(self, *, doing: str, begun: int, spots: Mapping[str, tuple[int, str, bool]]) -> None:
        """Set what the next beats report: what this worker does, the steps begun, its position in each lane."""
        self._said = (doing[:200], begun, {lane: (at[0], str(at[1])[:200], at[2]) for lane, at in spots.items()})

    def leave(self, why: str) -> None:
        """Leave, and report why: ``finished``, ``left (SIGTERM)``, or an error's text.

        Once the roster has heard it, the process may end.
        """
        self._leaving = why[:1000]
        if not self._closing and (self._send_leave() or why == FINISHED):
            self._bye.wait(END_S if why == FINISHED else BYE_S)
        self.close()

    def _send_leave(self) -> bool:
        return self._send({"leave": self._leaving})

    def close(self) -> None:
        """Close the connection without a word; the roster takes this worker for lost."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        connection = self._connection
        if connection is not None:
            connection.break_off()
        if concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # memory or threads have run out: who waits here would wait for ever
            logger.exception("the thread that listens to the roster failed")
            self._fail(FleetError(f"the thread that listens to the roster failed ({_brief(error)})"))
        if self._connection is not None:
            self._connection.close()

    def _serve(self) -> None:
        """Attend to the roster, and look for it whenever it is away, until this worker leaves."""
        while not self._closing:
            connection, since = self._connection, concurrency.monotonic()
            assert connection is not None
            try:
                self._attend(connection)
            except (OSError, EOFError, wire.Garbled) as error:
                connection.close()
                if self._bye.is_set() or self._leaving not in ("", FINISHED):
                    return
                if not self._closing:
                    goal = (
                        "it is looked for, to hear of the end"
                        if self._leaving
                        else "training goes on, and it is looked for"
                    )
                    logger.warning("the roster is away (%s); %s", _brief(error), goal)
                    self._connection = None
                    if concurrency.monotonic() - since < BEAT_S:  # a roster that lets everybody in and loses them again
                        self._pause(BEAT_S)
                    self._find_again()

    def _attend(self, connection: RosterConnection) -> None:
        """Beat and listen until the connection breaks or the worker leaves."""
        count, beat_at, warned = 0, concurrency.monotonic(), False
        self._answered_at = beat_at
        while not self._closing:
            now = concurrency.monotonic()
            if now - beat_at > STOOD_STILL_S:  # it was this process that heard nothing
                self._answered_at = now
            if now >= beat_at and self._leaving:  # the roster answers, and closes: a failed beat would hide the answer
                beat_at = now + BEAT_S
            elif now >= beat_at:
                count, beat_at = count + 1, max(beat_at + BEAT_S, now)
                if not self._beat(count):
                    raise EOFError("the connection broke")
                self.on_beat()
            if now - self._answered_at > QUIET_S and not warned:
                warned = True
                logger.warning("the roster has not answered for %.0f s; training goes on", QUIET_S)
            if connection.wait(max(0.0, beat_at - concurrency.monotonic())):
                self._answered_at, warned = concurrency.monotonic(), False
                for message in connection.read():
                    self._hear(message)

    def _beat(self, count: int) -> bool:
        doing, begun, spots = self._said
        doing = f"{doing}, in {foreign}"[:200] if (foreign := self.foreign()) else doing
        number = self.generation.number if self.generation else 0
        return self._send({"beat": count, "generation": number, "doing": doing, "begun": begun, "spots": spots})

    def _hear(self, message: dict[str, Any]) -> None:
        if "generation" in message:
            self._enter(Generation.from_json(message["generation"]))
        elif "over" in message:
            self._end(int(message["over"]))
        elif "dropped" in message:
            with self._lock:
                self.dropped = True
                self._lock.notify_all()
            self._end(int(message["dropped"]))
        elif "news" in message:
            self.news = True
        elif "wait" in message:
            self._reason = str(message["wait"])
        elif "nag" in message:
            logger.warning("%s", _with_network(str(message["nag"]), self.network()))
        elif "fail" in message:
            self._fail(ERRORS.get(message["fail"], FleetError)(message["text"]))
        elif "ended" in message:
            self._note_end(str(message["ended"]), last=int(message.get("last", 0)))
        elif "bye" in message:
            self._bye.set()

    def _enter(self, generation: Generation) -> None:
        host = self._address[0]  # the store is where the roster is, at the address that reaches it from here
        with self._lock:
            if self._asking is None or generation.number <= self._asking[0]:
                return
            self.generation = replace(generation, store=(host, generation.store[1]))
            self._said = (self._said[0], self._said[1], {})  # calls are compared within one generation
            self._asking, self.news, self.dropped = None, False, False
            self._lock.notify_all()

    def _end(self, number: int) -> None:
        if number > self.over:
            self.over = number
            self._call_on_over(number)

    def _note_end(self, text: str, *, last: int = 0) -> None:
        """Note that the run has ended without this worker: whoever waits in its last generation waits for nobody."""
        with self._lock:
            self._ended, self.ended_in = text, last
            self._lock.notify_all()
        if self.generation is not None:
            self._end(self.generation.number)

    def _fail(self, failure: FleetError) -> None:
        with self._lock:
            self.failure = self.failure or failure
            self._lock.notify_all()
        self._call_on_over(self.generation.number if self.generation else 0)

    def _call_on_over(self, number: int) -> None:
        try:
            self._on_over(number)
        except Exception:
            logger.exception("could not break off the round of generation %d", number)

    def _send(self, message: wire.Message) -> bool:
        """Send now if the roster is there; what was asked for is asked again once it is back."""
        connection = self._connection
        if connection is None:
            return False
        try:
            connection.send(message)
        except OSError:
            connection.break_off()  # the thread sees it and looks for the roster
            return False
        return True

    # -- finding the roster ----------------------------------------------------------------------------------------

    def _find_roster(self) -> RosterConnection:
        """Find the roster for the first time: try for a minute; a refusal is final."""
        began, attempt = concurrency.monotonic(), 0
        while True:
            waited = concurrency.monotonic() - began
            try:
                return self._shake_hands()
            except wire.Refused as refused:
                if refused.kind != "busy" or waited > BUSY_S:
                    raise _refusal(refused) from None
                if attempt == 0:  # the one before may be about to end
                    logger.warning("%s; trying for %.0f s", refused, BUSY_S)
            except (OSError, EOFError, wire.Garbled) as error:
                if waited > CONNECT_S:
                    raise FleetError(self._nobody(error)) from None
                if attempt == len(BACK_OFF_S):
                    logger.warning("the roster at %s:%d does not answer yet; trying for a minute", *self._address)
            concurrency.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1

    def _find_again(self) -> None:
        """Find the roster after the connection broke: try for ever, with a pause between."""
        began, attempt, refusal = concurrency.monotonic(), 0, ""
        while not self._closing:
            try:
                self._resume(self._shake_hands())
                return
            except wire.Refused as refused:
                if str(refused) != refusal:
                    refusal = str(refused)
                    logger.warning("the roster does not take this worker back: %s", refusal)
                self._give_up(refused, concurrency.monotonic() - began)
                if self._leaving:
                    self._bye.set()
            except (OSError, EOFError, wire.Garbled):
                began = concurrency.monotonic()
            self._pause(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1

    def _pause(self, seconds: float) -> None:
        """Wait before another attempt, unless this worker closes meanwhile."""
        with self._lock:
            if not self._closing:
                self._lock.wait(timeout=seconds)

    def _resume(self, connection: RosterConnection) -> None:
        if self._closing:
            connection.close()
            return
        logger.warning("the roster is back")
        with self._lock:
            self._connection, self.id = connection, connection.id  # another id, if the roster has lost its state
            asking = self._asking
        if self._leaving:
            self._send_leave()
        elif asking is not None:
            self._send({"ready": list(asking)})

    def _give_up(self, refused: wire.Refused, refused_s: float) -> None:
        """Fail the thread that waits: the run has ended, or continues with another process in this one's place."""
        if refused.kind == "ended":
            self._note_end(str(refused))
        elif not self.failure and (refused.kind == "failed" or (refused.kind == "busy" and refused_s > BUSY_S)):
            self._fail(FleetError(f"this worker was given up by the roster: {refused}"))

    def _shake_hands(self) -> RosterConnection:
        was = self.generation
        hello = {
            "name": self._name,
            "session": self._session,
            "facts": self._facts,
            "process": [os.getpid(), computer()],
            "generation": was.number if was else 0,
            "was": was.to_json() if was else None,
            "returning": self.id >= 0,
        }
        return self._way(self._address, token=self._token, hello=hello, fingerprint=self._fingerprint)

    def _nobody(self, error: BaseException) -> str:
        host, port = self._address
        return (
            f"no roster answers at {host}:{port} ({_brief(error)}): check the address in PACELINE_ROSTER or --join, "
            "that `paceline run` or `paceline host` still runs there, and that it listens beyond its own computer"
        )


def _check(name: str, facts: Mapping[str, Any], token: str) -> None:
    if not token:
        raise ValueError("the run's token is missing: set PACELINE_TOKEN, or give --token-file")
    if not 0 < len(name) <= 200:
        raise ValueError(f"a worker's name has 1 to 200 characters, got {len(name)}")
    try:
        size = len(json.dumps(dict(facts)))
    except TypeError as error:
        raise ValueError(f"a worker's facts must be JSON: {error}") from None
    if size > wire.MAX_FACTS:
        raise ValueError(f"a worker's facts have {size} bytes of JSON, at most {wire.MAX_FACTS} fit")


def _with_network(nag: str, network: str) -> str:
    """Return the roster's reminder, completed by where the network does not pass, which this worker itself measures.

    >>> _with_network("step 3: waiting for the network", "the network to worker 1"), _with_network("waiting for b", "")
    ('step 3: waiting for the network to worker 1', 'waiting for b')
    """
    return f"{nag.removesuffix('the network').removesuffix(' ')} {network}" if network else nag


def _refusal(refused: wire.Refused) -> FleetError:
    if refused.kind == "ended":
        return RunOver(str(refused))
    if refused.kind in ("fingerprint", "plain"):
        return FleetError(str(refused))
    return FleetError(f"the roster refused this worker: {refused}")


def _brief(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
