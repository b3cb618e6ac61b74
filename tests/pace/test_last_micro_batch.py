"""What still fits before a deadline."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pace.steering import MARGIN, fit, fit_all, ladder, recent_pace

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("micro_batch", "sizes"), [(16, (16, 12, 8, 4, 2)), (8, (8, 6, 4, 2, 1)), (3, (3, 2, 1)), (1, (1,))]
)
def test_a_ladder_goes_down_to_an_eighth_and_never_below_one(micro_batch: int, sizes: tuple[int, ...]) -> None:
    assert ladder(micro_batch) == sizes


def test_a_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        ladder(0)


@given(st.floats(1e-6, 1e6), st.floats(1e-9, 1e3), SIZES)
def test_the_largest_size_that_fits_is_taken(left: float, pace: float, sizes: list[int]) -> None:
    size = fit(left, pace, sizes)
    fits = [s for s in sizes if s * pace * (1 + MARGIN) <= left * (1 + 1e-9)]
    clearly = [s for s in sizes if s * pace * (1 + MARGIN) <= left * (1 - 1e-9)]
    assert size in fits if size else not clearly
    assert size >= max(clearly, default=0)


def test_nothing_is_started_that_would_be_lost() -> None:
    assert fit(0.15, 0.1, ladder(16)) == 0
    assert fit(0.0, 0.1, ladder(16)) == 0
    assert fit(-1.0, math.nan, ladder(16)) == 0


def test_a_whole_number_of_samples_that_fits_to_the_hair_fits() -> None:
    assert fit(3 * (1 + MARGIN) * 0.1, 0.1, (3,)) == 3


@pytest.mark.parametrize("pace", [math.nan, 0.0, -1.0])
def test_an_unknown_pace_is_tried_with_the_smallest(pace: float) -> None:
    assert fit(1.0, pace, ladder(16)) == 2


@given(st.lists(st.tuples(st.floats(-1, 10), st.floats(0.001, 10)), min_size=1, max_size=9), SIZES)
def test_many_workers_are_answered_as_one_by_one(asked: list[tuple[float, float]], sizes: list[int]) -> None:
    left, pace = (np.array(column) for column in zip(*asked))
    assert fit_all(left, pace, sizes).tolist() == [fit(one, other, sizes) for one, other in asked]


def test_no_sizes_are_refused() -> None:
    for sizes in ((), (0,), (-4, 2)):
        with pytest.raises(ValueError, match="whole numbers"):
            fit(1.0, 1.0, sizes)


def test_the_recent_pace_is_not_moved_by_one_stall() -> None:
    assert math.isnan(recent_pace([]))
    assert recent_pace([9.0, 9.0, 1.0, 1.0, 50.0, 1.0, 1.0]) == 1.0
