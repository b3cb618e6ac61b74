"""What time brings: silences that last too long, lost workers that do not come back, waits that should be explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.roster.calls import Heard, Mismatch, mismatch, name_workers, sentence, waited_for
from paceline.roster.door import WorkerConnection
from paceline.roster.liveness import BUSY, CHECK_S, FROZEN, GONE, UNKNOWN, ProcessState, SilenceCheck
from paceline.roster.membership_rules import MembershipRules

TICK_S = 0.1
RETURN_S = 10.0
"""Seconds within which a worker whose connection closed may come back before it counts as gone for good; and those
that a restarted roster gives the members it knew before they are lost."""
ABSENT_S = 60.0
"""Seconds after which members that a restarted roster has not seen count as gone for good."""
TELL_S = 1.0
"""How often those who wait for a generation hear what it waits for, if that has changed."""
MENTION_S = 2.0
"""How long a generation is waited for before onlookers hear of it."""


class Timeouts:
    """Looks at every worker a few times per second, and tells the membership rules what the clock says.

    ``workers``: each registered worker's connection, by id, as the server keeps it. ``lose`` gives one up; ``note``:
    for onlookers.
    """

    def __init__(
        self,
        rules: MembershipRules,
        workers: Mapping[int, WorkerConnection],
        *,
        lose: Callable[[WorkerConnection], None],
        note: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._rules, self._workers, self._lose, self._note = rules, workers, lose, note
        self._now = self._ticked = 0.0
        self._away: dict[tuple[int, str], tuple[float, Callable[[], ProcessState]]] = {}
        """The time until which a lost process may come back, and how to look at it, by id and session."""
        self._await_until: float | None = None
        self._waiting_since, self._waiting_told = 0.0, ""
        self._told_at = 0.0

    def may_return(self, id: int, session: str, state: Callable[[], ProcessState], *, cut: bool = False) -> None:
        """Note that a process's connection closed, and that it is not known to have ended.

        ``cut``: the path to it is dead, which shows nothing of the process: it may come back however late, unless it is
        seen to have ended.
        """
        self._away[id, session] = (math.inf if cut else self._now + RETURN_S, state)

    def is_back(self, id: int, session: str) -> None:
        self._away.pop((id, session), None)

    def forgive(self, now: float) -> None:
        """Add to all deadlines the time for which the roster itself stood still.

        Nobody else was silent meanwhile. Call it before what has come is read.
        """
        late = now - self._now - TICK_S if self._now else 0.0
        self._now = now
        if late > TICK_S:
            for connection in self._workers.values():
                connection.last_heard += late
                connection.last_beat += late

    def tick(self, now: float) -> None:
        """Look at every worker, every `TICK_S`; call it often, once what has come is read."""
        if now - self._ticked < TICK_S:
            return
        self._ticked = now
        for id, connection in list(self._workers.items()):
            if not connection.given_up:
                self._check_silence(id, connection, now)
            elif connection.process_state().gone:  # a child of it may hold its socket open
                self._lose(connection)
        self._check_lost(now)
        self._check_absent(now)
        self._check_calls(now)
        self._rules.consider()
        self._check_waiting(now)

    def _check_silence(self, id: int, connection: WorkerConnection, now: float) -> None:
        silent_s = now - connection.last_heard
        if silent_s < CHECK_S:
            return
        state = connection.process_state()
        if connection.silence is None:
            connection.silence = SilenceCheck(state)
            if not state.gone:  # whether it computes shows at the next tick; by then what lies here unread is read
                return
        verdict = connection.silence.judge(silent_s, limit_s=connection.silence_limit.limit_s, state=state)
        if verdict == GONE:
            self._lose(connection)
        elif verdict == BUSY:
            text = f"worker {id} is silent for {silent_s:.0f} s, but its process computes, or would: it is waited for"
            self._rules.roster.workers[id].doing = "computing, without a word"
            self._note("holding", {"id": id, "text": text})
        elif verdict == FROZEN:
            connection.given_up = True
            self._rules.silent(id, f"was silent for {silent_s:.1f} s (frozen, or its network is cut)")

    def _check_lost(self, now: float) -> None:
        """Confirm the loss of processes that have ended, or have had the time to come back."""
        for (id, session), (until, state) in list(self._away.items()):
            if now > until or state().gone:
                del self._away[id, session]
                self._rules.confirm(id, session)

    def _check_absent(self, now: float) -> None:
        """Give up the members that a restarted roster expects and has not seen in time."""
        roster, last = self._rules.roster, self._rules.roster.last
        if not roster.searching and (last is None or not last.stale):
            self._await_until = None
            return
        self._await_until = self._await_until or now + RETURN_S
        if now > self._await_until:
            for id, session in self._rules.give_up_absent("did not come back after the roster's restart"):
                self._away[id, session] = (now + ABSENT_S - RETURN_S, lambda: UNKNOWN)

    def _check_calls(self, now: float) -> None:
        """End the run, or a newcomer's part in it, when calls can never meet.

        Remind a worker that waits long for whom it does.
        """
        last = self._rules.roster.last
        if last is None or last.over or self._rules.failure:
            return
        heard = {id: self._workers[id].heard for id in last.alive() if id in self._workers}
        here = {id: one for id, one in heard.items() if one.beat.generation == last.number}
        if (unlike := mismatch(self._still_asked(here))) is not None:
            self._end_unlike(unlike, sentence(unlike.labels, name_workers(last.generation.facts)))
            return
        for id, one in here.items():
            if one.reminder_is_due(now):
                one.reminded += 1
                label, whom = waited_for(id, heard)
                self._workers[id].send({"nag": f"{label}: waiting for {whom or 'the network'}"})

    def _still_asked(self, heard: dict[int, Heard]) -> dict[int, Heard]:
        """Return those of whom none has been told that its calls are not the fleet's."""
        workers = self._rules.roster.workers
        return {id: one for id, one in heard.items() if (worker := workers.get(id)) and not worker.refused}

    def _end_unlike(self, unlike: Mismatch, text: str) -> None:
        """End the run for those who came later with other calls than the fleet's; for all, where nobody can tell."""
        workers = self._rules.roster.workers
        strangers = unlike.strangers({id: workers[id].since for id in unlike.courses})
        if strangers:
            self._rules.refuse(strangers, "mismatch", f"{text}. The others train on: they were there before")
        else:
            self._rules.fail("mismatch", text)

    def _check_waiting(self, now: float) -> None:
        """Report what a generation waits for: now and then to those who wait, and once it lasts to onlookers.

        Every re-forming waits for a moment.
        """
        if self._rules.waiting and now - self._told_at >= TELL_S:
            self._told_at = now
            self._rules.tell_waiting()
        if not self._rules.waiting:
            self._waiting_since, self._waiting_told = now, ""
        elif now - self._waiting_since > MENTION_S and self._rules.waiting != self._waiting_told:
            self._waiting_told = self._rules.waiting
            self._note("waiting", {"text": self._rules.waiting})
