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
from paceline.roster.generation import Generation, RunOver
from paceline.roster.handshake import ClientConnection, ShakeHands, shake_hands
from paceline.roster.liveness import BEAT_S, computer

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
        shake_hands: ShakeHands = shake_hands,
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
        self._asking: tuple[int, bool, bool] | None = None
        self._reason = ""
        self.network: Callable[[], str] = lambda: ""
        """Where the network between this worker and others does not pass, in words."""
        self.foreign: Callable[[], str] = lambda: ""
        """A collective of the script's own that this worker is in, in words."""
        self.on_beat: Callable[[], None] = lambda: None
        """Called on the thread with every beat, while the roster is there."""
        self._answered_at = concurrency.monotonic()
        self._clock_ahead_s = 0.0
        self._said: tuple[str, int, dict[str, tuple[int, str, bool]]] = ("starting", 0, {})
        self._changed = concurrency.Condition()
        self._closing = self._leaving = False
        self._bye = concurrency.Event()
        self.id = -1
        self._connection: ClientConnection | None = self._find_roster()
        self.id = self._connection.id
        self.running = self._connection.running
        self._thread = concurrency.Thread(target=self._run, name="paceline-roster-client", daemon=True)
        self._thread.start()

    @property
    def store(self) -> tuple[str, int]:
        """Where the roster's store is."""
        connection = self._connection
        return self._address[0], connection.store_port if connection is not None else 0

    def clock(self) -> float:
        """Unix seconds on the roster's clock, which is the fleet's: workers go on with each other's logs, and their own
        clocks may differ by minutes. Less than `CLOCK_S` is the network's doing."""
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
        """Say that this worker has left generation ``after`` (0: none) and wait for the next that has it in.

        ``fresh``: it holds no state of the training; ``orderly``: it comes from a step boundary. Whether it must take
        a peer's state is for the answer to say (`Generation.fresh`): the fleet may have gone on without it meanwhile.
        Raises `RunOver` when the run has ended, and `Dropped` when the fleet has gone on without a worker that still
        holds the state of its last step: it asks again, fresh, once it is at a step boundary. ``still`` hears now and
        then how long this has taken, and may raise.
        """
        with self._changed:
            self._asking, self._reason, self.dropped = (after, fresh, orderly), "", False
        self._send({"ready": [after, fresh, orderly]})
        began, reminded = concurrency.monotonic(), 0
        with self._changed:
            while not self._answered(after):
                self._changed.wait(timeout=0.5)
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
        """What the next beats say: what this worker does, the steps begun, and where it is in each row of calls."""
        self._said = (doing[:200], begun, {lane: (at[0], str(at[1])[:200], at[2]) for lane, at in spots.items()})

    def leave(self, why: str) -> None:
        """Go, and say why: ``finished``, ``left (SIGTERM)``, or an error's text."""
        self._leaving = True
        if not self._closing and self._send({"leave": why[:1000]}):
            self._bye.wait(BYE_S)  # once the roster has heard, the process may end
        self.close()

    def close(self) -> None:
        """Close the connection without a word; the roster takes this worker for lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        connection = self._connection
        if connection is not None:
            connection.break_off()
        if concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            connection = self._connection
            assert connection is not None
            try:
                self._attend(connection)
            except (OSError, EOFError, wire.Garbled) as error:
                connection.close()
                if self._leaving:
                    return
                if not self._closing:
                    logger.warning("the roster is away (%s); training goes on, and it is looked for", _brief(error))
                    self._connection = None
                    self._find_again()
        if self._connection is not None:
            self._connection.close()

    def _attend(self, connection: ClientConnection) -> None:
        """Beat and listen until the connection breaks or the worker leaves."""
        count, beat_at, warned = 0, concurrency.monotonic(), False
        self._answered_at = beat_at
        while not self._closing:
            now = concurrency.monotonic()
            if now - beat_at > STOOD_STILL_S:  # it was this process that heard nothing
                self._answered_at = now
            if now >= beat_at:
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
            with self._changed:
                self.dropped = True
                self._changed.notify_all()
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
            self._note_end(str(message["ended"]))
        elif "bye" in message:
            self._bye.set()

    def _enter(self, generation: Generation) -> None:
        host = self._address[0]  # the store is where the roster is, at the address that reaches it from here
        with self._changed:
            if self._asking is None or generation.number <= self._asking[0]:
                return
            self.generation = replace(generation, store=(host, generation.store[1]))
            self._said = (self._said[0], self._said[1], {})  # calls are compared within one generation
            self._asking, self.news, self.dropped = None, False, False
            self._changed.notify_all()

    def _end(self, number: int) -> None:
        if number > self.over:
            self.over = number
            self._call_on_over(number)

    def _note_end(self, text: str) -> None:
        """The run has ended without this worker: whoever waits in its last generation waits for nobody."""
        with self._changed:
            self._ended = text
            self._changed.notify_all()
        if self.generation is not None:
            self._end(self.generation.number)

    def _fail(self, failure: FleetError) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()
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

    def _find_roster(self) -> ClientConnection:
        """The first time: for a minute, and a refusal is final."""
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
        """After the connection broke: for ever, with a pause between."""
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
            except (OSError, EOFError, wire.Garbled):
                began = concurrency.monotonic()
            with self._changed:
                if not self._closing:
                    self._changed.wait(timeout=BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1

    def _resume(self, connection: ClientConnection) -> None:
        if self._closing:
            connection.close()
            return
        logger.warning("the roster is back")
        with self._changed:
            self._connection, self.id = connection, connection.id  # another id, if the roster has lost its state
            asking = self._asking
        if asking is not None:
            self._send({"ready": list(asking)})

    def _give_up(self, refused: wire.Refused, refused_s: float) -> None:
        """The run has ended, or goes on with another process in this one's place: say so to the thread that waits."""
        if refused.kind == "ended":
            self._note_end(str(refused))
        elif not self.failure and (refused.kind == "failed" or (refused.kind == "busy" and refused_s > BUSY_S)):
            self._fail(FleetError(f"this worker was given up by the roster: {refused}"))

    def _shake_hands(self) -> ClientConnection:
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
        raise ValueError("the run's token is missing: set PACELINE_TOKEN, or give --token")
    if not 0 < len(name) <= 200:
        raise ValueError(f"a worker's name has 1 to 200 characters, got {len(name)}")
    try:
        size = len(json.dumps(dict(facts)))
    except TypeError as error:
        raise ValueError(f"a worker's facts must be JSON: {error}") from None
    if size > wire.MAX_FACTS:
        raise ValueError(f"a worker's facts have {size} bytes of JSON, at most {wire.MAX_FACTS} fit")


def _with_network(nag: str, network: str) -> str:
    """The roster knows whom a worker waits for, and the worker itself where the network does not pass.

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
