"""How hard worker and centre pull at each other, and when that settles."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.research.elastic_average import ElasticAverage
from paceline.research.elastic_weights import (
    RULES,
    Memory,
    check_alpha,
    clip_radius,
    clipped,
    dynamic,
    fixed,
    known,
    largest_alpha,
    log_distance,
    missed,
    momentum_kept,
    score,
)

ALPHAS = st.floats(0.01, 0.5)


def test_fixed_pulls_worker_and_centre_alike() -> None:
    exchange = fixed(0.2, 3)
    assert exchange.pull.tolist() == exchange.push.tolist() == [0.2, 0.2, 0.2]


def test_known_makes_who_failed_a_copy_of_the_centre_and_leaves_the_centre_alone() -> None:
    exchange = known(0.2, [False, True])
    assert exchange.pull.tolist() == [0.2, 1.0]
    assert exchange.push.tolist() == [0.2, 0.0]


@given(ALPHAS, st.floats(0.1, 3))
def test_a_worker_that_missed_more_rounds_is_pulled_harder_and_pushes_less(alpha: float, power: float) -> None:
    exchange = missed(alpha, np.arange(6), power=power)
    assert exchange.pull[0] == exchange.push[0] == pytest.approx(alpha)
    assert exchange.push == pytest.approx(alpha * (1.0 + np.arange(6)) ** -power)
    assert all(less < more for less, more in pairwise(exchange.pull))


def test_clipping_bounds_how_far_a_worker_moves_the_centre() -> None:
    exchange = clipped(0.25, [0.0, 2.0, 4.0, 400.0], radius=4.0)
    assert exchange.pull.tolist() == [0.25] * 4
    assert (exchange.push * [0.0, 2.0, 4.0, 400.0]).tolist() == [0.0, 0.5, 1.0, 1.0]
    assert clip_radius([1.0, 2.0, 3.0, 500.0]) == 5.0


@given(ALPHAS, st.lists(st.floats(-20, 20), min_size=1, max_size=8), st.sampled_from(["growth", "fall"]))
def test_dynamic_pulls_stay_between_alpha_and_one_and_pushes_between_zero_and_alpha(
    alpha: float, scores: list[float], reading: Any
) -> None:
    exchange = dynamic(alpha, scores, reading=reading)
    assert ((exchange.pull >= alpha) & (exchange.pull <= 1)).all()
    assert ((exchange.push >= 0) & (exchange.push <= alpha)).all()
    harder = (exchange.pull - alpha) / (1 - alpha)
    assert harder + exchange.push / alpha == pytest.approx(1.0)


def test_dynamic_weights_are_linear_between_the_thresholds() -> None:
    exchange = dynamic(0.2, [-1.0, 0.1, 0.25, 0.4, 9.0, math.nan], thresholds=(0.1, 0.4))
    assert exchange.pull == pytest.approx([0.2, 0.2, 0.6, 1.0, 1.0, 0.2])
    assert exchange.push == pytest.approx([0.2, 0.2, 0.1, 0.0, 0.0, 0.2])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5))
def test_the_two_readings_are_mirror_images(scores: list[float]) -> None:
    growth = dynamic(0.1, scores, reading="growth")
    fall = dynamic(0.1, [-value for value in scores], reading="fall")
    assert growth.pull.tolist() == fall.pull.tolist()


def test_the_score_weighs_changes_of_log_distance_newest_first() -> None:
    newest_first = np.array([[3.0], [1.0], [2.0], [0.0]])
    assert score(newest_first, coefficients=(0.5, 0.3, 0.2)) == pytest.approx([0.5 * 2 - 0.3 * 1 + 0.2 * 2])


def test_the_score_counts_changes_not_yet_seen_as_zero_and_knows_when_there_are_none() -> None:
    rows = np.array([[2.0, 1.0], [1.5, np.nan], [np.nan, np.nan]])
    scores = score(rows, coefficients=(0.6, 0.4))
    assert scores[0] == pytest.approx(0.3)
    assert math.isnan(scores[1])


def test_a_first_exchange_has_no_distance_and_a_finite_logarithm() -> None:
    assert np.isfinite(log_distance([0.0, 1e-300])).all()


@given(ALPHAS, st.integers(1, 6), st.integers(0, 10**6))
def test_every_rule_treats_workers_alike_and_gives_absent_ones_nothing(alpha: float, workers: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    order = generator.permutation(workers)
    rounds = [(generator.uniform(0, 9, workers), generator.random(workers) < 0.7) for _ in range(15)]
    for rule in RULES:
        settings = ElasticAverage(alpha=alpha, weights=rule, warm_up=2)
        plain, shuffled = settings.memory(workers), settings.memory(workers)
        for distances, present in rounds:
            one = settings.weigh(plain, distances, present)
            other = settings.weigh(shuffled, distances[order], present[order])
            assert other.pull == pytest.approx(one.pull[order])
            assert other.push == pytest.approx(one.push[order])
            assert (one.pull[~present] == 0).all()
            assert (one.push[~present] == 0).all()
            assert (one.push <= alpha + 1e-12).all()


def test_dynamic_weights_take_a_worker_that_jumped_away_for_a_failed_one_and_then_let_it_back_in() -> None:
    settings = ElasticAverage(alpha=0.2, weights="dynamic", warm_up=5)
    memory = settings.memory(2)
    for _ in range(8):
        exchange = settings.weigh(memory, [1.0, 1.1], [True, True])
        assert exchange.pull.tolist() == [0.2, 0.2]
    for _ in range(20):
        settings.weigh(memory, [1.0, 0.0], [True, False])
    back = settings.weigh(memory, [1.0, 30.0], [True, True])
    assert back.pull.tolist() == [0.2, 1.0]
    assert back.push.tolist() == [0.2, 0.0]
    for distance in (0.4, 0.7, 0.9, 1.0):
        exchange = settings.weigh(memory, [1.0, distance], [True, True])
        assert exchange.pull.tolist() == [0.2, 0.2]


def test_before_its_warm_up_is_over_a_worker_is_treated_as_fixed() -> None:
    settings = ElasticAverage(alpha=0.2, weights="dynamic", warm_up=3)
    memory = settings.memory(1)
    for distance in (0.0, 1e-3, 50.0):
        assert settings.weigh(memory, [distance], [True]).pull.tolist() == [0.2]
    assert settings.weigh(memory, [5000.0], [True]).pull.tolist() == [1.0]


def test_missed_and_known_rules_go_by_the_rounds_since_the_last_exchange() -> None:
    memory = Memory(1)
    settings = ElasticAverage(alpha=0.2, weights="missed")
    for _ in range(3):
        settings.weigh(memory, [0.0], [False])
    assert settings.weigh(memory, [1.0], [True]).push[0] == pytest.approx(0.2 / 4)
    assert settings.weigh(memory, [1.0], [True]).push[0] == pytest.approx(0.2)


@given(st.integers(0, 10**6))
def test_a_memory_restored_from_json_goes_on_as_before(seed: int) -> None:
    generator = np.random.default_rng(seed)
    settings = ElasticAverage(warm_up=0)
    memory, copy = settings.memory(3), settings.memory(3)
    for _ in range(int(generator.integers(0, 6))):
        settings.weigh(memory, generator.uniform(0, 5, 3), generator.random(3) < 0.5)
    copy.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    for _ in range(4):
        distances = generator.uniform(0, 5, 3)
        one, other = (settings.weigh(m, distances, [True, False, True]) for m in (memory, copy))
        assert one.pull.tolist() == other.pull.tolist()


def test_a_new_worker_in_an_old_place_starts_with_a_warm_up_of_its_own() -> None:
    settings = ElasticAverage(alpha=0.2, warm_up=1)
    memory = settings.memory(2)
    for _ in range(4):
        settings.weigh(memory, [1.0, 1.0], [True, True])
    memory.forget(1)
    assert settings.weigh(memory, [1.0, 90.0], [True, True]).pull.tolist() == [0.2, 0.2]


def test_a_memory_follows_its_workers_to_their_new_ranks() -> None:
    settings = ElasticAverage(alpha=0.2, warm_up=1)
    memory, alone = settings.memory(3), settings.memory(1)
    for distances in ([1.0, 2.0, 3.0], [1.0, 8.0, 3.0]):
        settings.weigh(memory, distances, [True, True, False])
        settings.weigh(alone, distances[1:2], [True])
    memory.members_changed((1, None))
    assert memory.exchanges.tolist() == [2, 0]
    assert memory.missed.tolist() == [0, 0]
    assert memory.log_distances[:, 0].tolist() == pytest.approx(alone.log_distances[:, 0].tolist(), nan_ok=True)
    assert np.isnan(memory.log_distances[:, 1]).all()


def test_momentum_is_kept_at_an_ordinary_pull_and_gone_after_a_full_one() -> None:
    assert momentum_kept(0.2, [0.2, 0.6, 1.0, 0.0]) == pytest.approx([1.0, 0.5, 0.0, 1.0])
    pulls = [0.2, 0.6, 1.0]
    kept = {
        mode: ElasticAverage(alpha=0.2, momentum=mode).momentum_kept(pulls, 4) for mode in ("keep", "fade", "reset")
    }
    assert kept["keep"].tolist() == [1, 1, 1]
    assert kept["fade"] == pytest.approx([1, 0.5, 0])
    assert kept["reset"].tolist() == [1, 0, 0]


def growth(alpha: float, workers: int, curvature_step: float) -> float:
    """The largest eigenvalue of EASGD's synchronous map on a quadratic, written out for all workers and the centre."""
    matrix = np.zeros((workers + 1, workers + 1))
    for worker in range(workers):
        matrix[worker, worker] = 1 - curvature_step - alpha
        matrix[worker, -1] = matrix[-1, worker] = alpha
    matrix[-1, -1] = 1 - workers * alpha
    return float(np.abs(np.linalg.eigvals(matrix)).max())


