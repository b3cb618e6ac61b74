"""What is dealt for a period, and what a group has done of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.averaging.period import Period, above, followed
from paceline.pace.shares import FIRST_STEPS, by_the_clock

counts = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_group_steps_until_every_member_has_done_its_window(members: list[tuple[int, int]]) -> None:
    windows, batches = (tuple(values) for values in zip(*members, strict=True))
    period = Period(began=0.0, shares=windows, windows=windows, batches=batches, member=0)
    while not period.exhausted:
        parts = period.parts()
        assert all(0 <= part <= batch for part, batch in zip(parts, batches, strict=True))
        period.count(parts)
    assert period.done == list(windows)
    assert period.steps == max(-(-window // batch) for window, batch in members)


def test_the_period_after_one_goes_on_with_what_is_left() -> None:
    period = Period(began=0.0, shares=(9, 5, 7), windows=(9, 7), batches=(3, 2), member=1)
    period.count(period.parts())
    after = period.followed(2.0)
    assert (after.windows, after.done, after.steps, after.samples) == ((6, 5), [0, 0], 0, 0)
    assert (after.batches, after.member, after.began) == ((3, 2), 1, 2.0)


@given(counts, st.data())
def test_nobody_gets_less_than_its_floor_nor_all_together_more_than_there_is(
    floors: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.integers(0, 80), min_size=len(floors), max_size=len(floors)))
    remaining = sum(floors) + data.draw(st.integers(0, 200))
    shares = above(np.array(floors), np.array(wanted), remaining)
    assert (shares >= floors).all()
    assert shares.sum() <= remaining
    assert (shares <= np.maximum(floors, wanted)).all()
    if np.maximum(floors, wanted).sum() >= remaining:
        assert shares.sum() == remaining


def test_a_group_divides_its_batch_by_speed_and_unknown_speeds_equally() -> None:
    speeds, rates = np.array([30.0, 10.0, 0.0]), np.array([20.0, 20.0, 0.0])
    shares, batches = by_the_clock([[0, 1], [2]], batch=8, speeds=speeds, rates=rates, period_s=1.0)
    assert batches.tolist() == [12, 4, 8]
    assert shares[0] == 3 * shares[1]
    assert shares[2] == FIRST_STEPS * 8


def test_members_of_a_group_are_dealt_the_same_number_of_steps() -> None:
    speeds = np.array([7.0, 2.0, 40.0, 1.0])
    shares, batches = by_the_clock([[0, 3], [1, 2]], batch=5, speeds=speeds, rates=speeds, period_s=3.0)
    assert (shares[[0, 1]] // batches[[0, 1]] == shares[[3, 2]] // batches[[3, 2]]).all()
    assert (batches >= 1).all()
    assert batches[[0, 3]].sum() == batches[[1, 2]].sum() == 10


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.data())
def test_figures_follow_who_they_are_of_and_newcomers_are_like_the_others(
    figures: list[float], data: st.DataObject
) -> None:
    kept = data.draw(st.permutations([*range(len(figures)), None, None]))[: data.draw(st.integers(1, len(figures)))]
    found = followed(np.array(figures), kept)
    known = [figures[old] for old in kept if old is not None and figures[old] > 0]
    for value, old in zip(found.tolist(), kept, strict=True):
        assert value == (figures[old] if old is not None else float(np.mean(known)) if known else 0.0)


def test_a_period_goes_on_without_those_who_are_lost() -> None:
    period = Period(began=0.0, shares=(9, 5, 7), windows=(7,), batches=(3,), member=0)
    period.count(period.parts())
    period.members_changed((2, 0))
    assert (period.shares, period.windows, period.samples, period.parts()) == ((7, 9), (7,), 3, (3,))
