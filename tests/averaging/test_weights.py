"""How much each worker's update counts."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.averaging.weights import RULES, LocalWork, Mixture, local_work, normalised, over_members, samples, uniform
from paceline.research.wp_weights import log_contraction, mse, spread, wp

STEPS = st.lists(st.integers(0, 500), min_size=1, max_size=12)
RATES = st.floats(0.0, 0.9)


def rules() -> list[Callable[[LocalWork], Mixture]]:
    return [rule.weigh for rule in RULES.present().values()]


def work(steps: Any, rate: float, **facts: Any) -> LocalWork:
    """Workers with one constant ``eta * lambda``."""
    steps = np.asarray(steps)
    return LocalWork(steps=steps, samples=16 * steps, log_contraction=steps * log_contraction(rate, 1.0), **facts)


@given(STEPS, RATES, st.floats(0, 0.99), st.floats(0, 1e6), st.floats(0, 1e6))
def test_weights_are_not_negative_and_sum_to_one(
    steps: list[int], rate: float, momentum: float, distance: float, noise: float
) -> None:
    facts = work(steps, rate, momentum=momentum, distance=distance, noise=noise)
    for rule in rules():
        mixture = rule(facts)
        assert mixture.weights.sum() == pytest.approx(1)
        assert (mixture.weights >= 0).all()
        assert mixture.scale > 0


@given(STEPS, RATES, st.randoms())
def test_who_a_worker_is_does_not_matter(steps: list[int], rate: float, random: Any) -> None:
    order = list(range(len(steps)))
    random.shuffle(order)
    for rule in rules():
        plain = rule(work(steps, rate, momentum=0.5, distance=2.0, noise=1.0))
        shuffled = rule(work([steps[i] for i in order], rate, momentum=0.5, distance=2.0, noise=1.0))
        assert shuffled.weights == pytest.approx(plain.weights[order])
        assert shuffled.scale == pytest.approx(plain.scale)


@given(STEPS, RATES)
def test_under_wp_samples_and_mse_who_did_less_never_counts_more(steps: list[int], rate: float) -> None:
    steps = sorted(steps)
    for rule in (wp, samples, mse):
        weights = rule(work(steps, rate, distance=3.0, noise=0.5)).weights
        if any(steps):
            assert all(less <= more + 1e-12 for less, more in pairwise(weights))


@given(STEPS)
def test_who_did_no_step_has_no_weight(steps: list[int]) -> None:
    steps = [*steps, 0, 7]
    for rule in rules():
        weights = rule(work(steps, 0.1, distance=1.0, noise=1.0)).weights
        assert (weights[np.asarray(steps) == 0] == 0).all()


def test_when_nobody_did_a_step_all_weights_are_equal() -> None:
    for rule in rules():
        mixture = rule(work([0, 0], 0.1, distance=1.0, noise=1.0))
        assert mixture.weights.tolist() == [0.5, 0.5]
        assert mixture.scale == 1.0


@pytest.mark.parametrize("rule", rules())
def test_one_worker_alone_has_all_the_weight(rule: Any) -> None:
    mixture = rule(work([5], 0.1, momentum=0.9, distance=1.0, noise=1.0))
    assert mixture.coefficients == pytest.approx([1.0])


@given(st.integers(1, 300), st.integers(1, 9), RATES, st.floats(0, 0.99))
def test_equal_work_gives_equal_weights_and_scale_one(steps: int, workers: int, rate: float, momentum: float) -> None:
    for rule in rules():
        mixture = rule(work([steps] * workers, rate, momentum=momentum, distance=1.0, noise=0.1))
        assert mixture.coefficients == pytest.approx(np.full(workers, 1 / workers))


def test_wp_weights_fall_by_rho_for_every_step_behind() -> None:
    rho, behind = 0.97, np.array([0, 3, 40])
    weights = wp(work(100 - behind, 1 - rho)).weights
    assert weights == pytest.approx(rho**behind / (rho**behind).sum())


def test_wp_with_a_schedule_uses_the_product_over_the_missing_steps() -> None:
    rates, decay = np.linspace(0.5, 0.1, 20), 0.3
    logs = np.cumsum([log_contraction(rate, decay) for rate in rates])
    weights = wp(LocalWork(steps=[20, 12], log_contraction=[logs[19], logs[11]])).weights
    assert weights[1] / weights[0] == pytest.approx(np.prod(1 - rates[12:] * decay))


def test_wp_without_weight_decay_is_uniform() -> None:
    facts = work([9, 4, 1], 0.0)
    assert wp(facts).weights.tolist() == uniform(facts).weights.tolist()


def test_wp_does_not_overflow_when_the_slow_are_hopelessly_behind() -> None:
    weights = wp(work([10**6, 10**6, 1], 0.5)).weights
    assert weights.tolist() == [0.5, 0.5, 0.0]


def test_wp_on_a_quadratic_equals_the_closed_form() -> None:
    """Gradient descent on lambda/2 |w - w*|^2 leaves rho^T of the distance; every worker then adds the same bias,
    and the average is off by ``n rho^T_max / sum_j rho^d_j`` of the start's distance."""
    rate, decay, target, start = 0.2, 0.4, np.array([3.0, -1.0]), np.array([0.5, 2.0])
    steps = np.array([60, 41, 12, 3])
    ends = []
    for count in steps:
        point = start.copy()
        for _ in range(count):
            point -= rate * decay * (point - target)
        ends.append(point)
    mixture = wp(work(steps, rate * decay))
    average = start + mixture.coefficients @ (np.array(ends) - start)
    rho, behind = 1 - rate * decay, steps.max() - steps
    expected = target + (start - target) * len(steps) * rho ** steps.max() / (rho**behind).sum()
    assert average == pytest.approx(expected, rel=1e-12)
    parts = mixture.weights[:, None] * (np.array(ends) - target)
    assert parts == pytest.approx(np.tile(parts[0], (4, 1)))


