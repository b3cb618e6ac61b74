from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.feed import Feed, split, total
from paceline.records import Range
from quick import examples


def listed(ranges: Sequence[Range]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


class DealingToAFleet(RuleBasedStateMachine):
    """Any sequence of calls: every position of every epoch is consumed exactly once, and never in two queues."""

    @initialize(
        length=st.integers(1, 80), workers=st.integers(1, 5), multiple_of=st.integers(1, 7), shuffle=st.booleans()
    )
    def start(self, length: int, workers: int, multiple_of: int, shuffle: bool) -> None:
        multiple_of = min(length, multiple_of)
        self.make: Callable[[int], Feed] = lambda size: Feed(
            length, workers=size, seed=3, shuffle=shuffle, multiple_of=multiple_of
        )
        self.dataset_length = length
        self.length = length - length % multiple_of
        self.feed, self.twin = self.make(workers), self.make(workers)
        self.dealt: tuple[int, ...] = (0,) * workers
        self.done: list[int] = []

    def both(self, call: Callable[[Feed], Any]) -> Any:
        """Make a call on both feeds, as two workers of a fleet would."""
        answer = call(self.feed)
        assert call(self.twin) == answer
        return answer

    def places(self) -> tuple[list[int], list[list[int]]]:
        state = self.feed.state_dict()
        return listed(state["pool"]), [listed(queue) for queue in state["queues"]]

    @rule(data=st.data(), ahead=st.integers(0, 12))
    def deal(self, data: st.DataObject, ahead: int) -> None:
        workers = self.feed.workers
        shares = data.draw(st.lists(st.integers(0, 25), min_size=workers, max_size=workers))
        before, (_, queues_before) = self.feed.remaining, self.places()
        self.dealt = self.both(lambda feed: feed.deal(shares, ahead=ahead))
        pool, queues = self.places()
        steps = 1 + -(-ahead * workers // max(1, sum(self.dealt)))
        assert sum(self.dealt) == min(sum(shares), before)
        for asked, share, queue, had in zip(shares, self.dealt, queues, queues_before):
            assert share <= asked
            assert len(queue) >= share
            assert len(queue) <= max(share * steps, len(had))
            assert len(queue) >= share * steps or not pool
            assert queue[: min(len(queue), len(had))] == had[: len(queue)]  # the head of a queue never changes

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        """Consume all of the share, or less after a cut-off."""
        counts = [data.draw(st.integers(0, share)) for share in self.dealt]
        heads = [queue[:count] for queue, count in zip(self.places()[1], counts)]
        consumed = self.both(lambda feed: feed.consume(counts))
        assert [listed(ranges) for ranges in consumed] == heads
        self.done += [position for ranges in consumed for position in listed(ranges)]
        self.dealt = tuple(share - count for share, count in zip(self.dealt, counts))

    @rule(data=st.data())
    def a_worker_leaves(self, data: st.DataObject) -> None:
        worker = data.draw(st.integers(0, self.feed.workers - 1))
        self.both(lambda feed: feed.release(worker))
        assert self.feed.queue(worker) == ()
        self.dealt = tuple(0 if rank == worker else share for rank, share in enumerate(self.dealt))

    @rule(workers=st.integers(1, 5))
    def resume_in_another_fleet(self, workers: int) -> None:
        state = json.loads(json.dumps(self.feed.state_dict()))
        same_size = workers == self.feed.workers
        queues = self.places()[1]
        self.feed, self.twin = self.make(workers), self.make(1)
        self.feed.load_state_dict(state)
        self.twin.load_state_dict(state, workers=workers)
        assert self.places()[1] == (queues if same_size else [[]] * workers)
        self.dealt = self.dealt if same_size else (0,) * workers

    @rule()
    @precondition(lambda self: self.feed.remaining == 0)
    def next_epoch(self) -> None:
        assert sorted(self.done) == list(range(self.length))
        assert len(set(self.feed.indices([(0, self.length)]).tolist())) == self.length
        self.both(lambda feed: feed.open(feed.epoch + 1))
        self.done = []
        self.dealt = (0,) * self.feed.workers

    @rule()
    def finish_the_epoch(self) -> None:
        while self.feed.remaining:
            self.dealt = self.both(lambda feed: feed.deal([2] * feed.workers))
            consumed = self.both(lambda feed: feed.consume(self.dealt))
            self.done += [position for ranges in consumed for position in listed(ranges)]
        self.dealt = (0,) * self.feed.workers

    @invariant()
    def every_position_is_in_exactly_one_place(self) -> None:
        pool, queues = self.places()
        assert sorted([*pool, *self.done, *(p for queue in queues for p in queue)]) == list(range(self.length))
        assert self.feed.remaining == len(pool) + sum(map(len, queues))
        assert self.feed.consumed == len(self.done)

    @invariant()
    def workers_that_make_the_same_calls_stay_equal(self) -> None:
        assert self.feed.state_dict() == self.twin.state_dict()

    @invariant()
    def ranges_are_merged(self) -> None:
        state = self.feed.state_dict()
        for ranges in (state["pool"], *state["queues"]):
            assert all(one[1] != other[0] for one, other in itertools.pairwise(ranges))


TestDealingToAFleet = DealingToAFleet.TestCase
TestDealingToAFleet.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=6), length=st.integers(1, 60))
def test_a_short_epoch_cuts_the_shares_in_proportion(shares: list[int], length: int) -> None:
    dealt = Feed(length, workers=len(shares)).deal(shares)
    assert sum(dealt) == min(sum(shares), length)
    if sum(shares) > length:
        assert all(abs(cut - share * length / sum(shares)) < 1 for cut, share in zip(dealt, shares))


