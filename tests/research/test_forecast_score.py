"""The score that decides who speaks: the ranked probability score up to the cut-off."""

import numpy as np
import pytest

from paceline.pace.forecast import Seen
from paceline.research.auto_forecast import crps, score


def test_the_score_of_a_normal_forecast_is_the_closed_form() -> None:
    """CRPS of N(0, 1) shifted to 10, at its mean: ``2 phi(0) - 1 / sqrt(pi)``."""
    draws = 10 + np.random.default_rng(0).standard_normal((20_000, 1))
    expected = 2 / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    assert crps(draws, Seen.whole([10.0]))[0] == pytest.approx(expected, abs=0.01)


def test_nothing_beyond_the_cut_off_is_judged() -> None:
    seen = Seen.until([1.0, 9.0], 2.0)
    near, far = np.array([[1.0, 2.5], [1.0, 3.0]]), np.array([[1.0, 50.0], [1.0, 90.0]])
    assert crps(near, seen).tolist() == crps(far, seen).tolist() == [0.0, 0.0]


def test_a_worker_that_was_late_and_had_been_forecast_in_time_costs() -> None:
    assert crps(np.array([[1.0, 0.5]]), Seen.until([1.0, 9.0], 2.0)).tolist() == [0.0, 1.5]


def test_bounds_that_say_nothing_take_nothing_from_the_others() -> None:
    seen = Seen(np.array([1.0, 1e-6]), np.array([False, True]))
    assert crps(np.array([[3.0, 1.0]]), seen).tolist() == [2.0, 0.0]


def test_the_true_distribution_scores_best_on_average_cut_off_or_not() -> None:
    rng = np.random.default_rng(1)
    steps = [Seen.until(own, 1.1) for own in 1 + 0.1 * rng.standard_normal((300, 40))]

    def mean_score(mean: float, sigma: float) -> float:
        return float(np.mean([score(mean + sigma * rng.standard_normal((32, 40)), seen) for seen in steps]))

    truth = mean_score(1.0, 0.1)
    assert all(truth < mean_score(*wrong) for wrong in ((0.9, 0.1), (1.1, 0.1), (1.0, 0.2), (1.0, 0.02)))


def test_the_unit_of_the_times_does_not_matter() -> None:
    draws = np.exp(np.random.default_rng(2).standard_normal((8, 3)))
    seen = Seen.until([1.0, 2.0, 3.0], 2.5)
    scaled = Seen(1000 * seen.seconds, seen.late)
    assert score(1000 * draws, scaled) == pytest.approx(score(draws, seen))
