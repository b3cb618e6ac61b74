"""A fleet whose members change: survivors keep their queues, the claims of the gone go back, newcomers start empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.feed import Feed
from paceline.records import Range


def listed(ranges: Sequence[Range]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


def places(feed: Feed) -> tuple[list[int], list[list[int]]]:
    state = feed.state_dict()
    return listed(state["pool"]), [listed(queue) for queue in state["queues"]]


@st.composite
def changes(draw: st.DrawFn, workers: int) -> list[int | None]:
    """Draw the members that stay, in any order, with newcomers among them."""
    stays: list[int | None] = draw(st.lists(st.integers(0, workers - 1), unique=True, max_size=workers))  # type: ignore[assignment]
    newcomers = draw(st.integers(0 if stays else 1, 3))
    return draw(st.permutations(stays + [None] * newcomers))


@given(data=st.data(), length=st.integers(1, 60), workers=st.integers(1, 5), ahead=st.integers(0, 8))
def test_who_stays_keeps_its_queue_and_what_the_gone_claimed_is_in_the_pool_again(
    data: st.DataObject, length: int, workers: int, ahead: int
) -> None:
    feed = Feed(length, workers=workers, shuffle=False)
    feed.deal(data.draw(st.lists(st.integers(0, 20), min_size=workers, max_size=workers)), ahead=ahead)
    pool, queues = places(feed)
    remaining = feed.remaining
    kept = data.draw(changes(workers))
    feed.members_changed(kept)
    new_pool, new_queues = places(feed)
    assert feed.workers == len(kept)
    assert feed.remaining == remaining
    assert new_queues == [[] if old is None else queues[old] for old in kept]
    gone = [position for old in range(workers) if old not in kept for position in queues[old]]
    assert new_pool == sorted(pool + gone)


@given(data=st.data(), length=st.integers(1, 80), shuffle=st.booleans(), multiple_of=st.integers(1, 5))
def test_however_members_come_and_go_every_position_is_consumed_once_and_all_feeds_stay_equal(
    data: st.DataObject, length: int, shuffle: bool, multiple_of: int
) -> None:
    workers = data.draw(st.integers(1, 4))
    multiple_of = min(length, multiple_of)

    def make(size: int) -> Feed:
        return Feed(length, workers=size, seed=5, shuffle=shuffle, multiple_of=multiple_of)

    feed, twin = make(workers), make(workers)
    counted: list[int] = []
    for _ in range(200):
        if not feed.remaining:
            break
        workers = feed.workers
        shares = data.draw(st.lists(st.integers(0, 30), min_size=workers, max_size=workers))
        dealt = [each.deal(shares, ahead=3) for each in (feed, twin)]
        assert dealt[0] == dealt[1]
        done: list[int] = [data.draw(st.integers(0, share)) for share in dealt[0]]
        if data.draw(st.booleans()):  # in the middle of the step
            kept = data.draw(changes(workers))
            heads = [None if old is None else listed(feed.queue(old))[: done[old]] for old in kept]
            for each in (feed, twin):
                each.members_changed(kept)
            done = [0 if old is None else done[old] for old in kept]
            assert [listed(feed.queue(rank))[:count] or None for rank, count in enumerate(done)] == [
                head or None for head in heads
            ]
            twin = make(1)
            twin.load_state_dict(feed.state_dict(), workers=feed.workers)
        consumed = [each.consume(done) for each in (feed, twin)]
        assert consumed[0] == consumed[1]
        counted += [position for ranges in consumed[0] for position in listed(ranges)]
        assert twin.state_dict() == feed.state_dict()
    if feed.remaining:
        feed.members_changed([0])
        counted += listed(feed.consume(feed.deal([feed.remaining]))[0])
    assert sorted(counted) == list(range(feed.length))


def test_a_newcomer_built_for_another_size_takes_over_a_peers_feed_as_it_is() -> None:
    giver = Feed(40, workers=3)
    giver.deal([3, 4, 5], ahead=2)
    giver.consume([3, 1, 0])
    giver.members_changed([2, 0, None])
    newcomer = Feed(40, workers=7)
    newcomer.load_state_dict(giver.state_dict(), workers=3)
    assert newcomer.state_dict() == giver.state_dict()
    assert newcomer.deal([1, 2, 3]) == giver.deal([1, 2, 3])
    assert newcomer.state_dict() == giver.state_dict()


@pytest.mark.parametrize("kept", [[], [0, 0], [2], [-1], [None, 1, 1]])
def test_a_membership_that_makes_no_sense_is_refused_and_changes_nothing(kept: Any) -> None:
    feed = Feed(10, workers=2)
    feed.deal([3, 2])
    before = feed.state_dict()
    with pytest.raises(ValueError, match="worker"):
        feed.members_changed(kept)
    assert feed.state_dict() == before


def test_what_was_consumed_and_then_lost_is_dealt_again() -> None:
    feed = Feed(10, workers=2, shuffle=False)
    feed.deal([3, 2])
    _, lost = feed.consume([3, 2])
    feed.members_changed([0])
    feed.give_back(lost)
    assert feed.remaining == 7
    assert feed.deal([7]) == (7,)
    assert feed.consume([7]) == (((3, 10),),)
