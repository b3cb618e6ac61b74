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
from paceline.errors import Dropped, GenerationOver
from paceline.gradients.header import Header, Layout
from paceline.roster import Generation
from paceline.roster.calls import BACKGROUND, CALLS
from paceline.step.late.catch_up import Promises
from paceline.transport.elastic import reform
from paceline.transport.elastic import transport as elastic
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.elastic.transport import Elastic
from paceline.transport.engines.gloo import GlooWork
from paceline.transport.group import Already, Group, Watched

PATIENCE_S = 20.0
"""How long anything here is waited for; only a failing test takes so long."""


def in_thread(target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def bare() -> Any:
    """A transport that is connected to nobody."""
    client: Any = SimpleNamespace(id=4, running=True, failure=None, report=lambda **said: None)
    transport: Any = Elastic(torch.device("cpu"), join=lambda on_over: client)
    transport.outside = False
    return transport


def in_generation(transport: Any, members: Generation, **group: Any) -> None:
    """The group of these members stands, of whom this worker is number 0."""
    transport.reform.now, transport.reform.group = (
        members,
        Group(0, len(members.workers), generation=members.number, **group),
    )


def shown_in(transport: Any, members: Generation, **group: Any) -> None:
    """The same, and the training has heard of these members."""
    in_generation(transport, members, **group)
    transport.show(members)


def hears_of(transport: Any, members: Generation) -> None:
    """The group of these members stands, and the training is to hear of them."""
    in_generation(transport, members)
    facts = ({},) * len(members.workers)
    transport.reform._undelivered = MembershipChange(old_ranks=(), joined=(), left=(), facts=facts, generation=members)


def generation(number: int, *workers: int) -> Generation:
    return Generation(number, workers, (), (), (), {}, ("", 0), True, 0)


def test_the_sum_of_a_worker_alone_can_be_abandoned() -> None:
    Watched(Already(), bare().watch, group=Group(0, 1)).abandon()


def test_the_training_never_sees_a_rank_and_size_of_other_members_than_it_follows() -> None:
    transport = bare()
    members = generation(5, 3, 4, 6)
    change = MembershipChange(old_ranks=(0, 1, 2), joined=(), left=(), facts=({}, {}, {}), generation=members)
    in_generation(transport, generation(6, 4, 6))  # another thread forms it by now
    transport.reform.show(change)
    assert (transport.rank, transport.size) == (1, 3) == (transport.workers.index(4), len(transport.workers))


def test_a_sum_while_another_thread_re_forms_the_group_is_cut_short() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    with pytest.raises(GenerationOver):
        transport.sum(torch.zeros(1)).wait()
    with pytest.raises(GenerationOver):
        transport.start_receive(torch.zeros(1), 1, 0).wait()


@pytest.mark.parametrize("others", [(6,), (6, 8)], ids=["no such rank", "another worker's rank"])
def test_a_copy_that_was_promised_in_an_earlier_group_goes_to_nobody_in_the_one_that_stands(
    others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, sent, failed = bare(), list[int](), list[Any]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    header = Header(Layout(3, 0, 0))
    for rank in range(3):
        header.write(rank, wants_state=rank == 2, behind=0)
    asked: Any = SimpleNamespace(header=header, index=7, generation=5)
    shown_in(transport, generation(5, 4, 6, 7))
    promises = Promises(transport)
    promises.note(asked)
    hears_of(transport, generation(6, 4, *others))  # formed by the proxy, which was handed the round's result
    engine: Any = SimpleNamespace(send=lambda tensor, to, tag: sent.append(to), takes=lambda _: False)
    transport.group.connect(lambda rank, size: (engine, "a list"))
    promises.give(lambda: torch.ones(3, dtype=torch.uint8), after=7)
    promises.join()
    assert (sent, failed) == ([], [])
    transport.deliver_members_changed()
    promises.note(asked)
    promises.give(lambda: pytest.fail("it asks again"), after=7)


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


@pytest.mark.parametrize("background", [False, True])
def test_a_round_does_not_end_in_a_group_that_another_thread_has_re_formed(background: bool) -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    with pytest.raises(GenerationOver) as over, transport.round("the round of step 3", background=background):
        re_formed_by_another_thread(transport)
    assert transport.reform.number == 6, "the round had begun"
    assert over.value.generation == 5, "the next stands: none of the round's sums has begun there"
    assert transport.lanes[BACKGROUND if background else CALLS].report()["finished"] == 0


def test_tensors_of_a_round_are_made_inside_it_for_its_members() -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    hears_of(transport, generation(6, 4, 6, 7))
    with transport.round(
        "the floor of step 3", background=True, result=lambda: [torch.zeros(transport.size)]
    ) as tensors:
        assert [len(tensor) for tensor in tensors] == [3]


def test_tensors_that_were_made_for_other_members_are_refused() -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    hears_of(transport, generation(6, 4, 6, 7))
    round = transport.round("the leader's broadcast", result=[torch.zeros(2)])
    with pytest.raises(GenerationOver, match="since the round was written") as over, round:
        pytest.fail("its sums would be of the old size")
    assert over.value.generation == 5
    with transport.round("the leader's broadcast", result=[torch.zeros(3)]) as tensors:
        assert len(tensors) == 1, "made since, for those who are there"


def test_sums_of_a_round_start_in_the_group_in_which_it_began() -> None:
    transport, started = bare(), list[Group]()
    shown_in(transport, generation(5, 4, 6))
    began = transport.group

    def start(group: Group) -> Already:
        started.append(group)
        return Already()

    def run() -> None:
        re_formed_by_another_thread(transport)
        hears_of(transport, generation(6, 4, 7))
        transport._started(start)
        transport.deliver_members_changed()
        assert transport.generation == 5, "in a round everything is for its members"

    with pytest.raises(GenerationOver), transport.round("the round of step 3"):
        run()
    transport._started(start)
    assert started == [began, transport.group]
    assert began is not transport.group


@pytest.mark.parametrize("recorded", ["release", "next call"])
def test_the_training_hears_of_other_members_only_after_a_round_aside_is_recorded(
    recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, waited = bare(), threading.Event()
    monkeypatch.setattr(reform, "CHECK_S", 0.01)
    transport.reform._raise_failure = waited.set
    shown_in(transport, generation(5, 4, 6))
    with transport.round("the round of step 3", background=True):
        pass
    hears_of(transport, generation(6, 4, 7))
    other = in_thread(transport.deliver_members_changed)
    assert waited.wait(PATIENCE_S), "it looked, and the round was not recorded"
    assert transport.generation == 5
    assert other.is_alive()
    own = in_thread(transport.release if recorded == "release" else partial(transport._enter, "a lap", lane=BACKGROUND))
    for thread in (own, other):
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread waits for a record that it should have made itself"
    assert transport.generation == 6


def test_a_round_of_the_users_thread_is_recorded_at_once() -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    with transport.round("the round of step 3"):
        pass
    hears_of(transport, generation(6, 4, 7))
    transport.deliver_members_changed()
    assert transport.generation == 6


def forming(transport: Any, *, settle: Any) -> tuple[Group, list[Group]]:
    """The group that is formed next, and which one stood while its members were connected and when they settled."""
    store, stood = SimpleNamespace(set=lambda key, value: None, check=lambda keys: True), list[Group]()
    group = Group(0, 2, store=store)

    def settled(*_: Any, **__: Any) -> Any:
        stood.append(transport.group)
        return settle()

    transport.reform.connector = SimpleNamespace(
        open_store=lambda members, worker: group,
        connect=lambda *_, **__: stood.append(transport.group),
        forget_store=lambda: None,
        break_off=Group.break_off,
    )
    transport.reform._settle = settled
    return group, stood


def test_a_group_stands_once_it_is_settled() -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    before, brought = transport.group, list[Group]()
    group, stood = forming(transport, settle=list)
    transport.reform._bring_everybody_in = lambda said: brought.append(transport.group)
    transport.reform._enter(generation(6, 4, 7), fresh=False)
    assert stood == [before, before], "a call of another thread would meet the others in a group that settles"
    assert brought == [group]
    assert (transport.group, transport.reform.number) == (group, 6)


def test_a_group_that_is_not_settled_never_stands() -> None:
    def settle() -> Any:
        raise RuntimeError("Connection closed by peer")

    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    before = transport.group
    forming(transport, settle=settle)
    with pytest.raises(GenerationOver) as over:
        transport.reform._enter(generation(6, 4, 7), fresh=False)
    assert over.value.generation == 6
    assert (transport.group, transport.reform.number) == (before, 5)


def test_a_thread_of_a_worker_that_has_fallen_out_does_not_enter_anew_in_mid_call() -> None:
    transport, tried = bare(), list[bool]()
    shown_in(transport, generation(5, 4, 6))
    transport.reform._try = lambda *, boundary, orderly: not tried.append(boundary)
    transport.listener = SimpleNamespace()
    transport.entered(False)  # as another thread was told
    with pytest.raises(Dropped) as dropped:
        transport.recover(GenerationOver("it is over", generation=5))
    assert (dropped.value.generation, tried) == (5, [])
    transport.re_form()
    assert tried == [True], "at a boundary it does"
    transport.listener = None
    transport.recover(GenerationOver("it is over", generation=5))
    assert tried == [True, False], "and where its script has no loop yet"


class BrokenStore:
    """The roster's store over a connection that broke."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")

    def clone(self) -> BrokenStore:
        return self


@pytest.mark.parametrize("request_of_store", ["was_signalled", "signal"])
def test_a_store_that_fails_while_the_roster_answers_is_opened_anew_in_the_next_generation(
    request_of_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, now, opened = bare(), [100.0], list[Any]()
    give_clock(monkeypatch, elastic, SimpleNamespace(monotonic=lambda: now[0]))
    connector = transport.reform.connector
    monkeypatch.setattr(connector, "_open", lambda at: opened.append(at) or BrokenStore())
    monkeypatch.setattr(connector, "_under", lambda prefix, store: store)
    transport.reform.now = generation(5, 4, 6)
    transport.reform.group = connector.open_store(transport.reform.now, worker=4)
    transport.show(transport.reform.now)
    on_beat = transport.reform.client.on_beat
    now[0] += 60.0
    on_beat()
    assert not transport.reform.is_over, "nothing has failed"
    assert not getattr(transport, request_of_store)("begun/0/3")
    now[0] += elastic.STORE_S
    on_beat()
    assert not transport.reform.is_over, "the roster may be about to restart"
    now[0] += 0.1
    getattr(transport, request_of_store)("begun/0/4")
    on_beat()
    assert transport.reform.is_over
    with pytest.raises(GenerationOver):
        transport.reform.check()
    connector.open_store(generation(6, 4, 6), worker=4)
    connector.open_store(generation(7, 4, 6), worker=4)
    assert len(opened) == 2, "one connection for generation 5, and one for those after it"


@pytest.mark.parametrize(("request_of_store", "lost"), [("was_signalled", False), ("signal", True)])
def test_a_store_that_was_read_again_is_not_given_up_but_a_signal_that_was_lost_is(
    request_of_store: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, now, broken = bare(), [100.0], [True]
    give_clock(monkeypatch, elastic, SimpleNamespace(monotonic=lambda: now[0]))

    def ask(*_: Any) -> bool:
        if broken:
            raise RuntimeError("timed out")
        return False

    store = SimpleNamespace(check=ask, set=ask)
    shown_in(transport, generation(5, 4, 6), signals=store, board=store)
    getattr(transport, request_of_store)("begun/0/3")
    broken.clear()
    getattr(transport, request_of_store)("begun/0/3")
    now[0] += 2 * elastic.STORE_S
    transport.reform.client.on_beat()
    assert transport.reform.is_over is lost


def test_a_group_that_comes_to_stand_while_the_last_one_is_given_up_goes_on() -> None:
    transport = bare()

    class Hopeless(Group):
        @property
        def hopeless(self) -> bool:
            in_generation(transport, generation(6, 4, 7))  # by another thread, just now
            return True

    shown_in(transport, generation(5, 4, 6))
    transport.reform.group = Hopeless(0, 2)
    transport.reform.client.on_beat()
    assert transport.reform.number == 6
    assert not transport.reform.is_over
    assert not transport.group.is_over


def test_a_worker_that_falls_out_shows_its_place_before_it_shows_that_it_is_outside() -> None:
    transport, seen = bare(), list[Any]()
    shown_in(transport, generation(5, 1, 2, 3, 4))

    class Looking(type(transport)):  # type: ignore[misc]
        """Another thread looks whenever something has changed."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            seen.append((self.outside, self.rank, self.size, self.workers))

    transport.__class__ = Looking
    transport.entered(False)
    assert {one for one in seen if one[0]} == {(True, 1, 2, (-1, 4))}


class CutShort:
    """An engine whose broadcasts write something and then fail."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        tensor.fill_(77)
        return self

    def wait(self, check: Any) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_broadcast_that_is_cut_short_leaves_the_tensors_as_they_were() -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    transport.group.connect(lambda rank, size: (CutShort(), "nothing"))
    tensors = [torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(GenerationOver):
        transport._broadcast(tensors)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_facts_that_came_while_another_thread_re_formed_the_group_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))
    asked: list[int] = []

    def gather(group: Group, key: str, label: str, mine: Any, *, watch: Any) -> list[Any]:
        asked.append(transport.reform.number)
        if len(asked) == 1:
            in_thread(partial(hears_of, transport, generation(6, 4, 7))).join()
        return [mine, transport.reform.number]

    monkeypatch.setattr(Group, "gather", gather)
    assert transport.gather("fleet.evaluate()", "said") == ["said", 6]
    assert (asked, transport.lanes[CALLS].report()["finished"]) == ([5, 6], 1)
    assert transport.generation == 6, "the training has heard before its facts were asked for again"


def test_facts_that_others_gave_meanwhile_are_taken_up_and_can_be_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = bare()
    shown_in(transport, generation(5, 4, 6))

    def gather(group: Group, key: str, label: str, mine: Any, *, watch: Any) -> list[Any]:
        in_thread(partial(hears_of, transport, generation(6, 4, 7))).join()
        transport.lanes[CALLS].facts = ["theirs"]
        transport.lanes[CALLS].finish_given(facts=True)
        return ["mine"]

    monkeypatch.setattr(Group, "gather", gather)
    assert transport.gather("fleet.evaluate()", "said") == ["theirs"]
    assert transport.lanes[CALLS].report() == {"finished": 1, "facts_kept": True}
    assert not transport.lanes[CALLS].given


def test_what_a_round_gave_to_others_is_taken_from_its_own_copy_whatever_was_written_meanwhile() -> None:
    transport = bare()
    in_generation(transport, generation(5, 4, 6))
    lane = transport.lanes[BACKGROUND]
    room, received = [torch.zeros(3)], [torch.arange(3.0)]
    lane.enter()
    lane.pending, lane.tensors = room, received
    lane.finish_given(facts=False)
    room[0].fill_(-1.0)  # the sum that was cut short
    fresh = [torch.empty(3)]
    assert transport.take_result(fresh, background=True)
    assert fresh[0].equal(torch.arange(3.0))
    assert not transport.take_result(fresh, background=True)


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