@given(st.integers(1, 12), st.floats(0.001, 1.99), st.floats(0.05, 1.5))
def test_the_bound_on_alpha_is_where_the_exchanges_stop_settling(workers: int, step: float, part: float) -> None:
    bound = largest_alpha(workers, step_curvature=step)
    if part < 0.999:
        assert growth(part * bound, workers, step) <= 1 + 1e-9
    elif part > 1.001:
        assert growth(part * bound, workers, step) > 1


def test_one_worker_has_the_bound_of_easgd() -> None:
    for step in (0.0, 0.5, 1.0, 2.0):
        assert largest_alpha(1, step_curvature=step) == pytest.approx((4 - 2 * step) / (4 - step))


@given(st.integers(1, 8), st.integers(1, 5), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_exchanges_after_local_steps_settle_whatever_the_dynamic_weights(
    workers: int, tau: int, step: float, part: float
) -> None:
    """Local steps first, then the exchange: no weights between fixed and full pull make the map expand when
    ``alpha <= 1 / workers``."""
    alpha = 0.9 / workers
    exchange = dynamic(alpha, [0.1 + 0.3 * part], thresholds=(0.1, 0.4))
    left, pull, push = (1 - step) ** tau, exchange.pull[0], exchange.push[0]
    together = np.array([[(1 - pull) * left, pull], [workers * push * left, 1 - workers * push]])
    assert np.abs(np.linalg.eigvals(together)).max() <= 1 + 1e-9


@pytest.mark.parametrize(("alpha", "workers"), [(0.41, 4), (0.0, 4), (-0.1, 1), (1.01, 1), (math.nan, 2)])
def test_an_alpha_that_does_not_settle_is_refused_with_the_bound(alpha: float, workers: int) -> None:
    with pytest.raises(ValueError, match=r"stable for 0 < alpha <= (0\.4 |1 |0\.6667 )"):
        check_alpha(alpha, workers)


def test_the_default_alpha_settles_for_any_fleet() -> None:
    for workers in range(1, 200):
        ElasticAverage().check(workers)


def test_a_learning_rate_beyond_the_curvature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learning rate times curvature is 2\.5"):
        largest_alpha(2, step_curvature=2.5)
    with pytest.raises(ValueError, match=r"alpha is 0\.5"):
        ElasticAverage(alpha=0.5).check(2, step_curvature=1.5)


def test_who_comes_one_by_one_misses_its_own_turns_alone() -> None:
    memory = Memory(2)
    memory.arrive([1.0, 1.0], [True, False], expected=[True, False])
    assert memory.missed.tolist() == [0, 0]
    memory.arrive([1.0, 1.0], [False, False], expected=[False, True])
    assert memory.missed.tolist() == [0, 1]
    assert memory.arrive([1.0, 1.0], [False, True], expected=[False, True]).tolist() == [0, 1]
