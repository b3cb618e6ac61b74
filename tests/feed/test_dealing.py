"""A worker's micro-batches: even, full, each sample once, through halving too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from paceline.feed import Feed, Source, total
from paceline.feed.dealing import SampleDealing, StreamDealing
from paceline.feed.micro_batches import pieces_of

CPU = torch.device("cpu")

disjoint = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=5).map(
    lambda gaps: [
        (int(end - size), int(end))
        for end, (_, size) in zip(np.cumsum([gap + size for gap, size in gaps]), gaps, strict=True)
    ]
)


@given(ranges=disjoint, largest=st.integers(1, 40))
def test_pieces_are_as_few_as_fit_whole_but_for_the_last_two_and_lose_nothing(ranges: Any, largest: int) -> None:
    pieces = pieces_of(ranges, largest)
    sizes = [total(piece) for piece in pieces]
    assert len(pieces) == -(-total(ranges) // largest)
    assert not sizes or (max(sizes) <= largest and max(sizes[-2:]) - min(sizes[-2:]) <= 1)
    assert set(sizes[:-2]) <= {largest}
    flat = [position for piece in pieces for start, stop in piece for position in range(start, stop)]
    assert flat == [position for start, stop in ranges for position in range(start, stop)]


def sample_dealing(length: int, *, workers: int = 1, rank: int = 0, micro_batch: int = 8) -> SampleDealing:
    source = Source(TensorDataset(torch.arange(length)), device=CPU, seed=0)
    feed = Feed(length, workers=workers, shuffle=False)
    return SampleDealing(feed, source, rank=rank, micro_batch=micro_batch, ahead=[0] * workers)


def values(micro: Any) -> list[int]:
    return micro.batch[0].tolist()


def test_only_the_last_micro_batch_of_a_share_is_marked_as_the_last() -> None:
    dealing = sample_dealing(20, micro_batch=3)
    dealing.deal([8])
    dealing.begin_share(8)
    taken = [dealing.take() for _ in range(4)]
    assert [micro.last if micro else None for micro in taken] == [False, False, True, None]
    assert dealing.left == 0


@given(data=st.data(), length=st.integers(1, 60), micro_batch=st.integers(1, 20))
def test_halving_at_any_moment_keeps_every_sample_exactly_once(
    data: st.DataObject, length: int, micro_batch: int
) -> None:
    dealing = sample_dealing(length, micro_batch=micro_batch)
    dealing.deal([length])
    dealing.begin_share(length)
    done: list[int] = []
    while (micro := dealing.take()) is not None:
        assert len(values(micro)) <= dealing.micro_batch
        failed = data.draw(st.sampled_from(["no", "in forward", "in backward"]))
        size = dealing.micro_batch
        if failed != "no":
            assert dealing.shrink(size // 2, again=failed == "in backward") == (size > 1)
            assert dealing.micro_batch == max(1, size // 2)
        if failed != "in backward" or size == 1:
            done += values(micro)
        assert len(done) + dealing.left == length
    assert done == list(range(length))
    assert dealing.commit([len(done)]) == (((0, length),),)
    assert dealing.remaining == 0
    assert dealing.progress == 1.0


def test_workers_that_make_the_same_calls_share_the_data_without_a_word() -> None:
    shares = [(5, 0), (1, 9), (4, 4), (3, 0), (0, 9)]
    workers = [sample_dealing(30, workers=2, rank=rank, micro_batch=2) for rank in (0, 1)]
    seen: Counter[int] = Counter()
    for share in shares:
        dealt = [dealing.deal(share) for dealing in workers]
        assert dealt[0] == dealt[1]
        for rank, dealing in enumerate(workers):
            dealing.begin_share(dealt[0][rank])
            while (micro := dealing.take()) is not None:
                seen.update(values(micro))
        for dealing in workers:
            dealing.commit(dealt[0])
    assert seen == Counter(range(30))
    assert [dealing.remaining for dealing in workers] == [0, 0]


def test_the_state_resumes_between_steps() -> None:
    dealing = sample_dealing(20)
    dealing.deal([8])
    dealing.commit([8])
    again = sample_dealing(20)
    again.load_state_dict(dealing.state_dict())
    again.begin_share(*again.deal([20]))
    micro = again.take()
    assert micro is not None
    assert values(micro) == list(range(8, 14))
    assert again.remaining == 12


class Count(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        yield from (torch.tensor(number) for number in range(self.length))


def divided_stream(length: int, shares: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Go through a stream that is divided here, and return what each worker did in each step."""
    size, steps = len(shares), list[tuple[int, ...]]()
    workers = [
        StreamDealing(
            Source(Count(length), device=CPU, seed=0, split=True), identity=rank, micro_batch=4, rank=rank, size=size
        )
        for rank in range(size)
    ]
    while workers[0].remaining is None:
        done = []
        for rank, worker in enumerate(workers):
            dealt = worker.deal(shares)
            worker.begin_share(dealt[rank])
            done.append(sum(micro.samples for micro in iter(worker.take, None)))
        for worker in workers:
            worker.commit(done, [each.ended for each in workers])
        steps.append(tuple(done))
    return steps


def test_where_one_part_of_a_divided_stream_ends_first_the_steps_stay_as_large_as_they_were() -> None:
    steps = divided_stream(80, (2, 6))
    assert [sum(step) for step in steps if sum(step)] == [8, 8, 8, 8, 8, 8, 6, 8, 8, 8, 2]
    assert [sum(each) for each in zip(*steps, strict=True)] == [40, 40]


