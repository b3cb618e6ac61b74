from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.feed import Ranges, positions, split, total
from paceline.records import Range


@st.composite
def range_lists(draw: st.DrawFn) -> list[Range]:
    """Draw disjoint ranges in any order, some of them neighbours, some empty."""
    edges = sorted(draw(st.lists(st.integers(0, 100), max_size=12)))
    parts = list(itertools.pairwise(edges))
    kept = draw(st.lists(st.sampled_from(parts), unique=True)) if parts else []
    return list(draw(st.permutations(kept)))


def listed(ranges: tuple[Range, ...] | list[Range]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(range_lists(), st.integers(0, 120))
def test_taking_from_the_front_cuts_the_list_in_two(ranges: list[Range], count: int) -> None:
    queue = Ranges(ranges)
    taken = queue.take_front(count)
    assert listed(taken) == listed(ranges)[:count]
    assert listed(queue.ranges) == listed(ranges)[count:]
    assert queue.total == total(queue.ranges)


@given(range_lists(), st.integers(0, 120))
def test_taking_from_the_back_cuts_the_list_in_two_and_keeps_the_order(ranges: list[Range], count: int) -> None:
    queue = Ranges(ranges)
    taken = queue.take_back(count)
    cut = max(0, total(ranges) - count)
    assert listed(taken) == listed(ranges)[cut:]
    assert listed(queue.ranges) == listed(ranges)[:cut]
    assert queue.total == total(queue.ranges)


@given(range_lists())
def test_appending_merges_what_continues_the_last_range(ranges: list[Range]) -> None:
    queue = Ranges(ranges)
    assert listed(queue.ranges) == listed(ranges)
    assert all(start < stop for start, stop in queue.ranges)
    assert all(one[1] != next_[0] for one, next_ in zip(queue.ranges, queue.ranges[1:]))


@given(range_lists(), st.integers(0, 120))
def test_putting_back_gives_the_fewest_ranges(ranges: list[Range], count: int) -> None:
    queue = Ranges(ranges)
    queue.put_back(queue.take_front(count))
    held = sorted(listed(ranges))
    assert listed(queue.ranges) == held
    gaps = sum(after - before > 1 for before, after in itertools.pairwise(held))
    assert len(queue.ranges) == (gaps + 1 if held else 0)


@given(range_lists(), st.integers(1, 30))
def test_split_gives_full_pieces_and_one_remainder(ranges: list[Range], size: int) -> None:
    pieces = split(ranges, size)
    assert [position for piece in pieces for position in listed(piece)] == listed(ranges)
    assert all(total(piece) == size for piece in pieces[:-1])
    assert all(0 < total(piece) <= size for piece in pieces[-1:])


def test_split_refuses_pieces_of_nothing() -> None:
    with pytest.raises(ValueError, match="size=0"):
        split([(0, 3)], 0)


@given(range_lists())
def test_positions_lists_every_position_in_order(ranges: list[Range]) -> None:
    assert positions(ranges).tolist() == listed(ranges)