@given(
    st.lists(st.integers(1, 200), min_size=2, max_size=6),
    st.floats(0.001, 0.2),
    st.floats(1e-3, 1e3),
    st.integers(0, 10**6),
)
def test_no_other_weights_have_a_lower_expected_error_than_mse(
    steps: list[int], rate: float, distance: float, seed: int
) -> None:
    facts = work(steps, rate, distance=distance, noise=1.0)
    beta = facts.contraction

    def error(weights: Any) -> float:
        return float(distance * (weights @ beta) ** 2 + weights @ weights)

    best = error(mse(facts).weights)
    others = np.random.default_rng(seed).dirichlet(np.ones(len(steps)), size=50)
    near = np.clip(mse(facts).weights + 0.01 * (others - others.mean(0)), 0, None)
    for other in [*others, *(near / near.sum(1, keepdims=True)), *(rule(facts).weights for rule in rules())]:
        assert best <= error(other) * (1 + 1e-9)


def test_mse_without_noise_takes_the_fastest_alone_and_without_bias_is_uniform() -> None:
    assert mse(work([50, 50, 20], 0.05, distance=1.0, noise=0.0)).weights.tolist() == [0.5, 0.5, 0.0]
    assert mse(work([50, 20], 0.05, distance=0.0, noise=1.0)).weights.tolist() == [0.5, 0.5]


def test_mse_without_an_estimate_goes_by_samples() -> None:
    assert mse(work([30, 10], 0.05)).weights.tolist() == [0.75, 0.25]


def test_spread_finds_the_distance_and_the_noise_of_a_noisy_quadratic() -> None:
    generator = np.random.default_rng(0)
    facts = work([100, 100, 100, 20], 0.02)
    goal, noise = np.full(4000, 0.05), 0.03
    updates = (1 - facts.contraction)[:, None] * goal + noise * generator.standard_normal((4, 4000))
    distance, variance = spread(updates, facts)
    assert variance == pytest.approx(4000 * noise**2, rel=0.05)
    assert distance == pytest.approx(float(goal @ goal), rel=0.05)


@pytest.mark.parametrize(("steps", "rate"), [([5], 0.1), ([5, 0, 0], 0.1), ([5, 5], 0.0), ([0, 0], 0.1)])
def test_spread_says_nan_when_there_is_too_little_to_go_by(steps: list[int], rate: float) -> None:
    assert all(math.isnan(value) for value in spread(np.ones((len(steps), 3)), work(steps, rate)))


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_local_work_is_what_constant_gradients_add_up_to_under_momentum(steps: int, momentum: float) -> None:
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        moved += velocity
    assert local_work(np.array([float(steps)]), momentum)[0] == pytest.approx(moved, rel=1e-6)
    assert local_work(np.array([float(steps)]))[0] == steps


def test_normalised_moves_as_far_as_the_mean_sample_s_worker_whatever_the_directions() -> None:
    """Each worker's update per step counts by its samples; on one constant gradient g the step is tau_eff * g."""
    steps = np.array([8, 2])
    mixture = normalised(work(steps, 0.0))
    assert mixture.coefficients * steps == pytest.approx([0.8 * 6.8, 0.2 * 6.8])
    heavy = normalised(work(steps, 0.0, momentum=0.9))
    units = local_work(steps.astype(float), 0.9)
    assert float(heavy.coefficients @ units) == pytest.approx(0.8 * units[0] + 0.2 * units[1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_averaging_after_one_plain_sgd_step_each_equals_combining_gradients(batches: list[int], seed: int) -> None:
    """Least squares; worker i has ``batches[i]`` samples and takes one step on their mean gradient."""
    generator = np.random.default_rng(seed)
    start, rate = generator.standard_normal(4), 0.3
    rows, targets = generator.standard_normal((sum(batches), 4)), generator.standard_normal(sum(batches))
    parts = np.split(np.arange(sum(batches)), np.cumsum(batches)[:-1])
    updates = np.array([-rate * rows[p].T @ (rows[p] @ start - targets[p]) / len(p) for p in parts])
    whole = -rate * rows.T @ (rows @ start - targets) / sum(batches)
    mixture = samples(LocalWork(steps=[1] * len(batches), samples=batches))
    assert mixture.coefficients @ updates == pytest.approx(whole, abs=1e-12)


def test_members_of_a_group_share_its_weight() -> None:
    mixture = over_members(Mixture(np.array([0.5, 0.3, 0.2]), 1.5), [(3, 0), (1,), (2, 4)])
    assert mixture.weights == pytest.approx([0.25, 0.3, 0.1, 0.25, 0.1])
    assert mixture.scale == 1.5


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"steps": []}, "at least one"),
        ({"steps": [1, 2], "samples": [1]}, "the same number of each"),
        ({"steps": [-1]}, "steps must be one finite number"),
        ({"steps": [math.nan]}, "steps must be one finite number"),
        ({"steps": [1], "log_contraction": [0.1]}, "0 or less"),
        ({"steps": [1], "momentum": 1.0}, "momentum lies from 0 to below 1"),
    ],
)
def test_facts_that_cannot_be_are_refused(facts: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        LocalWork(**facts)


@pytest.mark.parametrize(("rate", "decay"), [(1.0, 1.0), (-0.1, 1.0), (math.inf, 0.1), (0.1, -1.0)])
def test_a_step_that_does_not_contract_is_refused(rate: float, decay: float) -> None:
    with pytest.raises(ValueError, match="learning rate"):
        log_contraction(rate, decay)
