"""The search for a micro-batch's size: it ends, it pays, and it respects memory and the share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.feed.micro_batches import pieces_of
from paceline.feed.ranges import total
from paceline.step.micro_batch_size import (
    ENOUGH,
    FEWEST,
    HEADROOM,
    MOST_STEPS,
    MemoryUse,
    SizeSearch,
    first_size,
    foreseen,
)


def search_with(
    seconds: Callable[[int], float],
    *,
    share: int = 256,
    first: int = 4,
    deadline: bool = False,
    memory: Callable[[int], MemoryUse | None] = lambda size: None,
    room: int = 10**9,
    steps: int = 50,
) -> SizeSearch:
    """Run this number of steps with one share."""
    search = SizeSearch(first)
    for _ in range(steps):
        step(search, share, seconds, memory=memory, room=room, deadline=deadline)
    return search


def step(
    search: SizeSearch,
    share: int,
    seconds: Callable[[int], float],
    *,
    memory: Callable[[int], MemoryUse | None] = lambda size: None,
    room: int = 10**9,
    deadline: bool = False,
) -> None:
    """Run a step as the loop does: cut anew when the size changes."""
    search.begin(share, deadline=deadline)
    left = share
    while left:
        piece = total(pieces_of([(0, left)], search.size)[0])
        if piece > room:
            search.ran_out(piece)
            continue
        search.measure(piece, seconds(piece), memory(piece))
        left -= piece


def test_where_every_micro_batch_costs_the_same_the_whole_share_goes_at_once() -> None:
    search = search_with(lambda size: 0.02)
    assert search.settled == int(256 * HEADROOM)
    assert not search.by_memory


def test_where_only_samples_cost_the_search_ends_soon() -> None:
    search = search_with(lambda size: 0.001 * size)
    assert list(search.costs) == [4, 8, 16], "two more are tried, in case the first looked slow by chance"
    assert search.settled == 16


def test_of_sizes_that_are_nearly_as_fast_as_the_fastest_the_largest_is_kept() -> None:
    looks = {4: 0.2, 8: 0.1, 16: 0.096, 32: 0.098}
    assert search_with(lambda size: size * looks.get(size, 1.0)).settled == 32
    looks[32] = 0.11
    assert search_with(lambda size: size * looks.get(size, 1.0)).settled == 16


def test_a_device_that_is_full_from_some_size_on_gets_that_size() -> None:
    search = search_with(lambda size: max(0.064, 0.001 * size), share=1024)
    assert list(search.costs) == [4, 8, 16, 32, 64, 128, 256]
    assert search.settled == 256, "two larger ones are as fast, and fit"


def test_a_size_that_looks_slow_by_chance_does_not_end_the_search() -> None:
    assert search_with(lambda size: 0.03 if size == 8 else 0.01 + 0.0001 * size).settled > 64


def test_the_first_step_and_the_first_micro_batch_of_a_size_do_not_count() -> None:
    search = SizeSearch(4)
    search.begin(64)
    for _ in range(10):
        search.measure(4, 100.0)
    assert not search.costs
    search.begin(64)
    search.measure(4, 100.0)
    for _ in range(ENOUGH):
        search.measure(4, 0.04)
    assert search.costs == {4: pytest.approx(0.01)}
    assert search.size == 8


def test_one_that_bears_more_than_itself_warms_its_size_up_and_does_not_count() -> None:
    search = SizeSearch(4)
    search.begin(64)
    search.begin(64)
    search.measure(4, 100.0, counts=False)
    for _ in range(ENOUGH):
        search.measure(4, 0.04)
    assert search.costs == {4: pytest.approx(0.01)}


def test_a_size_that_is_clearly_faster_is_timed_once() -> None:
    search = SizeSearch(4)
    search.begin(64)
    search.begin(64)
    for _ in range(1 + ENOUGH):
        search.measure(4, 0.04)
    for seconds in (9.0, 0.045):
        search.measure(8, seconds)
    assert search.size == 16


def test_out_of_memory_ends_the_search_below_it() -> None:
    search = search_with(lambda size: 0.02, room=39)
    assert search.settled == 32
    assert search.by_memory


def test_where_memory_is_the_bound_a_share_may_grow_a_little_as_well() -> None:
    search = search_with(lambda size: 0.02, room=40)
    assert search.settled == int(32 * HEADROOM) == 40
    assert search.by_memory


def test_a_size_that_doubling_passes_by_is_tried_where_the_next_one_does_not_fit() -> None:
    """A share of 44 is tried in parts of 16, then at once; memory holds half of it."""
    search = search_with(lambda size: 0.02, share=44, room=43)
    assert 22 <= search.settled < 44
    assert list(search.costs) == [4, 8, 16, 22]
    assert search.by_memory


def test_a_size_that_was_timed_is_kept_where_a_larger_part_of_a_share_did_not_fit() -> None:
    """A share of 6 is cut into 3 and 3 when 4 is tried."""
    search = search_with(lambda size: 0.02, share=6, first=1, room=2)
    assert search.settled == 2
    assert search.by_memory


def test_out_of_memory_at_the_first_size_halves_it_as_often_as_need_be() -> None:
    search = search_with(lambda size: 0.02, first=16, room=3)
    assert search.settled == 2
    assert search.by_memory


def test_out_of_memory_later_halves_what_was_found_and_it_never_grows_again() -> None:
    search = search_with(lambda size: 0.02)
    search.ran_out(256)
    assert search.settled == 128
    search.begin(10_000)
    assert search.settled == 128
    assert search.by_memory


def test_a_share_that_wavers_brings_back_no_size_that_did_not_fit() -> None:
    search = SizeSearch(4)
    for share in 6 * [44, 30, 60, 47]:
        step(search, share, lambda size: 8 + size, room=40)
    assert search.settled >= 22
    tried = []
    search = SizeSearch(4)
    for share in 6 * [44, 30, 60, 47]:
        search.begin(share)
        tried.append(search.size)
        while search.size > 40:
            search.ran_out(min(share, search.size))
        for _ in range(share // search.size):
            search.measure(search.size, 8 + search.size)
    assert sum(size > 40 for size in tried) <= 2


def test_what_is_known_not_to_fit_lowers_the_size_once() -> None:
    """The halves of a micro-batch that ran out may run out as well, and again when backward computes them anew."""
    search = search_with(lambda size: 0.02, room=100)
    found = search.settled
    for samples in (300, 129, 129):
        search.ran_out(samples)
    assert search.settled == found <= 100


def test_a_gpu_is_not_driven_out_of_memory() -> None:
    largest = 0

    def used(size: int) -> MemoryUse:
        nonlocal largest
        largest = max(largest, size)
        return MemoryUse(peak=1000 + 100 * largest, held=1000, usable=10_000)

    search = search_with(lambda size: 0.02, memory=used)
    assert list(search.costs)[-1] == 64, "128 samples would need 13,800, and 86 need 9,600"
    assert search.settled == largest == 80
    assert search.by_memory


def test_a_peak_from_before_hides_no_growth_and_is_not_taken_for_it() -> None:
    """Loading the model needed more than the micro-batches do: doubling them adds nothing to the peak."""
    assert foreseen(MemoryUse(peak=8000, held=1000, usable=10_000), 8, 16, (4, 8000)) == 8000


def test_with_deadlines_a_share_holds_several_micro_batches() -> None:
    assert search_with(lambda size: 0.02, deadline=True).settled == 256 // FEWEST


def test_only_in_steps_with_a_deadline_the_share_is_cut_into_several() -> None:
    search = search_with(lambda size: 0.02)
    sizes = []
    for share, deadline in [(256, True), (240, True), (300, True), (120, True), (256, False)]:
        search.begin(share, deadline=deadline)
        sizes.append(search.size)
    assert sizes == [64, 64, 64, 30, 320], "and its parts have one size while it wavers"
    assert search.settled == 320


def test_a_size_found_in_steps_with_deadlines_grows_once_there_are_none() -> None:
    search = search_with(lambda size: 0.02, deadline=True)
    for _ in range(12):
        step(search, 256, lambda size: 0.02)
    assert search.settled == 320


def test_a_size_that_only_the_share_bounded_is_looked_at_again_when_the_share_has_grown() -> None:
    search = search_with(lambda size: 0.02, share=16)
    assert search.settled == int(16 * HEADROOM)
    search.begin(19)
    assert search.settled
    search.begin(64)
    assert not search.settled
    assert search.size == 32


def test_however_much_shares_grow_the_search_comes_to_an_end() -> None:
    search = SizeSearch(1)
    for share in (2**k for k in range(2, 30)):
        for _ in range(12):
            search.begin(share)
            for _ in range(4):
                search.measure(search.size, 0.02)
    search.begin(2**40)
    assert search.settled <= 2**12


def test_a_share_that_is_no_multiple_goes_at_once_where_that_is_fastest() -> None:
    search = search_with(lambda size: 0.02, share=22, first=1)
    assert search.settled == int(22 * HEADROOM)
    assert list(search.costs) == [1, 2, 4, 8, 22], "with 16 it would be cut into 11 and 11"


def test_a_share_that_shrinks_under_the_search_neither_ends_it_for_good_nor_keeps_it_up() -> None:
    search = SizeSearch(4)
    sizes = []
    for share in (64, 64, 64, 30, 31, 29, 30, 31, 32, 38, 30):
        step(search, share, lambda size: 0.02)
        sizes.append(search.settled)
    assert sizes[2] == 0, "64 is to be tried"
    assert len(set(sizes[3:])) <= 3
    assert 30 <= search.settled <= 38 * HEADROOM


def test_a_share_that_wavers_does_not_keep_the_search_from_the_whole_share() -> None:
    search = SizeSearch(4)
    for share in 12 * [93, 97, 90, 100, 85]:  # 64 fits into some of these in two parts, and not into others
        step(search, share, lambda size: 16 + 2 * size)
    assert search.settled >= 93


def test_what_was_found_before_is_kept() -> None:
    search = SizeSearch(4)
    search.keep(48, by_memory=False)
    search.begin(1000)
    assert search.settled == search.size == 48


def test_a_worker_that_sits_out_goes_on_later() -> None:
    search = SizeSearch(4)
    for _ in range(100):
        search.begin(0)
    assert not search.settled


@given(
    share=st.integers(1, 150),
    first=st.integers(1, 40),
    deadline=st.booleans(),
    fixed=st.floats(0, 1),
    each=st.floats(1e-6, 1),
    room=st.integers(1, 150),
)
def test_a_search_always_ends_within_what_share_and_memory_allow(
    share: int, first: int, deadline: bool, fixed: float, each: float, room: int
) -> None:
    search = search_with(
        lambda size: fixed + each * size, share=share, first=first, deadline=deadline, room=room, steps=MOST_STEPS + 1
    )
    assert 1 <= search.settled <= max(first, share // (FEWEST if deadline else 1)) * HEADROOM
    assert max(total(piece) for piece in pieces_of([(0, share)], search.settled)) <= room
    if search.costs and max(search.costs) > search.settled:
        assert min(search.costs.values()) >= 0.95 * search.costs[search.settled] - 1e-12


@given(st.integers(1, 10_000), st.booleans())
def test_the_first_size_lies_in_an_equal_share(share: int, normalises: bool) -> None:
    assert 1 <= first_size(share, normalises=normalises) <= share
