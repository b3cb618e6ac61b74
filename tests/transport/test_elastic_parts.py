"""The elastic transport's parts, connected to nobody: two threads may re-form the group, and one of them does."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clocks import give_clock
from paceline.errors import GenerationOver
from paceline.roster import Generation
from paceline.roster.calls import CALLS, ROUNDS
from paceline.transport.elastic import reform
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.elastic.transport import Elastic
from paceline.transport.engines.gloo import GlooWork
from paceline.transport.group import Already, Group
from paceline.transport.pending import Watched


def bare() -> Any:
    """A transport that is connected to nobody."""
    client: Any = SimpleNamespace(id=4, running=True, failure=None, report=lambda **said: None)
    transport: Any = Elastic(torch.device("cpu"), join=lambda on_over: client)
    transport.outside = False
    return transport


def in_generation(transport: Any, members: Generation, **group: Any) -> None:
    """The group of these members stands, of whom this worker is number 0."""
    transport.reform.now, transport.reform.group = members, Group(0, len(members.workers), **group)


def generation(number: int, *workers: int) -> Generation:
    return Generation(number, workers, (), (), (), {}, ("", 0), True, 0)


def test_the_sum_of_a_worker_alone_can_be_abandoned() -> None:
    Watched(Already(), bare().watch, group=Group(0, 1)).abandon()


def test_the_training_never_sees_a_rank_and_size_of_other_members_than_it_follows() -> None:
    transport = bare()
    members = generation(5, 3, 4, 6)
    change = MembershipChange(kept=(0, 1, 2), joined=(), left=(), facts=({}, {}, {}), generation=members)
    in_generation(transport, generation(6, 4, 6))  # another thread forms it by now
    transport.reform.show(change)
    assert (transport.rank, transport.size) == (1, 3) == (transport.workers.index(4), len(transport.workers))


def test_a_sum_while_another_thread_re_forms_the_group_is_cut_short() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    with pytest.raises(GenerationOver):
        transport.sum(torch.zeros(1)).wait()
    with pytest.raises(GenerationOver):
        transport.receive(torch.zeros(1), 1, 0)


def test_who_awaits_facts_in_a_generation_that_another_thread_has_left_asks_again_in_the_next() -> None:
    transport = bare()
    store = SimpleNamespace(set=lambda key, value: None, check=lambda keys: False)
    in_generation(transport, generation(5, 4, 6), store=store)

    def look() -> None:  # the other thread has formed generation 6 since, and nothing is wrong with that
        in_generation(transport, generation(6, 4, 7))

    transport.reform.check = look
    with pytest.raises(GenerationOver) as over:
        transport._gather("call/3", "fleet.evaluate()", None)
    assert over.value.generation == 5


class Stuck:
    """A sum on connections that were shut, whose failure the engine forgot."""

    def wait(self, _: Any = None) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_who_waits_in_a_sum_of_a_group_that_another_thread_has_closed_is_freed() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    stuck = transport._started(lambda group: GlooWork(Stuck()))
    in_generation(transport, generation(6, 4, 7))
    with pytest.raises(GenerationOver, match="re-formed"):
        stuck.wait()


def re_formed_by_another_thread(transport: Any) -> None:
    """By now the others were told that this worker had not finished its call."""
    thread = threading.Thread(target=partial(in_generation, transport, generation(6, 4, 7)))
    thread.start()
    thread.join()


@pytest.mark.parametrize("aside", [False, True])
def test_a_round_does_not_end_in_a_group_that_another_thread_has_re_formed(aside: bool) -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    with pytest.raises(GenerationOver) as over, transport.round("the round of step 3", aside=aside):
        re_formed_by_another_thread(transport)
    assert over.value.generation == 5, "the next stands: none of the round's sums has begun there"
    assert transport.lanes[ROUNDS if aside else CALLS].says()["finished"] == 0


def test_facts_that_came_while_another_thread_re_formed_the_group_are_asked_for_again() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    asked: list[int] = []

    def gather(key: str, label: str, mine: Any) -> list[Any]:
        asked.append(transport.reform.number)
        if len(asked) == 1:
            re_formed_by_another_thread(transport)
        return [mine, transport.reform.number]

    transport._gather = gather
    assert transport.gather("fleet.evaluate()", "said") == ["said", 6]
    assert (asked, transport.lanes[CALLS].says()["finished"]) == ([5, 6], 1)


def test_facts_that_others_gave_meanwhile_are_taken_up_and_can_be_given_on() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))

    def gather(key: str, label: str, mine: Any) -> list[Any]:
        re_formed_by_another_thread(transport)
        transport.lanes[CALLS].result = ["theirs"]
        transport.lanes[CALLS].finish_given(facts=True)
        return ["mine"]

    transport._gather = gather
    assert transport.gather("fleet.evaluate()", "said") == ["theirs"]
    assert transport.lanes[CALLS].says() == {"finished": 1, "facts_kept": True}
    assert not transport.lanes[CALLS].given


def test_what_a_round_gave_to_others_is_taken_from_its_own_copy_whatever_was_written_meanwhile() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    lane = transport.lanes[ROUNDS]
    room, received = [torch.zeros(3)], [torch.arange(3.0)]
    lane.enter()
    lane.pending, lane.kept = room, received
    lane.finish_given(facts=False)
    room[0].fill_(-1.0)  # the sum that was cut short
    fresh = [torch.empty(3)]
    assert transport.given(fresh, aside=True)
    assert fresh[0].equal(torch.arange(3.0))
    assert not transport.given(fresh, aside=True)


def test_where_workers_that_are_all_there_cannot_meet_they_try_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, now, begun = bare(), [0.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    give_clock(monkeypatch, reform, clock)
    numbers = iter(range(5, 100))

    def next_generation(**_: Any) -> Generation:
        begun.append(now[0])
        members = generation(next(numbers), 4, 6)
        return replace(members, facts={4: {}, 6: {}})

    def enter(members: Generation, *, fresh: bool) -> None:
        transport.reform.now, transport.reform._tried = members, members.number
        if len(begun) < 12:
            raise GenerationOver("refused", generation=members.number)

    monkeypatch.setattr(transport.reform.client, "next_generation", next_generation, raising=False)
    monkeypatch.setattr(transport.reform.client, "generation", None, raising=False)
    monkeypatch.setattr(transport.reform, "_enter", enter)
    transport.reform.re_form(4, orderly=False)
    pauses = [later - sooner for sooner, later in pairwise(begun)]
    assert pauses[0] == 0.0, "one may be bad luck"
    assert pauses[1:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2], abs=0.06)
    assert max(pauses) < 5.1
