"""The roster's rules under random schedules of deaths, freezes, cuts, joins, leaves and its own restarts. No sockets.

A small world plays the workers: each process knows only what it was told. The world knows the truth, and holds the
roster to it: above all that no two generations can ever both run a round.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.roster.membership_rules import Happened, MembershipRules, Refused, Tell
from paceline.roster.state import Generation, Hello, Ready, RosterState

SLOTS = 5
MINIMUM = 2


@dataclass
class Process:
    """A worker's process, as the world sees it."""

    name: str
    session: str
    id: int = -1
    connected: bool = True
    frozen: bool = False
    inside: Generation | None = None
    holds_state: bool = False
    asking: Ready | None = None
    over: int = 0
    news: bool = False
    inbox: list[dict[str, Any]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.inside.number if self.inside else 0

    def hear(self, message: dict[str, Any]) -> None:
        if "generation" in message:
            generation = Generation.from_json(message["generation"])
            if self.asking and generation.number > self.asking.after:
                self.inside, self.asking, self.news = generation, None, False
                self.holds_state = self.holds_state and self.id not in generation.fresh
        if "dropped" in message and self.asking and not self.asking.fresh:
            self.asking, self.holds_state = None, False  # what it holds is of the past: it will ask without
        if "ended" in message:
            self.asking = None
        self.over = max(self.over, message.get("over", 0), message.get("dropped", 0))
        self.news = self.news or "news" in message


class World:
    """Processes, their connections, and one roster that may restart."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rules = MembershipRules(RosterState(MINIMUM, SLOTS), leap=10**9)
        self.saved = self.rules.roster.to_json()
        self.slots: dict[int, Process] = {}
        self.published: list[tuple[Generation, dict[int, str]]] = []
        self.sessions = 0
        self.committed = 0
        self.away: list[tuple[int, str]] = []
        """Id and session of dead processes of which the roster only knows that the connection closed."""

    # -- the roster's ends -----------------------------------------------------------------------------------------

    def deliver(self, *, lost: bool = False) -> None:
        decided = self.rules.drain()
        if self.rules.unsaved:
            self.saved, self.rules.unsaved = self.rules.roster.to_json(), False
        for one in decided:
            if isinstance(one, Happened) and one.kind == "generation":
                self.check_published(Generation.from_json(one.data))
        for one in decided:
            for process in self.slots.values():
                if isinstance(one, Tell) and process.id in one.to and process.connected and not lost:
                    process.inbox.append(one.message)
        for process in self.slots.values():
            self.read(process)

    def read(self, process: Process) -> None:
        if not process.frozen:
            for message in process.inbox:
                process.hear(message)
            process.inbox.clear()

    def check_published(self, new: Generation) -> None:
        here = {process.id: process for process in self.slots.values()}
        members = {id: here[id] for id in new.workers}
        assert not self.published or new.number > self.published[-1][0].number, "numbers grow"
        assert all(one.asking for one in members.values()), "nobody is in without having asked"
        assert set(new.fresh) == set(new.workers) or new.workers[0] not in new.fresh, "a fresh one never leads"
        assert all(one.holds_state for id, one in members.items() if id not in new.fresh)
        assert not new.joined or new.orderly, "newcomers only at a step boundary"
        asked_orderly = all(one.asking and one.asking.orderly for id, one in members.items() if id not in new.fresh)
        assert new.orderly == asked_orderly
        assert len(new.workers) >= MINIMUM or not new.orderly or self.rules.roster.finishing
        assert new.wanting == (0 if new.orderly else max(0, MINIMUM - len(new.workers)))
        if set(new.fresh) == set(new.workers) and self.published:
            before = self.published[-1][1]
            living = [one for one in here.values() if before.get(one.id) == one.session]
            assert not any(one.holds_state for one in living), "a training is begun anew only when its state is lost"
        if self.published:
            self.check_nobody_is_left_behind(new, here, self.published[-1][1])
            self.check_left_and_joined(new, members, self.published[-1][1])
        self.published.append((new, {id: one.session for id, one in members.items()}))

    def check_nobody_is_left_behind(self, new: Generation, here: dict[int, Process], before: dict[int, str]) -> None:
        present = [
            one for one in here.values() if one.connected and not one.frozen and before.get(one.id) == one.session
        ]
        assert all(one.id in new.workers for one in present if one.holds_state)

    def check_left_and_joined(self, new: Generation, members: dict[int, Process], before: dict[int, str]) -> None:
        stayed = {id for id, one in members.items() if before.get(id) == one.session and id not in new.joined}
        assert set(new.joined) == set(new.workers) - stayed
        assert {gone.id for gone in new.left} == set(before) - stayed

    def may_run(self) -> list[int]:
        """Generations whose members are all there and inside: those that could finish a round."""
        inside: dict[int, set[str]] = {}
        for one in self.slots.values():
            if not one.asking:
                inside.setdefault(one.number, set()).add(one.session)
        return [new.number for new, who in self.published if set(who.values()) <= inside.get(new.number, set())]

    # -- what may happen -------------------------------------------------------------------------------------------

    def some(self, **wanted: bool | None) -> Process | None:
        fitting = [
            one
            for _, one in sorted(self.slots.items())
            if all(getattr(one, key) == value for key, value in wanted.items())
        ]
        return self.chance.choice(fitting) if fitting else None

    def start(self) -> None:
        slot = self.chance.randrange(SLOTS)
        if slot in self.slots:
            return
        self.sessions += 1
        process = Process(f"host/{slot}", f"s{self.sessions}")
        try:
            process.id = self.rules.register(Hello(process.name, process.session, {"name": process.name})).id
        except Refused as refused:
            self.check_refusal(refused)
        else:
            self.slots[slot] = process
        self.deliver()

    def ask(self) -> None:
        process = self.some(asking=None, connected=True, frozen=False)
        if process:
            self.say_ready(process, self.chance.random() < 0.5)
            self.deliver()

    def check_refusal(self, refused: Refused) -> None:
        last = self.rules.roster.last
        awaited = last is not None and last.stale and any(id not in self.rules.roster.workers for id in last.alive())
        ending = self.rules.ended or self.rules.roster.finishing
        assert (refused.kind == "ended" and ending) or (refused.kind == "busy" and awaited), refused

    def say_ready(self, process: Process, orderly: bool) -> None:
        process.asking = Ready(process.number, not process.holds_state, orderly)
        self.rules.ready(process.id, process.asking)

    def all_ask_at_a_boundary(self) -> None:
        for process in list(self.slots.values()):
            if process.connected and not process.frozen and not process.asking:
                self.say_ready(process, True)
                self.deliver()

    def run_a_round(self) -> None:
        for number in self.may_run():
            inside = [one for one in self.slots.values() if one.number == number]
            if not any(one.frozen for one in inside):
                assert number >= self.committed, "an older generation committed after a newer one"
                self.committed = number
                for one in inside:
                    one.holds_state = True

    def kill(self) -> None:
        process, seen = self.some(), self.chance.choice(["socket", "socket, surely", "launcher"])
        if not process:
            return
        self.slots = {slot: one for slot, one in self.slots.items() if one is not process}
        if seen == "launcher":
            self.rules.died(process.name, "was killed by signal 9 (SIGKILL)")
        elif process.connected:
            self.rules.lost(process.id, "is gone", sure=seen == "socket, surely")
            self.away += [(process.id, process.session)] if seen == "socket" else []
        else:
            self.away.append((process.id, process.session))
        self.deliver()

    def become_sure_of_the_dead(self) -> None:
        for id, session in self.away:
            self.rules.confirm(id, session)
        self.away = []
        self.deliver()

    def freeze(self) -> None:
        process = self.some(connected=True, frozen=False)
        if process:
            process.frozen = True
            self.rules.silent(process.id, "was silent for 2.1 s (frozen, or its network is cut)")
            self.deliver()

    def wake(self) -> None:
        process = self.some(connected=True, frozen=True)
        if process:
            process.frozen = False
            self.rules.heard(process.id)
            self.deliver()

    def cut(self) -> None:
        process = self.some(connected=True)
        if process:
            process.connected = False
            process.inbox.clear()
            self.rules.lost(process.id, "is gone", sure=False)
            self.deliver()

    def reconnect(self) -> None:
        process = self.some(connected=False)
        if process:
            self.come_back(process)

    def come_back(self, process: Process) -> None:
        hello = Hello(process.name, process.session, {"name": process.name}, process.number, process.inside, True)
        try:
            process.id = self.rules.register(hello).id
        except Refused as refused:
            self.check_refusal(refused)
            if refused.kind == "ended":
                self.slots = {slot: one for slot, one in self.slots.items() if one is not process}
            return
        process.connected, process.frozen = True, False
        self.deliver()
        if process.asking:
            self.rules.ready(process.id, process.asking)
            self.deliver()

    def leave(self) -> None:
        process, why = self.some(connected=True, frozen=False), self.chance.choice(["left (SIGTERM)", "ValueError: no"])
        self.go(process, why)

    def finish(self) -> None:
        process = self.some(connected=True, frozen=False, holds_state=True)
        self.go(process if process and process.number in self.may_run() else None, "finished")

    def go(self, process: Process | None, why: str) -> None:
        if process:
            self.slots = {slot: one for slot, one in self.slots.items() if one is not process}
            self.rules.leave(process.id, why)
            self.deliver()

    def restart_the_roster(self) -> None:
        while_answering, book_lost = self.chance.random() < 0.5, self.chance.random() < 0.3
        process = self.some(asking=None, connected=True, frozen=False) if while_answering else None
        if process:  # it writes its roster, and dies before anybody hears of what is in it
            self.say_ready(process, True)
            self.deliver(lost=True)
        roster, calm = RosterState(MINIMUM, SLOTS), not any(one.frozen for one in self.slots.values())
        newest = self.published[-1][0].number if self.published else 0
        survives = not book_lost or not calm or not any(one.number == newest for one in self.slots.values() if newest)
        if survives:
            roster.restore(self.saved)
        self.rules = MembershipRules(roster, leap=self.saved["number"] + 1)
        for one in self.slots.values():
            one.connected, one.inbox = False, []
        if not survives:  # then those who live are the roster, provided that they come back soon
            for one in self.chance.sample(sorted(self.slots.values(), key=lambda one: -one.number), len(self.slots)):
                self.come_back(one)

    def give_up_members_that_did_not_come_back(self) -> None:
        last = self.rules.roster.last
        if self.rules.roster.searching or (last is not None and last.stale):
            absent = self.rules.give_up_absent("did not come back after the roster's restart")
            sessions = {one.session for one in self.slots.values()}
            was = self.published[-1][1] if self.published else {}
            self.away += [(id, session) for id, session in absent if was.get(id) not in sessions]
            self.deliver()

    # -- what must hold --------------------------------------------------------------------------------------------

    def no_two_generations_can_both_run(self) -> None:
        able = self.may_run()
        assert len(able) <= 1
        assert all(number >= self.committed for number in able)

    def when_all_who_live_ask_they_are_answered(self) -> None:
        calm = all(one.connected and not one.frozen for one in self.slots.values()) and not self.away
        last = self.rules.roster.last
        settled = last is None or all(seat.gone is None or seat.sure for seat in last.seats.values())
        awaited = last is not None and [
            id for id in last.alive() if not last.seats[id].fits(self.rules.roster.workers.get(id))
        ]
        present = not awaited and not self.rules.roster.searching
        asking = [one for one in self.slots.values() if one.asking]
        if calm and settled and present and not self.rules.ended and asking and len(asking) == len(self.slots):
            assert len(asking) < MINIMUM

    def members_hear_that_their_generation_is_over_or_that_somebody_waits(self) -> None:
        last = self.rules.roster.last
        if last is None or self.rules.ended:
            return
        inside = [
            one
            for one in self.slots.values()
            if one.connected and not one.frozen and not one.asking and one.number == last.number
            if last.seats.get(one.id) and last.seats[one.id].session == one.session
        ]
        waiting = self.rules.roster.newcomers() and not self.rules.roster.finishing and len(last.alive()) < SLOTS
        assert all(one.over >= last.number for one in inside if last.over)
        assert all(one.news or one.over >= last.number for one in inside if waiting)


WEIGHTS = {
    World.start: 15,
    World.ask: 12,
    World.all_ask_at_a_boundary: 15,
    World.run_a_round: 15,
    World.kill: 4,
    World.become_sure_of_the_dead: 8,
    World.freeze: 3,
    World.wake: 8,
    World.cut: 2,
    World.reconnect: 16,
    World.leave: 3,
    World.finish: 0.8,
    World.restart_the_roster: 2,
    World.give_up_members_that_did_not_come_back: 4,
}


def play(seed: int, events: int = 100) -> World:
    """One random schedule; what must hold is checked after each event."""
    world = World(seed)
    for action in world.chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=events):
        if world.rules.ended:
            break
        action(world)
        world.no_two_generations_can_both_run()
        world.when_all_who_live_ask_they_are_answered()
        world.members_hear_that_their_generation_is_over_or_that_somebody_waits()
    return world


@pytest.mark.parametrize("block", range(5))
def test_no_schedule_of_faults_breaks_the_roster(block: int) -> None:
    for seed in range(block * 200, (block + 1) * 200):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    met: Counter[str] = Counter()
    for seed in range(200):
        world = play(seed)
        for generation, _ in world.published:
            everybody = set(generation.workers)
            met["generations"] += 1
            met["begun anew"] += set(generation.fresh) == everybody and generation.number > 1
            met["not orderly"] += not generation.orderly
            met["below the minimum"] += generation.wanting > 0
            met["joined while running"] += bool(generation.joined) and set(generation.fresh) != everybody
            met["back under its id"] += bool(set(generation.joined) & {gone.id for gone in generation.left})
        met["rounds"] += world.committed > 0
        met["ended"] += world.rules.ended
    assert met["generations"] > 1000
    assert len(met) == 8
    assert all(times >= 5 for times in met.values()), met
