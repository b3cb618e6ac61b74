"""How far a worker is with its calls, and who gives the last one's result to whom."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import FleetError
from paceline.roster.calls import BACKGROUND, CALLS, Spot
from paceline.transport.call_sequences import CallSequences
from paceline.transport.elastic.handover import Gift, Lane, Lanes, gift


def at(finished: int, *, facts: bool = False) -> dict[str, Any]:
    return {"finished": finished, "facts_kept": facts}


def test_calls_are_counted_and_one_that_was_cut_short_keeps_its_number() -> None:
    sequences = CallSequences(CALLS, BACKGROUND)
    lanes = Lanes(sequences)
    assert lanes.enter("a round", lane=CALLS) == 1
    lanes[CALLS].finish(facts=None, tensors=(torch.ones(1),))
    assert lanes.enter("another", lane=CALLS) == 2
    assert lanes.enter("another", lane=CALLS) == 2, "it is made again"
    assert (lanes[CALLS].entered, lanes[CALLS].finished) == (2, 1)
    assert sequences.spots()[CALLS] == Spot(2, "another", waiting=True)
    sequences.leave(lane=CALLS)
    assert sequences.spots() == {CALLS: Spot(2, "another", waiting=False), BACKGROUND: Spot(0, "", waiting=False)}


def test_one_that_fell_out_is_shown_in_its_last_call_and_at_no_step() -> None:
    sequences = CallSequences(CALLS, BACKGROUND)
    lanes = Lanes(sequences)
    sequences.note("step 40", begun=41)
    lanes.skip_to(7, lane=CALLS)
    lanes.enter("the round of step 40", lane=CALLS)
    lanes.forget()
    assert (sequences.begun, sequences.spots()[CALLS].call, lanes[CALLS].finished) == (0, 7, 7)


def test_what_there_is_to_tell_is_told_at_once() -> None:
    told: list[str] = []
    sequences = CallSequences(CALLS, on_change=lambda: told.append(sequences.doing))
    sequences.note("a long compile")
    assert sequences.enter("fleet.any()", lane=CALLS, since=1.0) == 1
    assert sequences.longest_wait() == (CALLS, 1.0)
    sequences.leave(lane=CALLS)
    assert (told, sequences.longest_wait()) == (["a long compile"] * 3, (CALLS, None))


def test_what_was_given_is_kept_to_be_given_on_and_counts_as_finished() -> None:
    received = (torch.zeros(2),)
    lane = Lane(entered=5, finished=4, pending=(torch.ones(2),), facts=["of the call before"])
    assert lane.report() == {"finished": 4, "facts_kept": True}
    lane.tensors = received
    lane.finish_given(facts=False)
    assert (lane.finished, lane.tensors, lane.pending, lane.given) == (5, received, (), True)
    assert lane.report() == {"finished": 5, "facts_kept": False}


def test_a_result_that_its_thread_has_yet_to_take_up_counts_as_finished_when_others_ask() -> None:
    assert Lane(entered=5, finished=4, given=True).report()["finished"] == 5


def test_one_that_fell_out_forgets_the_call_it_was_in() -> None:
    lane = Lane(entered=5, finished=4, facts=[1], pending=(torch.zeros(1),))
    lane.forget()
    assert (lane.entered, lane.facts, lane.pending, lane.tensors) == (4, None, (), ())


def test_the_first_who_has_the_result_gives_it_to_all_who_have_not() -> None:
    assert gift({0: at(6), 1: at(7), 3: at(7)}) == Gift(giver=1, behind=(0,), facts=False)
    assert gift({0: at(6), 1: at(7, facts=True), 3: at(6)}) == Gift(giver=1, behind=(0, 3), facts=True)
    assert gift({0: at(7), 2: at(7)}) is None


def test_tensors_that_were_changed_are_not_given_and_facts_always_are() -> None:
    intact = {0: True, 1: False, 3: True}
    assert gift({0: at(6), 1: at(7), 3: at(7)}, intact=intact) == Gift(giver=3, behind=(0,), facts=False)
    assert gift({0: at(6), 1: at(7)}, intact=intact) == Gift(giver=None, behind=(0,), facts=False)
    assert gift({0: at(6), 1: at(7, facts=True)}, intact=intact) == Gift(giver=1, behind=(0,), facts=True)


def test_workers_two_calls_apart_are_a_bug_and_said_to_be() -> None:
    with pytest.raises(FleetError, match="more than one call apart"):
        gift({0: at(5), 1: at(7)})


@given(st.dictionaries(st.integers(0, 7), st.integers(3, 4), min_size=1))
def test_after_a_gift_all_are_equally_far(counts: dict[int, int]) -> None:
    found = gift({rank: at(count) for rank, count in counts.items()})
    behind = found.behind if found is not None else ()
    assert {count + (rank in behind) for rank, count in counts.items()} == {max(counts.values())}
    assert found is None or (found.giver in counts and found.giver not in behind)
