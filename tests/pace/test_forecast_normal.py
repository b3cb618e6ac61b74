"""The normal distribution beyond a bound, against closed forms and the standard library."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from paceline.pace.forecast import log_tail, quantile, truncated_draws, truncated_moments


def test_the_tail_is_that_of_the_error_function() -> None:
    for z in (-8.0, -1.2345, 0.0, 0.5, 3.3, 20.0, 36.0):
        assert float(log_tail(z)) == pytest.approx(math.log(0.5 * math.erfc(z / math.sqrt(2))), abs=2e-6)
    # Past the table: the asymptotic series' next term is 1 / z^2.
    assert float(log_tail(50.0)) == pytest.approx(-1250 - math.log(50 * math.sqrt(2 * math.pi)), abs=1e-3)


def test_quantiles_are_those_of_the_standard_library() -> None:
    p = np.array([1e-12, 1e-4, 0.1, 0.5, 0.77, 0.999, 1 - 1e-9])
    assert quantile(p) == pytest.approx([NormalDist().inv_cdf(x) for x in p.tolist()], abs=1e-5)
    with pytest.raises(ValueError, match="strictly between"):
        quantile([0.0])


@pytest.mark.parametrize("bound", [-4.0, -1.0, 0.0, 1.0, 3.0, 8.0, 25.0, 60.0])
def test_truncated_draws_have_the_closed_form_mean_and_variance(bound: float) -> None:
    mean, sigma = 5.0, 2.0
    above = mean + bound * sigma
    drawn = truncated_draws(np.random.default_rng(1), np.array([mean]), sigma, np.array([above]), 40_000)[:, 0]
    expected, variance = (float(v) for v in truncated_moments(mean, sigma, above))
    assert drawn.min() >= above
    error = 5 * math.sqrt(variance / len(drawn))
    assert drawn.mean() == pytest.approx(expected, abs=error)
    assert drawn.var() == pytest.approx(variance, rel=0.06)


def test_moments_without_a_bound_are_the_normals_own() -> None:
    mean, variance = truncated_moments(3.0, 0.5, -1e9)
    assert float(mean) == pytest.approx(3.0)
    assert float(variance) == pytest.approx(0.25)


def test_moments_at_the_middle_are_those_of_the_half_normal() -> None:
    mean, variance = truncated_moments(0.0, 1.0, 0.0)
    assert float(mean) == pytest.approx(math.sqrt(2 / math.pi), abs=1e-5)
    assert float(variance) == pytest.approx(1 - 2 / math.pi, abs=1e-5)


def test_draws_follow_the_distribution_beyond_the_bound_and_not_only_its_moments() -> None:
    drawn = truncated_draws(np.random.default_rng(2), np.array([0.0]), 1.0, np.array([1.0]), 40_000)[:, 0]
    tail = 1 - NormalDist().cdf(1.0)
    for z in (1.2, 1.5, 2.0, 3.0):
        assert np.mean(drawn > z) == pytest.approx((1 - NormalDist().cdf(z)) / tail, abs=0.01)
