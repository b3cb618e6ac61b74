"""The elastic transport's parts, connected to nobody: two threads may form the fleet anew, and one of them does."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import GenerationOver
from paceline.roster import Generation
from paceline.transport.elastic import transport as elastic
from paceline.transport.elastic.calls import Lane
from paceline.transport.elastic.changes import Change
from paceline.transport.heartbeat import CALLS, ROUNDS
from paceline.transport.pending import Already, Watched
from paceline.transport.small_sums import Outbox


def bare() -> Any:
    """A transport that is connected to nobody."""
    transport: Any = elastic.Elastic.__new__(elastic.Elastic)
    transport._lanes = {CALLS: Lane(), ROUNDS: Lane()}
    transport._slots, transport._renewed, transport.settler, transport.outside = {}, set(), None, False
    transport._now, transport._over, transport._group, transport._gpus = None, 0, None, None
    transport._gone, transport.intact, transport._stars = {}, lambda: True, 0
    transport._member = SimpleNamespace(id=4, failure=None, report=lambda **said: None)
    transport._store = None
    transport._recovering, transport._doing, transport._begun = threading.RLock(), "", 0
    transport._unfollowed, transport._summed, transport._link, transport._outbox = None, 0, None, Outbox()
    return transport


def generation(number: int, *workers: int) -> Generation:
    return Generation(number, workers, (), (), (), {}, ("", 0), True, 0)


def test_the_sum_of_a_worker_alone_can_be_abandoned() -> None:
    Watched(Already(), bare(), store=None).abandon()


def test_the_training_never_sees_a_rank_and_size_of_other_members_than_it_follows() -> None:
    transport = bare()
    members = generation(5, 3, 4, 6)
    change = Change(kept=(0, 1, 2), joined=(), left=(), facts=({}, {}, {}), generation=members)
    transport._rank, transport._size = 0, 2  # another thread forms generation 6, of workers 4 and 6, by now
    transport._show(change)
    assert (transport.rank, transport.size) == (1, 3) == (transport.workers.index(4), len(transport.workers))


def test_a_sum_while_another_thread_forms_the_group_anew_is_cut_short() -> None:
    transport = bare()
    transport._now, transport._unfollowed, transport._summed = generation(5, 4, 6), None, 0
    transport._alike, transport._size, transport._rank, transport.backend = True, 2, 0, "gloo"
    with pytest.raises(GenerationOver):
        transport.sum(torch.zeros(1)).wait()
    with pytest.raises(GenerationOver):
        transport.receive(torch.zeros(1), 1, 0)


def test_who_awaits_facts_in_a_generation_that_another_thread_has_left_asks_again_in_the_next() -> None:
    transport = bare()
    transport._store = SimpleNamespace(set=lambda key, value: None, check=lambda keys: False)
    transport._rank, transport._size, transport._now = 0, 2, generation(5, 4, 6)

    def look() -> None:  # the other thread has formed generation 6 since, and nothing is wrong with that
        transport._store, transport._now = SimpleNamespace(), generation(6, 4, 7)

    transport._check = look
    with pytest.raises(GenerationOver) as over:
        transport._gather("call/3", "fleet.evaluate()", None)
    assert over.value.generation == 5


class Stuck:
    """A sum on connections that were shut, whose failure the engine forgot."""

    def wait(self, _: Any = None) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_who_waits_in_a_sum_of_a_group_that_another_thread_has_buried_is_freed() -> None:
    transport = bare()
    transport._now, transport._store = generation(5, 4, 6), "the store of generation 5"
    stuck = transport._started(Stuck)
    transport._now, transport._store = generation(6, 4, 7), "the store of generation 6"
    with pytest.raises(GenerationOver, match="formed anew"):
        stuck.wait()


def formed_anew_by_another_thread(transport: Any) -> None:
    """By now the others were told that this worker had not finished its call."""
    thread = threading.Thread(target=partial(setattr, transport, "_now", generation(6, 4, 7)))
    thread.start()
    thread.join()


@pytest.mark.parametrize("aside", [False, True])
def test_a_round_does_not_end_in_a_fleet_that_another_thread_has_formed_anew(aside: bool) -> None:
    transport = bare()
    transport._now = generation(5, 4, 6)
    with pytest.raises(GenerationOver) as over, transport.round("the round of step 3", aside=aside):
        formed_anew_by_another_thread(transport)
    assert over.value.generation == 6, "which is left too: some of the sums may have begun there"
    assert transport._lanes[ROUNDS if aside else CALLS].says()["finished"] == 0


def test_facts_that_came_while_another_thread_formed_the_fleet_anew_are_asked_for_again() -> None:
    transport = bare()
    transport._now, transport.follow = generation(5, 4, 6), lambda: None
    asked: list[int] = []

    def gather(key: str, label: str, mine: Any) -> list[Any]:
        asked.append(transport._number)
        if len(asked) == 1:
            formed_anew_by_another_thread(transport)
        return [mine, transport._number]

    transport._gather = gather
    assert transport.gather("fleet.evaluate()", "said") == ["said", 6]
    assert (asked, transport._lanes[CALLS].says()["finished"]) == ([5, 6], 1)


def test_facts_that_others_gave_meanwhile_are_taken_up_and_can_be_given_on() -> None:
    transport = bare()
    transport._now, transport.follow = generation(5, 4, 6), lambda: None

    def gather(key: str, label: str, mine: Any) -> list[Any]:
        formed_anew_by_another_thread(transport)
        transport._lanes[CALLS].result = ["theirs"]
        transport._lanes[CALLS].finish_given(facts=True)
        return ["mine"]

    transport._gather = gather
    assert transport.gather("fleet.evaluate()", "said") == ["theirs"]
    assert transport._lanes[CALLS].says() == {"finished": 1, "facts_kept": True}
    assert not transport._lanes[CALLS].given


def test_what_a_round_gave_to_others_is_taken_from_its_own_copy_whatever_was_written_meanwhile() -> None:
    transport = bare()
    transport._now, lane = generation(5, 4, 6), transport._lanes[ROUNDS]
    room, received = [torch.zeros(3)], [torch.arange(3.0)]
    lane.enter("the round of step 3")
    lane.pending, lane.kept = room, received
    lane.finish_given(facts=False)
    room[0].fill_(-1.0)  # the sum that was cut short
    fresh = [torch.empty(3)]
    assert transport.given(fresh, aside=True)
    assert fresh[0].equal(torch.arange(3.0))
    assert not transport.given(fresh, aside=True)
