"""Integer shares: exact, within bounds, and the best there are."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.pace.shares import fill, proportional

costs = st.floats(0.0, 100.0, allow_nan=False).map(lambda x: round(x, 3))
slopes = st.floats(1e-3, 100.0, allow_nan=False)


def slowest_s(fixed: list[float], each: list[float], shares: list[int]) -> float:
    return max((a + b * n for a, b, n in zip(fixed, each, shares) if n), default=0.0)


def every_split(total: int, unit: int, low: list[int], high: list[int]) -> list[list[int]]:
    """All allowed splits, by counting them out."""
    units, rest = divmod(total, unit)
    splits = []
    for counts in itertools.product(range(units + 1), repeat=len(low)):
        if sum(counts) != units or any(c < -(-m // unit) for c, m in zip(counts, low)):
            continue
        for lucky in range(len(low)) if rest else [0]:
            split = [c * unit + (rest if i == lucky else 0) for i, c in enumerate(counts)]
            if all(n <= m for n, m in zip(split, high)):
                splits.append(split)
    return splits


@st.composite
def small_fleets(draw: st.DrawFn) -> tuple[list[float], list[float], int, int, list[int], list[int]]:
    n = draw(st.integers(1, 3))
    fixed = draw(st.lists(costs, min_size=n, max_size=n))
    each = draw(st.lists(slopes, min_size=n, max_size=n))
    low = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    high = [m + draw(st.integers(0, 14)) for m in low]
    return fixed, each, draw(st.integers(0, 12)), draw(st.integers(1, 4)), low, high


@given(small_fleets())
def test_fill_is_as_good_as_the_best_of_all_splits(fleet) -> None:  # type: ignore[no-untyped-def]
    fixed, each, total, unit, low, high = fleet
    splits = every_split(total, unit, low, high)
    if not splits:
        with pytest.raises(ValueError, match=r"minimum|maximum"):
            fill(fixed, each, total, unit=unit, minimum=low, maximum=high)
        return
    shares = fill(fixed, each, total, unit=unit, minimum=low, maximum=high).tolist()
    assert shares in splits
    best = min(slowest_s(fixed, each, split) for split in splits)
    assert slowest_s(fixed, each, shares) == pytest.approx(best, rel=1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-12, 1e12)), min_size=1, max_size=40),
    st.integers(0, 10**9),
    st.integers(1, 64),
)
def test_fill_sums_exactly_for_any_costs(fleet: list[tuple[float, float]], total: int, unit: int) -> None:
    fixed, each = zip(*fleet)
    shares = fill(fixed, each, total, unit=unit)
    assert shares.sum() == total
    assert shares.min() >= 0
    assert np.count_nonzero(shares % unit) <= 1


@given(st.lists(st.tuples(costs, slopes), min_size=2, max_size=12, unique=True), st.integers(0, 500), st.randoms())
def test_fill_does_not_care_who_is_called_first(fleet: list[tuple[float, float]], total: int, rng) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(fleet)))
    rng.shuffle(order)
    fixed, each = (list(column) for column in zip(*fleet))
    straight = fill(fixed, each, total)
    moved = fill([fixed[i] for i in order], [each[i] for i in order], total)
    finish = [a + b * n for a, b, n in zip(fixed, each, straight)]
    again = [fixed[i] + each[i] * n for i, n in zip(order, moved)]
    assert max((f for f, n in zip(again, moved) if n), default=0.0) == pytest.approx(
        max((f for f, n in zip(finish, straight) if n), default=0.0), rel=1e-12
    )
    marginals = {round(a + b * k, 9) for a, b in fleet for k in range(1, total + 1)}
    assume(len(marginals) == len(fleet) * total)  # no ties: the split itself is the same
    assert moved.tolist() == [straight[i] for i in order]


def test_a_worker_whose_fixed_cost_is_above_the_level_sits_out() -> None:
    assert fill([0.01, 5.0], [1e-3, 1e-6], 100).tolist() == [100, 0]


def test_a_minimum_keeps_the_slow_worker_in() -> None:
    assert fill([0.01, 5.0], [1e-3, 1e-6], 100, minimum=1).tolist() == [99, 1]


def test_the_remainder_goes_where_it_hurts_least() -> None:
    assert fill([0.0, 0.0], [1.0, 100.0], 7, unit=4).tolist() == [7, 0]
    assert fill([0.0, 0.0], [1.0, 1.0], 9, unit=4).tolist() == [5, 4]


def test_units_too_close_for_floating_point_still_sum_exactly() -> None:
    assert fill([1e9, 1e9], [1e-12, 1e-12], 10**7 + 1).sum() == 10**7 + 1


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"minimum": 6}, "minimum is too large"),
        ({"maximum": 4}, "maximum is too small"),
        ({"minimum": [3, 0], "maximum": [2, 9]}, "from minimum 3 to maximum 2"),
        ({"maximum": 5, "unit": 4}, "no worker has room for the remainder of 2"),
        ({"minimum": -1}, "at least 0"),
        ({"unit": 0}, "unit at least 1"),
    ],
)
def test_bounds_that_cannot_be_met_are_named(bounds: dict[str, int], words: str) -> None:
    for split in (lambda: fill([0.0, 0.0], [1.0, 1.0], 10, **bounds), lambda: proportional([1, 1], 10, **bounds)):
        with pytest.raises(ValueError, match=words):
            split()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_costs_and_weights_must_be_numbers_that_make_sense(bad: float) -> None:
    for split in (lambda: fill([bad], [1.0], 3), lambda: fill([0.0], [bad], 3), lambda: proportional([1.0, bad], 3)):
        with pytest.raises(ValueError, match="must be finite"):
            split()
    with pytest.raises(ValueError, match="at least one worker"):
        fill([], [], 3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any), st.integers(0, 10**6), st.integers(1, 16))
def test_proportional_is_within_one_unit_of_the_quota(weights: list[float], total: int, unit: int) -> None:
    shares = proportional(weights, total, unit=unit)
    quota = np.array(weights) / max(weights)
    quota = quota / quota.sum() * total
    assert shares.sum() == total
    assert np.all(np.abs(shares - quota) < 2 * unit)
    assert np.all(shares[np.array(weights) == 0] == 0)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=10),
    st.integers(0, 200),
)
def test_proportional_keeps_its_bounds(workers: list[tuple[float, int, int]], total: int) -> None:
    weights, low, extra = (list(column) for column in zip(*workers))
    high = [a + b for a, b in zip(low, extra)]
    assume(sum(low) <= total <= sum(high))
    shares = proportional(weights, total, minimum=low, maximum=high)
    assert shares.sum() == total
    assert np.all(shares >= low)
    assert np.all(shares <= high)


def test_proportional_rounds_by_largest_remainder() -> None:
    assert proportional([5.3, 2.9, 1.8], 10).tolist() == [5, 3, 2]


def test_ten_thousand_workers_take_milliseconds() -> None:
    rng = np.random.default_rng(0)
    fixed, each = rng.lognormal(0, 2, 10_000), rng.lognormal(0, 2, 10_000)
    fill(fixed, each, 320_000)
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        assert fill(fixed, each, 320_000).sum() == 320_000
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.01  # about 0.7 ms on an idle core; benchmarks/plan_scale.py holds the line
