"""The learning rate when the count varies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gradients.gradients import VaryingCount, gain

positive = st.floats(1e-6, 1e6)


@given(scale=positive, variance=positive, mean=positive)
def test_the_gain_lies_between_no_scaling_and_linear(scale: float, variance: float, mean: float) -> None:
    assert min(1.0, scale) * (1 - 1e-9) <= gain(scale, variance, mean) <= max(1.0, scale) * (1 + 1e-9)


def test_noise_and_signal_are_found_from_the_workers_own_means() -> None:
    dice = np.random.default_rng(0)
    true_mean, per_sample, sizes = np.full(20, 0.3), 4.0, [60, 30, 10]
    rule = VaryingCount("gain", usual=100.0)
    for _ in range(400):
        means = [true_mean + dice.normal(0, np.sqrt(per_sample / 20 / n), 20) for n in sizes]
        whole = sum(n * g for n, g in zip(sizes, means, strict=True)) / 100
        squares = sum(n * float(g @ g) for n, g in zip(sizes, means, strict=True))
        rule.learn(weighted_squares=squares, squared_norm=float(whole @ whole), weight=100, workers=3)
    expected = gain(0.5, per_sample / 100, float(true_mean @ true_mean))
    assert rule.factor(50) == pytest.approx(expected, rel=0.02)


def test_none_and_linear_need_no_norms() -> None:
    assert VaryingCount("none", 64).factor(13) == 1.0
    assert VaryingCount("linear", 64).factor(16) == 0.25
    assert not VaryingCount("linear", 64).wants_norms
    assert VaryingCount("gain", 64).wants_norms


def test_before_anything_is_known_and_with_one_worker_gain_is_linear() -> None:
    rule = VaryingCount("gain", 64)
    rule.learn(weighted_squares=1.0, squared_norm=1.0, weight=64, workers=1)
    assert rule.factor(32) == 0.5


def test_the_state_goes_on() -> None:
    rule, again = VaryingCount("gain", 64), VaryingCount("gain", 64)
    rule.learn(weighted_squares=90.0, squared_norm=1.0, weight=64, workers=2)
    again.load_state_dict(rule.state_dict())
    assert again.factor(32) == rule.factor(32) != 0.5


@pytest.mark.parametrize(("rule", "usual"), [("sometimes", 64), ("gain", 0), ("linear", float("nan"))])
def test_nonsense_is_refused(rule: str, usual: float) -> None:
    with pytest.raises(ValueError, match=r"learning rate|whole batch"):
        VaryingCount(rule, usual)
