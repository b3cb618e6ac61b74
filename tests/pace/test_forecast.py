"""Forecasts: what they draw after what was seen, and that a worker cut off never looks faster than its cut-off."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pace.forecast import Forecast, Seen, Smoothed
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.forecasts import LastValue, OrderStatistics, Window, expected_order
from paceline.research.general import General
from quick import examples

ALL: list[Callable[[], Forecast]] = [LastValue, Smoothed, OrderStatistics, Window, General, Auto]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("make", ALL)
def test_a_forecast_is_a_forecast_and_draws_positive_times_for_every_worker(make: Callable[[], Forecast]) -> None:
    forecast = make()
    assert isinstance(forecast, Forecast)
    for _ in range(3):
        forecast.observe(Seen.whole([1.0, 2.0, 3.0]))
    drawn = forecast.draw(64, rng())
    assert drawn.shape[1] == 3
    assert len(drawn) in (1, 64)
    assert np.all(drawn > 0)


@pytest.mark.parametrize("make", ALL)
def test_a_forecast_of_nothing_and_a_step_of_another_fleet_are_refused(make: Callable[[], Forecast]) -> None:
    forecast = make()
    with pytest.raises(ValueError, match="nothing was observed"):
        forecast.draw(4, rng())
    forecast.observe(Seen.whole([1.0, 2.0]))
    with pytest.raises(ValueError, match="3 workers in a step after steps of 2"):
        forecast.observe(Seen.whole([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("make", ALL)
def test_one_worker_is_forecast_too(make: Callable[[], Forecast]) -> None:
    forecast = make()
    forecast.observe(Seen.whole([2.0]))
    assert forecast.draw(200, rng()).mean() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("make", [LastValue, Smoothed, Window])
def test_a_worker_known_to_be_slow_stays_slow_while_it_is_cut_off(make: Callable[[], Forecast]) -> None:
    forecast = make()
    for _ in range(5):
        forecast.observe(Seen.whole([1.0, 1.0, 5.0]))
    for _ in range(60):
        forecast.observe(Seen.until([1.0, 1.0, 5.0], 1.2))
    assert forecast.draw(400, rng())[:, 2].mean() == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("make", [LastValue, Window])
def test_a_fast_worker_that_was_cut_off_is_forecast_beyond_the_cut_off(make: Callable[[], Forecast]) -> None:
    forecast = make()
    forecast.observe(Seen.whole([1.0, 1.0, 1.0]))
    forecast.observe(Seen.until([1.0, 1.0, 9.0], 1.5))
    drawn = forecast.draw(400, rng())
    late = drawn[:, 2] if isinstance(forecast, LastValue) else drawn[drawn[:, 2] != 1.0, 2]
    assert len(late) > 100
    assert np.all(late > 1.5)
    assert np.all(drawn[:, :2] == 1.0)


def test_last_value_repeats_what_it_saw() -> None:
    forecast = LastValue()
    forecast.observe(Seen.whole([1.0, 4.0]))
    forecast.observe(Seen.whole([2.0, 3.0]))
    assert forecast.draw(5, rng()).tolist() == [[2.0, 3.0]]


def test_the_smoothed_forecast_finds_mean_and_spread_of_each_worker() -> None:
    noise, forecast = rng(), Smoothed(rate=0.02)
    for _ in range(2000):
        forecast.observe(Seen.whole(np.array([1.0, 3.0]) + np.array([0.05, 0.3]) * noise.standard_normal(2)))
    drawn = forecast.draw(20_000, rng())
    assert drawn.mean(axis=0) == pytest.approx([1.0, 3.0], rel=0.03)
    assert drawn.std(axis=0) == pytest.approx([0.05, 0.3], rel=0.25)


def test_the_smoothed_forecast_is_not_fooled_by_a_cut_off_through_its_middle() -> None:
    """Half of the times are only known to be above 1: the mean still is 1, and the spread what it was. With the cut-off
    in their place the mean would come out at 1 - 0.4 sigma, the spread at 0.58 of what it is."""
    noise, forecast = rng(), Smoothed(rate=0.01)
    for _ in range(6000):
        forecast.observe(Seen.until([1.0 + 0.1 * noise.standard_normal()], 1.0))
    drawn = forecast.draw(20_000, rng())
    assert drawn.mean() == pytest.approx(1.0, abs=0.012)
    assert drawn.std() == pytest.approx(0.1, rel=0.15)


def test_the_window_draws_whole_steps_so_workers_slow_together() -> None:
    forecast = Window(steps=4)
    for own in ([9.0, 9.0], [1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]):
        forecast.observe(Seen.whole(own))
    drawn = forecast.draw(100, rng())
    assert np.all(drawn[:, 0] == drawn[:, 1])
    assert set(drawn[:, 0].tolist()) == {1.0, 2.0}


def test_elfving_agrees_with_monte_carlo_at_158_workers() -> None:
    draws = np.sort(rng().standard_normal((20_000, 158)), axis=1)
    assert np.abs(expected_order(158) - draws.mean(axis=0)).max() < 0.01


def test_elfving_of_one_worker_is_the_mean() -> None:
    assert expected_order(1).tolist() == pytest.approx([0.0], abs=1e-6)
    with pytest.raises(ValueError, match="at least one worker"):
        expected_order(0)


def test_elfving_recovers_a_normal_fleet_from_censored_steps() -> None:
    noise, forecast = rng(), OrderStatistics(rate=0.05)
    for _ in range(200):
        own = 2.0 + 0.2 * noise.standard_normal(158)
        forecast.observe(Seen.until(own, float(np.sort(own)[120])))
    row = forecast.draw(32, rng())[0]
    assert row == pytest.approx(2.0 + 0.2 * expected_order(158), rel=0.02)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.floats(0.005, 200), min_size=1, max_size=8),
    st.sampled_from(ALL),
)
def test_any_cut_offs_leave_finite_positive_draws(
    own: list[float], cuts: list[float], make: Callable[[], Forecast]
) -> None:
    forecast = make()
    for cut in cuts:
        forecast.observe(Seen.until(own, cut))
    drawn = forecast.draw(16, rng())
    assert np.all(np.isfinite(drawn))
    assert np.all(drawn > 0)


@pytest.mark.parametrize("bad", [[], [[1.0]], [1.0, math.nan], [1.0, -1.0], [0.0], [math.inf]])
def test_a_step_that_is_not_one_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError):
        Seen.whole(bad)


@pytest.mark.parametrize("cut", [0.0, -1.0, math.nan])
def test_a_cut_off_before_the_start_is_refused(cut: float) -> None:
    with pytest.raises(ValueError, match="cut-off"):
        Seen.until([1.0], cut)


def test_settings_that_make_no_sense_are_refused() -> None:
    for make in (lambda: Smoothed(rate=0), lambda: OrderStatistics(rate=1.5), lambda: Window(steps=0)):
        with pytest.raises(ValueError, match="not"):
            make()
