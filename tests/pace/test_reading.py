"""A forecast tied to workers, not to columns."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.pace.forecast import Smoothed
from paceline.pace.forecasting import Followed, column
from paceline.research.forecasts import LastValue, OrderStatistics, Window
from paceline.research.general import General

RNG = np.random.default_rng(0)


def told(followed: Followed, workers: tuple[int, ...], seconds: list[float], late: list[bool] | None = None) -> None:
    mask = np.array([False] * len(workers) if late is None else late)
    followed.observe(workers, np.array(seconds), mask)


def mean(followed: Followed, workers: tuple[int, ...]) -> np.ndarray:
    drawn = followed.draws(workers, 400, np.random.default_rng(1))
    assert drawn is not None
    return drawn.mean(axis=0)


def test_a_record_without_a_column_reads_as_zeros_and_nonsense_as_well() -> None:
    assert column((), 2).tolist() == [0.0, 0.0]
    assert column((1.0, float("nan"), -3.0, float("inf")), 4).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_nothing_is_drawn_before_anything_was_seen() -> None:
    followed = Followed(Smoothed())
    assert followed.draws((0, 1), 3, RNG) is None
    told(followed, (0, 1), [0.0, 0.0], [True, True])
    assert followed.draws((0, 1), 3, RNG) is None


@pytest.mark.parametrize("make", [Smoothed, LastValue, Window])
def test_workers_that_change_rank_keep_their_times(make: type) -> None:
    followed = Followed(make())
    for _ in range(5):
        told(followed, (7, 8, 9), [1.0, 2.0, 4.0])
    assert mean(followed, (9, 7, 8)) == pytest.approx([4.0, 1.0, 2.0], rel=0.1)
    told(followed, (9, 7), [4.0, 1.0])
    assert mean(followed, (7, 9)) == pytest.approx([1.0, 4.0], rel=0.1)


@pytest.mark.parametrize("make", [Smoothed, LastValue, Window])
def test_a_newcomer_is_the_median_of_the_others(make: type) -> None:
    followed = Followed(make())
    for _ in range(5):
        told(followed, (0, 1, 2), [1.0, 2.0, 9.0])
    assert mean(followed, (0, 5))[1] == pytest.approx(2.0, rel=0.15)
    told(followed, (0, 1, 2, 5), [1.0, 2.0, 9.0, 0.0], [False, False, False, True])
    assert mean(followed, (5,)) == pytest.approx([2.0], rel=0.15)


@pytest.mark.parametrize("make", [Smoothed, LastValue, Window])
def test_a_worker_that_said_nothing_is_believed_as_before(make: type) -> None:
    followed = Followed(make())
    for _ in range(5):
        told(followed, (0, 1), [1.0, 3.0])
    for _ in range(30):
        told(followed, (0, 1), [1.0, 0.0], [False, True])
    assert mean(followed, (0, 1)) == pytest.approx([1.0, 3.0], rel=0.2)


@pytest.mark.parametrize("make", [Smoothed, LastValue, Window, OrderStatistics])
def test_the_state_survives_json(make: type) -> None:
    one, other = Followed(make()), Followed(make())
    for row in ([1.0, 2.0], [1.5, 1.9]):
        told(one, (3, 4), row, [False, row[0] > 1])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for followed in (one, other):
        told(followed, (4, 5), [1.0, 2.0])
    assert np.array_equal(mean(one, (4, 5)), mean(other, (4, 5)))


def test_a_forecast_that_can_move_its_columns_is_told_who_went_where() -> None:
    moves: list[tuple[list[int], list[float]]] = []

    class Moving(Smoothed):
        def rearrange(self, sources: Sequence[int], seconds: np.ndarray) -> None:
            moves.append((list(sources), seconds.tolist()))
            super().rearrange(sources, seconds)

    followed = Followed(Moving())
    told(followed, (0, 1), [1.0, 2.0])
    told(followed, (1, 6), [2.0, 1.0])
    assert moves == [([1, -1], [2.0, 1.0])]


@pytest.mark.parametrize("make", [Smoothed, Window])
def test_times_of_other_sizes_of_micro_batches_are_forgotten(make: type) -> None:
    followed = Followed(make())
    for seconds, size in ((9.0, 0), (5.0, 0), (3.0, 0), (1.0, 32)):
        followed.observe((0, 1), np.array([2.0, seconds]), np.zeros(2, dtype=bool), sizes=(16, size))
        assert followed.typical((0, 1)).tolist() == [2.0, seconds]
    assert mean(followed, (0, 1)) == pytest.approx([2.0, 1.0], rel=0.1)


@pytest.mark.parametrize("saved", [LastValue, Window, General, Smoothed], ids=lambda kind: kind.__name__)
def test_a_state_that_another_kind_of_forecast_saved_is_gone_on_from_by_what_was_typical(saved: type) -> None:
    followed = Followed(saved())
    for _ in range(4):
        followed.observe((3, 5), np.array([1.0, 2.0]), np.zeros(2, dtype=bool))
    other = Followed(Smoothed())
    other.load_state_dict(followed.state_dict())
    assert other.workers == (3, 5)
    assert other.forecast.draw(400, np.random.default_rng(0)).mean(axis=0) == pytest.approx([1.0, 2.0], rel=0.05)