@given(length=st.integers(0, 60), shares=st.tuples(*[st.integers(0, 9)] * 3))
def test_a_divided_stream_is_read_to_its_end_whatever_the_shares(length: int, shares: tuple[int, ...]) -> None:
    steps = divided_stream(length, shares)
    assert [sum(each) for each in zip(*steps, strict=True)] == [len(range(rank, length, 3)) for rank in range(3)]
    assert all(sum(step) <= max(3, *(sum(max(1, share) for share in shares),)) for step in steps)


def stream_dealing(length: int, micro_batch: int) -> StreamDealing:
    return StreamDealing(Source(Count(length), device=CPU, seed=0), identity=0, micro_batch=micro_batch)


@given(length=st.integers(0, 30), share=st.integers(1, 12), micro_batch=st.integers(1, 12))
def test_a_stream_is_drawn_in_shares_until_it_ends(length: int, share: int, micro_batch: int) -> None:
    dealing, seen = stream_dealing(length, micro_batch), []
    while not dealing.ended:
        assert dealing.deal([share]) == (share,)
        dealing.begin_share(share)
        step: list[int] = []
        while (micro := dealing.take()) is not None:
            step += micro.batch.tolist()
            assert micro.samples <= micro_batch
        assert dealing.left == 0
        assert len(step) <= share
        assert dealing.remaining is None
        seen += step
    assert seen == list(range(length))
    dealing.commit([0], ended=[True])
    assert dealing.remaining == 0
    dealing.open(1)
    assert not dealing.ended
    assert dealing.remaining is None


def test_a_share_of_a_stream_that_is_not_drawn_is_left() -> None:
    dealing = stream_dealing(10, 4)
    dealing.begin_share(*dealing.deal([6]))
    assert dealing.left == 6
    dealing.take()
    assert dealing.left == 2


def test_a_worker_with_no_share_does_not_end_its_stream() -> None:
    dealing = stream_dealing(10, 4)
    dealing.begin_share(*dealing.deal([0]))
    assert dealing.take() is None
    assert not dealing.ended


@pytest.mark.parametrize("again", [True, False])
def test_a_stream_can_draw_less_from_now_on_but_gives_nothing_back(again: bool) -> None:
    dealing = stream_dealing(10, 4)
    dealing.begin_share(*dealing.deal([8]))
    dealing.take()
    assert dealing.shrink(2, again=again) is not again
    micro = dealing.take()
    assert micro is not None
    assert micro.samples == (4 if again else 2)


def taken(dealing: Any) -> list[int]:
    found: list[int] = []
    while (micro := dealing.take()) is not None:
        found += values(micro)
    return found


def test_a_worker_lost_in_mid_step_costs_the_others_nothing_they_did_and_its_samples_come_again() -> None:
    workers = [sample_dealing(30, workers=3, rank=rank, micro_batch=2) for rank in range(3)]
    for rank, dealing in enumerate(workers):
        dealing.begin_share(dealing.deal([4, 4, 4])[rank])
    survivors = [workers[0], workers[2]]
    first = [survivors[0].take(), survivors[1].take()]
    for rank, dealing in enumerate(survivors):
        dealing.members_changed([0, 2], rank=rank, ahead=[0, 0])
    rest = [taken(dealing) for dealing in survivors]  # pieces in hand stay
    assert [values(micro) + more for micro, more in zip(first, rest, strict=True)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert [dealing.commit([4, 2]) for dealing in survivors] == [(((0, 4),), ((8, 10),))] * 2
    assert [dealing.remaining for dealing in survivors] == [24, 24]
    for rank, dealing in enumerate(survivors):
        dealing.begin_share(dealing.deal([5, 2])[rank])
    assert [taken(dealing) for dealing in survivors] == [[4, 5, 6, 7, 12], [10, 11]]


def test_a_newcomer_takes_over_a_peers_dealing_and_deals_as_it_does() -> None:
    peer = sample_dealing(20, workers=2, rank=1, micro_batch=4)
    peer.commit(peer.deal([3, 4]))
    peer.deal([2, 2])
    peer.members_changed([1, None, None], rank=0, ahead=[0, 4, 0])
    newcomer = sample_dealing(20, workers=1, micro_batch=4)
    newcomer.begin_share(*newcomer.deal([5]))
    newcomer.take_over(peer.state_dict(), rank=1, ahead=[0, 4, 0])
    assert newcomer.left == 0
    assert newcomer.deal([3, 3, 3]) == peer.deal([3, 3, 3]) == (3, 3, 3)
    assert newcomer.state_dict() == peer.state_dict()
    newcomer.begin_share(3)
    assert taken(newcomer) == [8, 11, 12]  # the peer held 9 and 10, and took 7 of what the lost one held


def test_a_stream_goes_on_as_it_was_when_members_change_and_a_newcomer_opens_the_same_epoch() -> None:
    dealing = stream_dealing(10, 4)
    dealing.open(3)
    dealing.begin_share(*dealing.deal([6]))
    before = dealing.take()
    dealing.members_changed([0, None], rank=0, ahead=[0, 0])
    after = dealing.take()
    assert before is not None
    assert after is not None
    assert before.batch.tolist() + after.batch.tolist() == list(range(6))
    newcomer = stream_dealing(10, 4)
    newcomer.take_over(dealing.state_dict(), rank=1, ahead=[0, 0])
    assert newcomer.epoch == 3
