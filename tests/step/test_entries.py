"""How often newcomers may enter: entries take a fifth of the time at most."""

from __future__ import annotations

import pytest

from paceline.step.members import MOST_S, PART, Entries


def trained(entries: Entries, *, steps: int, step_s: float = 1.0, now_s: float = 0.0) -> float:
    for _ in range(steps):
        now_s += step_s
        entries.round_over(now_s)
    return now_s


def test_the_first_may_enter_at_once_and_the_next_after_four_pauses() -> None:
    entries = Entries()
    now_s = trained(entries, steps=10)
    assert entries.may_open(now_s)
    entries.opened(now_s)
    entries.round_over(now_s := now_s + 1.0 + 3.0)  # a step, and three seconds for the state
    assert not entries.may_open(now_s + 11.9)
    assert entries.may_open(now_s + 12.1)


def test_an_entry_that_costs_nothing_keeps_nobody_waiting() -> None:
    entries = Entries()
    now_s = trained(entries, steps=10)
    entries.opened(now_s)
    entries.round_over(now_s := now_s + 1.0)
    assert entries.may_open(now_s)


def test_however_many_come_one_by_one_entries_take_a_fifth_of_the_time() -> None:
    entries = Entries()
    now_s, paused_s = trained(entries, steps=10), 0.0
    began_s = now_s
    for _ in range(200):
        if entries.may_open(now_s):
            entries.opened(now_s)
            now_s, paused_s = now_s + 2.5, paused_s + 2.5
        entries.round_over(now_s := now_s + 1.0)
    assert 0.15 < paused_s / (now_s - began_s) <= PART + 0.02


def test_a_long_evaluation_before_the_next_step_does_not_shut_the_door_for_long() -> None:
    entries = Entries()
    now_s = trained(entries, steps=3)
    entries.opened(now_s)
    entries.round_over(now_s := now_s + 1000.0)
    assert not entries.may_open(now_s + MOST_S - 1)
    assert entries.may_open(now_s + MOST_S)


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_newcomer_knows_no_usual_step_and_takes_all_for_a_pause(rounds: int) -> None:
    entries = Entries()
    trained(entries, steps=rounds)
    entries.opened(10.0)
    entries.round_over(12.0)
    assert not entries.may_open(19.9)
    assert entries.may_open(20.1)


def test_nobody_enters_right_after_the_round_that_waits_for_another_entry() -> None:
    entries = Entries()
    entries.opened(7.0)
    assert not entries.may_open(8.0), "the header is written while newcomers take their state"
    entries.round_over(9.0)
    assert not entries.may_open(9.5)
    assert entries.may_open(9.0 + 2.0 * (1 / PART - 1))
