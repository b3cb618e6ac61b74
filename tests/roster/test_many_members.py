"""What the roster does with a thousand members: nothing that grows with the square of their number."""

from __future__ import annotations

import pytest

from paceline.roster import calls, wire
from paceline.roster.calls import CALLS, Beat, Heard, Spot, mismatch
from paceline.roster.membership_rules import MembershipRules, Tell
from paceline.roster.state import MOST_NAMED, Hello, Ready, RosterState
from paceline.roster.timeouts import Timeouts

MANY = 300
FIRST = Ready(0, True, True)


def rules_of(many: int) -> MembershipRules:
    rules = MembershipRules(RosterState(many, many, many))
    for number in range(many):
        rules.register(Hello(f"host/{number}", f"session {number}", {"name": f"host/{number}"}))
    return rules


def reasons(rules: MembershipRules) -> list[tuple[int, ...]]:
    return [one.to for one in rules.drain() if isinstance(one, Tell) and "wait" in one.message]


def test_when_many_ask_one_after_another_those_before_are_not_told_each_time_what_is_waited_for() -> None:
    rules = rules_of(MANY)
    for id in range(MANY - 1):
        rules.ready(id, FIRST)
    assert not reasons(rules)
    rules.tell_waiting()
    rules.tell_waiting()
    assert reasons(rules) == [tuple(range(MANY - 1))]


def test_a_sentence_about_many_workers_names_the_first_and_counts_the_rest() -> None:
    rules = rules_of(MANY)
    rules.ready(0, FIRST)
    assert rules.waiting.startswith("waiting for worker 1 (starting), worker 2 (starting), ")
    assert rules.waiting.endswith(f" and {MANY - 1 - MOST_NAMED} more")


def test_members_that_wait_in_the_same_call_are_compared_with_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = calls.passed_by
    monkeypatch.setattr(calls, "passed_by", lambda id, *others: compared.append(id) or real(id, *others))
    beat = Beat(1, "step 4", 5, {CALLS: Spot(7, "a round", True)})
    heard = {id: Heard(beat, steady=2) for id in range(MANY)}
    assert mismatch(heard) is None
    assert compared == [0]
    heard[MANY - 1] = Heard(Beat(1, "step 4", 5, {CALLS: Spot(7, "fleet.save()", True)}), steady=2)
    unlike = mismatch(heard)
    assert unlike is not None
    assert unlike.labels[MANY - 1] == "fleet.save()"


def test_a_line_is_written_once_for_all_who_get_it() -> None:
    line = wire.encode({"over": 3})
    assert wire.encode(line) is line


def test_those_who_wait_hear_what_for_once_a_second() -> None:
    rules, told = rules_of(3), []
    rules.ready(0, FIRST)
    timeouts = Timeouts(rules, {}, lose=lambda connection: None, note=lambda kind, data: None)
    for tenth in range(1000, 1030):
        rules.roster.workers[1].doing = f"loading file {tenth}"
        timeouts.tick(tenth / 10)
        told += reasons(rules)
    assert told == [(0,)] * 3