def test_workers_finish_together_when_claims_were_far_ahead_and_speeds_changed() -> None:
    feed = Feed(1000, workers=2)
    feed.deal([50, 50], ahead=450)  # everything is claimed
    steps = 0
    while feed.remaining:
        assert feed.deal([90, 10]) == (90, 10)
        feed.consume([90, 10])
        steps += 1
    assert steps == 10


def test_the_slack_comes_from_the_tail_of_the_longest_queue() -> None:
    feed = Feed(100, workers=3, shuffle=False)
    feed.deal([10, 30, 60])
    feed.deal([15, 5, 5])
    assert feed.queue(0) == ((0, 10), (95, 100))
    assert feed.queue(1) == ((10, 40),)
    assert feed.queue(2) == ((40, 95),)


@given(data=st.data(), claimed=st.lists(st.integers(0, 30), min_size=2, max_size=6))
def test_levelling_serves_every_share_and_takes_only_what_is_missing(data: st.DataObject, claimed: list[int]) -> None:
    length = max(1, sum(claimed))
    feed = Feed(length, workers=len(claimed))
    feed.deal(claimed)
    shares = [data.draw(st.integers(0, 30)) for _ in claimed]
    dealt = feed.deal(shares)
    held = [total(feed.queue(worker)) for worker in range(len(claimed))]
    assert sum(dealt) == min(sum(shares), length)
    if sum(claimed):
        for had, has, share in zip(claimed, held, dealt):
            assert has == share if had <= share else share <= has <= had
        assert sum(held) == length


def test_what_a_cut_off_left_undone_comes_first_next_time() -> None:
    feed = Feed(100, workers=2, shuffle=False)
    feed.deal([10, 10])
    feed.consume([3, 10])
    feed.deal([10, 10])
    assert feed.queue(0) == ((3, 10), (20, 23))


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    ahead=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    length=st.integers(1, 200),
)
def test_with_steady_shares_every_step_has_the_next_samples_however_far_ahead_they_are_loaded(
    shares: list[int], ahead: list[int], length: int
) -> None:
    feed, first = Feed(length, workers=len(shares), shuffle=False), 0
    while feed.remaining:
        done = feed.consume(feed.deal(shares, ahead=ahead[: len(shares)]))
        stop = min(length, first + sum(shares))
        assert sorted(place for ranges in done for place in listed(ranges)) == list(range(first, stop))
        first = stop


def test_steady_shares_give_few_long_ranges() -> None:
    feed = Feed(10**9, workers=8)
    for _ in range(50):
        feed.consume(feed.deal([64] * 8, ahead=256))
    assert max(len(feed.queue(worker)) for worker in range(8)) <= 5
    assert len(json.dumps(feed.state_dict())) < 2000


def test_a_thousand_departures_leave_one_range_in_the_pool() -> None:
    feed = Feed(10**6, workers=10)
    for step in range(1000):
        feed.deal([7] * 10, ahead=20)
        feed.release(step % 10)
    for worker in range(10):
        feed.release(worker)
    assert feed.state_dict()["pool"] == [[0, 10**6]]


def test_every_epoch_has_its_own_shuffle_and_every_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        feed = Feed(50, workers=1, seed=seed)
        feed.open(epoch)
        return feed.indices([(0, 50)]).tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert len({tuple(one) for one in orders}) == 3
    assert all(sorted(one) == list(range(50)) for one in orders)
    assert order(0, 1) == orders[1]


def test_without_shuffle_positions_are_indices() -> None:
    assert Feed(50, workers=1, shuffle=False).indices([(40, 43), (3, 4)]).tolist() == [40, 41, 42, 3]


