"""What the roster decides, case by case. Pure: no clock, no sockets."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.roster.membership_rules import CLOSED, Happened, MembershipRules, Refused, Tell, free_id
from paceline.roster.state import Generation, Hello, Ready, RosterState

FIRST = Ready(0, True, True)


def at_boundary(after: int) -> Ready:
    return Ready(after, False, True)


def in_mid_step(after: int) -> Ready:
    return Ready(after, False, False)


class Desk:
    """A rules, and what it has said."""

    def __init__(self, *, minimum: int = 1, maximum: int = 8, expected: int = 0) -> None:
        self.rules = MembershipRules(RosterState(minimum, maximum, expected), leap=10**9)

    def come(self, *slots: int, session: str = "") -> None:
        for slot in slots:
            self.rules.register(self.hello(slot, session))

    def hello(self, slot: int, session: str = "", **more: Any) -> Hello:
        return Hello(
            f"host/{slot}", session or f"session {slot}", {"name": f"host/{slot}"}, returning=bool(more), **more
        )

    def ask(self, request: Ready, *ids: int) -> None:
        for id in ids:
            self.rules.ready(id, request)

    def said(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [(one.to, one.message) for one in self.rules.drain() if isinstance(one, Tell)]

    def told(self, key: str) -> list[tuple[int, ...]]:
        return [to for to, message in self.said() if key in message]

    def published(self) -> Generation | None:
        found = [message["generation"] for _, message in self.said() if "generation" in message]
        return Generation.from_json(found[-1]) if found else None

    def begin(self, *slots: int) -> Generation:
        self.come(*slots)
        self.ask(FIRST, *slots)
        first = self.published()
        assert first is not None
        return first


def test_the_first_generation_waits_for_all_that_were_started() -> None:
    desk = Desk(minimum=2, expected=3)
    desk.come(0, 1)
    desk.ask(FIRST, 0, 1)
    assert desk.published() is None
    assert desk.rules.waiting == "waiting for 1 worker that was started and not heard of yet"
    desk.come(2)
    assert desk.rules.waiting == "waiting for worker 2 (starting)"
    desk.ask(FIRST, 2)
    first = desk.published()
    assert first is not None
    assert (first.number, first.workers, first.fresh, first.orderly) == (1, (0, 1, 2), (0, 1, 2), True)


def test_a_worker_that_dies_before_it_registers_is_no_longer_expected() -> None:
    desk = Desk(minimum=2, expected=3)
    desk.come(0, 1)
    desk.ask(FIRST, 0, 1)
    desk.rules.died("host/2", "was killed by signal 9 (SIGKILL)")
    first = desk.published()
    assert first is not None
    assert first.workers == (0, 1)


def test_a_death_after_the_socket_told_of_it_does_not_count_as_one_more_expected_worker() -> None:
    desk = Desk(minimum=1, expected=3)
    desk.come(0, 1)
    desk.ask(FIRST, 0)
    desk.rules.lost(1, CLOSED, sure=True)
    desk.rules.died("host/1", "was killed by signal 9 (SIGKILL)")
    assert desk.published() is None
    assert desk.rules.roster.expected == 1


def test_a_lost_member_ends_its_generation_and_the_survivors_go_on_in_their_order() -> None:
    desk = Desk()
    desk.begin(0, 1, 2)
    desk.rules.lost(1, CLOSED, sure=False)
    assert desk.told("over") == [(0, 2)]
    desk.rules.died("host/1", "was killed by signal 9 (SIGKILL)")
    desk.ask(in_mid_step(1), 2)
    assert desk.published() is None
    desk.ask(in_mid_step(1), 0)
    second = desk.published()
    assert second is not None
    assert (second.number, second.workers, second.fresh, second.orderly) == (2, (0, 2), (), False)
    assert [(gone.id, gone.text) for gone in second.left] == [(1, "was killed by signal 9 (SIGKILL)")]


def test_newcomers_enter_at_a_boundary_and_never_in_mid_step() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.come(2)
    desk.ask(FIRST, 2)
    assert desk.told("news") == [(0, 1)]
    desk.ask(in_mid_step(1), 0, 1)
    second = desk.published()
    assert second is not None
    assert second.workers == (0, 1)
    desk.ask(at_boundary(2), 1, 0)
    third = desk.published()
    assert third is not None
    assert (third.workers, third.fresh, third.joined, third.orderly) == ((0, 1, 2), (2,), (2,), True)


def test_incumbents_rank_before_newcomers_whatever_their_ids() -> None:
    desk = Desk()
    desk.begin(5, 7)
    desk.come(1)
    desk.ask(FIRST, 1)
    desk.ask(at_boundary(1), 5, 7)
    second = desk.published()
    assert second is not None
    assert second.workers == (5, 7, 1)


def test_below_the_minimum_survivors_finish_their_step_and_then_wait_for_a_named_number() -> None:
    desk = Desk(minimum=3)
    desk.begin(0, 1, 2)
    desk.rules.lost(2, CLOSED, sure=True)
    desk.ask(in_mid_step(1), 0, 1)
    second = desk.published()
    assert second is not None
    assert second.wanting == 1
    desk.ask(at_boundary(2), 0, 1)
    assert desk.published() is None
    assert desk.rules.waiting == "waiting for 1 more worker: 2 of at least 3 are ready"
    desk.come(2, session="another process")
    desk.ask(FIRST, 2)
    third = desk.published()
    assert third is not None
    assert (third.workers, third.wanting) == ((0, 1, 2), 0)


def test_a_process_that_came_back_under_its_name_has_left_and_joined() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.rules.died("host/1", "was killed by signal 9 (SIGKILL)")
    desk.come(1, session="another process")
    desk.ask(FIRST, 1)
    desk.ask(at_boundary(1), 0)
    second = desk.published()
    assert second is not None
    assert (second.workers, second.fresh, second.joined) == ((0, 1), (1,), (1,))
    assert [gone.id for gone in second.left] == [1]


def test_a_silent_member_that_wakes_before_the_fleet_has_gone_on_is_a_member_still() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.rules.silent(1, "was silent")
    desk.rules.heard(1)
    assert desk.told("over") == [(0,), (1,)]
    desk.ask(in_mid_step(1), 0, 1)
    second = desk.published()
    assert second is not None
    assert (second.workers, second.fresh, second.left) == ((0, 1), (), ())


def test_a_silent_member_that_wakes_after_the_fleet_has_gone_on_enters_anew() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.rules.silent(1, "was silent for 2.1 s")
    desk.ask(in_mid_step(1), 0)
    assert desk.told("dropped") == [(1,)]
    desk.rules.heard(1)
    desk.ask(in_mid_step(1), 1)
    assert desk.told("dropped") == [(1,)]
    desk.ask(Ready(1, True, True), 1)
    desk.ask(at_boundary(2), 0)
    third = desk.published()
    assert third is not None
    assert (third.workers, third.fresh) == ((0, 1), (1,))


def test_the_last_holder_of_the_state_is_waited_for_while_it_is_only_silent() -> None:
    desk = Desk()
    desk.begin(0)
    desk.come(1)
    desk.ask(FIRST, 1)
    desk.rules.silent(0, "was silent")
    assert desk.published() is None
    assert desk.rules.waiting == "waiting for worker 0 (silent): nobody else holds the training's state"
    desk.rules.lost(0, CLOSED, sure=False)
    assert desk.published() is None
    desk.rules.confirm(0, "session 0")
    anew = desk.published()
    assert anew is not None
    assert (anew.number, anew.workers, anew.fresh) == (2, (1,), (1,))


def test_a_round_that_failed_on_one_member_ends_the_generation_for_all() -> None:
    desk = Desk()
    desk.begin(0, 1, 2)
    desk.ask(in_mid_step(1), 1)
    assert desk.told("over") == [(0, 2)]


def test_a_member_that_leaves_when_the_others_are_at_the_boundary_disturbs_nobody() -> None:
    desk = Desk()
    desk.begin(0, 1, 2)
    desk.ask(at_boundary(1), 0, 1)
    desk.rules.leave(2, "left (SIGTERM)")
    said = desk.said()
    assert not [message for _, message in said if "over" in message]
    second = Generation.from_json(next(message["generation"] for _, message in said if "generation" in message))
    assert (second.workers, second.orderly) == ((0, 1), True)
    assert [(gone.id, gone.text) for gone in second.left] == [(2, "left (SIGTERM)")]


def test_once_a_member_has_finished_nobody_enters_and_nobody_is_disturbed() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.come(2)
    desk.ask(FIRST, 2)
    desk.said()
    desk.rules.leave(0, "finished")
    said = desk.said()
    assert ((2,), {"ended": "the run has ended", "last": 1}) in said
    assert not [message for _, message in said if "over" in message]
    with pytest.raises(Refused, match="the run has ended"):
        desk.come(3)
    desk.rules.leave(1, "finished")
    assert desk.rules.ended


def test_a_full_fleet_refuses_and_a_lost_worker_makes_room() -> None:
    desk = Desk(maximum=2)
    desk.begin(0, 1)
    with pytest.raises(Refused, match="the fleet is full: 2 of at most 2"):
        desk.come(2)
    desk.rules.silent(1, "was silent")
    desk.come(2)


def test_a_name_in_use_is_refused_until_its_process_is_gone_or_silent() -> None:
    desk = Desk()
    desk.begin(0, 1)
    with pytest.raises(Refused, match="another process is there as 'host/1'") as refused:
        desk.come(1, session="another process")
    assert refused.value.kind == "busy"
    desk.rules.silent(1, "was silent")
    desk.come(1, session="another process")
    assert desk.rules.roster.workers[1].session == "another process"


def test_a_member_whose_answer_was_lost_with_its_connection_gets_it_again() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.rules.register(desk.hello(1))
    desk.said()
    desk.ask(FIRST, 1)
    again = desk.published()
    assert again is not None
    assert again.number == 1


def test_a_restarted_roster_goes_on_from_its_book_and_asks_the_members_to_form_anew() -> None:
    desk = Desk()
    first = desk.begin(0, 1)
    saved = desk.rules.roster.to_json()
    after = Desk()
    after.rules.roster.restore(saved)
    after.rules.register(after.hello(1, generation=1, was=first))
    assert after.told("news") == [(1,)]
    after.ask(at_boundary(1), 1)
    assert after.rules.waiting == "waiting for worker 0 (not back yet)"
    after.rules.register(after.hello(0, generation=1, was=first))
    after.ask(at_boundary(1), 0)
    second = after.published()
    assert second is not None
    assert (second.number, second.workers, second.fresh, second.left) == (2, (0, 1), (), ())


def test_a_roster_that_lost_its_book_takes_the_fleet_over_from_its_members_under_a_number_never_given() -> None:
    first = Desk().begin(0, 1)
    after = Desk()
    for slot in (1, 0):
        after.rules.register(after.hello(slot, generation=1, was=first))
    after.ask(at_boundary(1), 0, 1)
    second = after.published()
    assert second is not None
    assert (second.number, second.workers, second.fresh) == (10**9 + 1, (0, 1), ())


def test_a_roster_that_lost_its_book_does_not_begin_anew_while_the_old_fleet_may_come_back() -> None:
    first = Desk().begin(0, 1)
    after = Desk()
    after.rules.register(after.hello(2, generation=0, was=None))
    after.ask(FIRST, 2)
    assert after.published() is None
    for slot in (1, 0):
        after.rules.register(after.hello(slot, generation=1, was=first))
    after.ask(at_boundary(1), 0, 1)
    second = after.published()
    assert second is not None
    assert (second.workers, second.fresh) == ((0, 1, 2), (2,))


def test_of_several_old_fleets_the_youngest_is_taken_over() -> None:
    desk = Desk()
    first = desk.begin(0, 1, 2)
    desk.rules.silent(2, "was silent")
    desk.ask(in_mid_step(1), 0, 1)
    second = desk.published()
    after = Desk()
    after.rules.register(after.hello(2, generation=1, was=first))
    for slot in (0, 1):
        after.rules.register(after.hello(slot, generation=2, was=second))
    after.ask(in_mid_step(1), 2)
    assert (2,) in after.told("dropped")
    after.ask(at_boundary(2), 0, 1)
    third = after.published()
    assert third is not None
    assert third.workers == (0, 1)


def test_newcomers_that_were_sooner_than_the_fleet_of_a_lost_book_keep_their_ids() -> None:
    first = Desk().begin(0, 1)
    after = Desk()
    after.rules.register(Hello("elsewhere/0", "new", {"name": "elsewhere/0"}))
    worker = after.rules.register(after.hello(0, generation=1, was=first))
    assert worker.id != after.rules.roster.ids["elsewhere/0"]
    assert (worker.id,) in after.told("dropped")


def test_a_book_of_a_finished_run_leaves_numbers_and_names_alone() -> None:
    desk = Desk()
    desk.begin(0)
    desk.rules.leave(0, "finished")
    after = Desk()
    after.rules.roster.restore(desk.rules.roster.to_json())
    again = after.begin(0)
    assert (again.number, again.fresh, again.left) == (2, (0,), ())


def test_a_failure_reaches_everybody_once_and_is_forgotten_when_all_have_gone() -> None:
    desk = Desk()
    desk.begin(0, 1)
    desk.rules.fail("mismatch", "worker 0 called this")
    desk.rules.fail("mismatch", "worker 1 called that")
    assert desk.said() == [((0, 1), {"fail": "mismatch", "text": "worker 0 called this"})]
    with pytest.raises(Refused, match="worker 0 called this"):
        desk.come(2)
    desk.rules.leave(0, "CallMismatch")
    desk.rules.lost(1, CLOSED, sure=True)
    desk.come(2)


def test_onlookers_hear_who_is_in_by_name() -> None:
    desk = Desk()
    desk.come(0, 1)
    desk.ask(FIRST, 0, 1)
    happened = [one for one in desk.rules.drain() if isinstance(one, Happened)]
    assert [one.kind for one in happened] == ["registered", "registered", "generation"]
    assert happened[-1].data["names"] == ["host/0", "host/1"]


def test_an_id_is_the_slot_where_that_is_free() -> None:
    assert free_id("a/3", set()) == 3
    assert free_id("b/3", {3}) == 0
    assert free_id("a/12345", {0}) == 1
    assert free_id("no slot", {0, 1}) == 2


def test_a_new_roster_whose_clock_is_behind_goes_on_beyond_the_fleets_numbers() -> None:
    """A roster without its state, on another computer, takes the clock for a number beyond all that were given."""
    number = 1_700_000_900
    desk = Desk()
    desk.rules = MembershipRules(RosterState(1, 8, 0), leap=1_700_000_000)
    desk.rules.register(desk.hello(0, generation=number))
    assert desk.rules.roster.number > number


def test_a_restarted_roster_whose_book_is_a_generation_behind_goes_on_with_those_who_ask() -> None:
    desk = Desk()
    desk.begin(0)
    behind = desk.rules.roster.to_json()
    desk.ask(at_boundary(1), 0)
    second = desk.published()
    assert second is not None
    after = Desk()
    after.rules.roster.restore(behind)
    after.rules.register(after.hello(0, generation=2, was=second))
    after.ask(at_boundary(2), 0)
    assert after.published() is not None, after.rules.waiting
