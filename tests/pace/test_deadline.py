"""The deadline by which so many samples are expected, against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pace_rig import expected_count

from paceline.pace.deadline import solve

DRAWS = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(0.01, 100))


def brute_force(draws: np.ndarray, shares: list[float], total: float, at_work: list[float]) -> float:
    """Bisection on the sum written out."""

    def count(deadline_s: float) -> float:
        rows = [[min(n, deadline_s / r) for n, r in zip(shares, row)] for row in draws.tolist()]
        return sum(a * sum(row[i] for row in rows) / len(rows) for i, a in enumerate(at_work))

    low, high = 0.0, 1.0
    while count(high) < total:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) < total else (low, middle)
    return high


@given(DRAWS, st.data())
def test_the_deadline_is_the_one_of_brute_force(draws: np.ndarray, data: st.DataObject) -> None:
    workers = draws.shape[1]
    shares = data.draw(st.lists(st.integers(1, 1000), min_size=workers, max_size=workers))
    at_work = data.draw(st.lists(st.floats(0.1, 1.0), min_size=workers, max_size=workers))
    possible = sum(a * n for a, n in zip(at_work, shares))
    total = data.draw(st.integers(1, max(1, int(0.95 * possible))))
    if total > 0.95 * possible:
        return
    most = np.array(shares, dtype=float)
    found = solve(draws, total, most=most, at_work=np.array(at_work))
    assert found == pytest.approx(brute_force(draws, shares, total, at_work), rel=1e-6)
    assert expected_count(found, draws, most, at_work=np.array(at_work)) == pytest.approx(total, rel=1e-6)


def test_two_workers_by_hand() -> None:
    # Speeds 1 and 1/2: 30 samples in 20 s. With 10 at most for the first, the second needs 40 s for its 20.
    draws = np.array([[1.0, 2.0]])
    assert solve(draws, 30, most=np.array([99.0, 99.0])) == pytest.approx(20.0)
    assert solve(draws, 30, most=np.array([10.0, 99.0])) == pytest.approx(40.0)


def test_where_shares_are_too_small_the_deadline_is_when_all_are_done() -> None:
    assert solve(np.array([[1.0, 2.0]]), 30, most=np.array([5.0, 5.0])) == pytest.approx(10.0)


def test_a_worker_at_work_half_of_its_time_counts_half() -> None:
    draws = np.array([[1.0, 1.0]])
    assert solve(draws, 30, most=np.array([99.0, 99.0]), at_work=np.array([1.0, 0.5])) == pytest.approx(20.0)


def test_a_worker_that_is_sometimes_slow_counts_its_mean_speed() -> None:
    draws = np.array([[1.0, 1.0], [1.0, 4.0]])
    assert solve(draws, 65, most=np.array([99.0, 99.0])) == pytest.approx(65 / (1 + (1 + 1 / 4) / 2))