def test_drop_last_cuts_the_shuffled_end_not_the_same_samples_each_time() -> None:
    feed = Feed(103, workers=2, multiple_of=10)
    assert feed.length == 100
    dropped = set()
    for epoch in range(30):
        feed.open(epoch)
        dropped |= set(range(103)) - set(feed.indices([(0, 100)]).tolist())
    assert len(dropped) > 30


def test_drop_last_that_leaves_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="turn drop_last off"):
        Feed(10, workers=1, multiple_of=16)


def test_a_custom_order_counts_every_draw_and_may_change_its_length() -> None:
    feed = Feed(5, workers=1, order=lambda epoch: [4, 4, 0][: 3 - epoch])
    assert feed.length == 3
    assert feed.indices(split([(0, 3)], 3)[0]).tolist() == [4, 4, 0]
    feed.open(1)
    assert feed.length == 2
    assert feed.indices([(0, 2)]).tolist() == [4, 4]


def test_a_custom_order_may_be_an_array_a_generator_or_longer_than_the_dataset() -> None:
    assert Feed(3, workers=1, order=lambda epoch: np.arange(3)[::-1]).indices([(0, 3)]).tolist() == [2, 1, 0]
    assert Feed(3, workers=1, order=lambda epoch: (i % 3 for i in range(10))).length == 10  # type: ignore[arg-type, return-value]
    assert Feed(3, workers=1, order=lambda epoch: range(2), multiple_of=2).length == 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 5], r"order\(0\) gave the index 5, but the dataset has the indices 0 to 4"),
        ([0, -1], "gave the index -1"),
        ([], "at least one"),
        ([0.5], "float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
    ],
)
def test_a_bad_custom_order_is_refused(order: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feed(5, workers=1, order=lambda epoch: order)


def test_an_order_that_changed_between_save_and_load_is_refused() -> None:
    state = Feed(5, workers=1, order=lambda epoch: [0, 1, 2]).state_dict()
    with pytest.raises(ValueError, match="the same order for the same epoch"):
        Feed(5, workers=1, order=lambda epoch: [0, 1]).load_state_dict(state)


@pytest.mark.parametrize(
    "call",
    [
        lambda feed: feed.deal([1]),
        lambda feed: feed.deal([1, -1]),
        lambda feed: feed.deal([1, 1], ahead=-1),
        lambda feed: feed.deal([1, 1], ahead=[1]),
        lambda feed: feed.consume([1, 0]),
        lambda feed: feed.consume([0]),
        lambda feed: feed.release(2),
        lambda feed: feed.queue(-1),
        lambda feed: feed.indices([(5, 11)]),
    ],
)
def test_bad_calls_are_refused_and_change_nothing(call: Callable[[Feed], Any]) -> None:
    feed = Feed(10, workers=2)
    before = feed.state_dict()
    with pytest.raises(ValueError):
        call(feed)
    assert feed.state_dict() == before


@pytest.mark.parametrize("settings", [{"length": 0}, {"workers": 0}, {"multiple_of": 0}, {"length": 2**41}])
def test_bad_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Feed(**{"length": 10, "workers": 1, **settings})


def test_a_state_of_other_data_is_refused_by_name() -> None:
    state = Feed(10, workers=2).state_dict()
    with pytest.raises(ValueError, match="dataset_length was 10 and is 11 now"):
        Feed(11, workers=2).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle was True and is False now"):
        Feed(10, workers=2, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("pool", [[[0, 6], [5, 10]], [[0, 11]], [[-1, 4]], [[4, 4]]])
def test_a_damaged_state_is_refused(pool: list[list[int]]) -> None:
    feed = Feed(10, workers=2)
    with pytest.raises(ValueError, match="damaged"):
        feed.load_state_dict({**feed.state_dict(), "pool": pool})


def test_a_resume_takes_over_the_seed_and_goes_on_with_the_same_shuffle() -> None:
    feed = Feed(100, workers=2, seed=7)
    feed.open(3)
    feed.deal([30, 10])
    done = feed.indices([part for queue in feed.consume([30, 10]) for part in queue]).tolist()
    other = Feed(100, workers=3, seed=8)
    other.load_state_dict(feed.state_dict())
    while other.remaining:
        for ranges in other.consume(other.deal([5, 1, 9])):
            done += other.indices(ranges).tolist()
    assert sorted(done) == list(range(100))
    assert other.seed == 7


def test_a_billion_samples_are_a_few_numbers() -> None:
    feed = Feed(10**9, workers=100)
    feed.deal([1000] * 100, ahead=4000)
    assert len(json.dumps(feed.state_dict())) < 10_000
    assert total(feed.queue(99)) == 5000
