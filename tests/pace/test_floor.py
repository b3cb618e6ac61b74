"""The floor of a round with a deadline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pace.floor import least_samples, more

FREE, BUSY, GONE = "free", "busy", "gone"


def asked(
    counts: list[int], shares: list[int], who: list[str], *, least: int = 70, room: int = 1000, **settings: float
) -> tuple[tuple[int, ...], float, bool] | None:
    free, busy = [one == FREE for one in who], [one == BUSY for one in who]
    return more(counts, shares, free=free, busy=busy, least=least, so_far_s=1.0, room=room, **settings)  # type: ignore[arg-type]


def test_a_round_closes_once_its_floor_is_counted() -> None:
    assert asked([40, 30], [60, 60], [FREE, BUSY]) is None
    assert asked([40, 29], [60, 60], [FREE, BUSY]) is not None
    assert asked([0, 0], [60, 60], [FREE, BUSY], least=0) is None


def test_the_floor_is_a_part_of_the_batch_in_whole_samples() -> None:
    assert [least_samples(0.7, batch) for batch in (10, 11, 1)] == [7, 8, 1]
    assert least_samples(0.0, 10) == 0


def test_those_that_are_free_do_what_is_missing_at_their_speed() -> None:
    shares, seconds, recall = asked([30, 10, 0], [40, 20, 40], [FREE, FREE, BUSY]) or ((), 0.0, True)
    assert not recall
    assert seconds == pytest.approx(1.1 * 30 / 40), "and a tenth more"
    assert shares == (30 + 29, 20, 40), "a quarter more than that; who has enough, or is stuck, keeps its own"


def test_where_nobody_is_free_it_waits_for_the_stuck_ones_twice_as_long_each_time() -> None:
    assert asked([40, 0], [60, 60], [GONE, BUSY]) == ((60, 60), 1.0, False)
    assert asked([0, 0], [60, 60], [BUSY, BUSY]) == ((60, 60), 1.0, False)


def test_where_the_free_ones_have_nothing_left_what_the_stuck_were_dealt_is_recalled() -> None:
    assert asked([40, 0], [40, 60], [FREE, BUSY], room=0) == ((40, 60), 1.0, True)


def test_it_closes_below_the_floor_when_nobody_can_bring_more() -> None:
    assert asked([40, 0], [40, 60], [FREE, GONE], room=0) is None
    assert asked([40, 0], [60, 60], [GONE, GONE]) is None


def test_one_that_has_done_nothing_is_given_something_and_a_short_wait_has_a_least_length() -> None:
    shares, seconds, _ = asked([0, 0], [0, 8], [FREE, BUSY]) or ((), 0.0, True)
    assert shares[0] > 0
    assert seconds == pytest.approx(77.0)
    assert (asked([69, 0], [70, 8], [FREE, BUSY]) or ((), 0.0, True))[1] == 0.05
    assert (asked([69, 0], [70, 8], [FREE, BUSY], patience=4.0) or ((), 0.0, True))[1] == 0.2


WORKERS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from([FREE, BUSY, GONE])), min_size=1, max_size=6
)


@given(WORKERS, st.integers(1, 400), st.integers(0, 300), st.sampled_from([1, 4]), st.sampled_from([1, 2]))
def test_nobody_loses_what_it_was_dealt_and_no_more_is_dealt_than_there_is(
    workers: list[tuple[int, int, str]], least: int, room: int, unit: int, smallest: int
) -> None:
    counts, left, who = map(list, zip(*workers))
    shares = [count + more_ for count, more_ in zip(counts, left)]
    given_ = asked(counts, shares, who, least=least, room=room, unit=unit, smallest=smallest)
    if given_ is None:
        assert sum(counts) >= least or BUSY not in who
        return
    added = np.array(given_[0]) - shares
    assert (added >= 0).all()
    assert added.sum() <= room
    assert (added % unit == 0).all()
    assert all(one == FREE for one, extra in zip(who, added) if extra)
    assert all(share - count >= smallest for share, count, extra in zip(given_[0], counts, added) if extra)
    assert 0 < given_[1] < np.inf
    assert BUSY in who or any(one == FREE and share > count for one, share, count in zip(who, given_[0], counts))
