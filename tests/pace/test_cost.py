"""The cost model: quick at first, calm later, never degenerate, and awake to change."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace_rig import best_s, machines, play, record, slower

from paceline.pace import Adaptive, Ask
from paceline.pace.cost import Costs, median
from paceline.pace.shares import fill
from paceline.records import Plan, StepRecord


def taught(*steps: tuple[list[int], list[float]]) -> Costs:
    costs = Costs()
    for index, (samples, seconds) in enumerate(steps):
        costs.observe(record(index, samples, seconds))
    return costs


def expects(costs: Costs, worker: int, samples: int) -> float:
    forecast = costs.forecast_s((worker,), np.array([samples]))
    assert forecast is not None
    return forecast[0]


def test_one_measurement_scales_the_whole_model() -> None:
    costs = taught(([64], [2.0]))
    assert expects(costs, 0, 64) == pytest.approx(2.0)
    slow = taught(([64], [8.0]))
    for samples in (1, 16, 500):
        assert expects(slow, 0, samples) == pytest.approx(4 * expects(costs, 0, samples))


def test_two_measurements_after_the_first_tell_fixed_cost_from_speed() -> None:
    costs = taught(([64], [3.0]), ([64], [0.9 + 0.064]), ([256], [0.9 + 0.256]))
    assert expects(costs, 0, 128) == pytest.approx(0.9 + 0.128, rel=0.03)


def test_a_share_that_stands_still_teaches_the_speed_and_leaves_the_ratio() -> None:
    rng = np.random.default_rng(0)
    costs = taught(*(([n], [0.5 + 0.01 * n]) for n in (50, 100, 20, 80)))
    before = costs.belief()
    for step in range(4, 400):
        costs.observe(record(step, [60], [1.1 * rng.lognormal(0, 0.05)]))
    after = costs.belief()
    assert after.fixed_s[0] / after.per_sample_s[0] == pytest.approx(
        before.fixed_s[0] / before.per_sample_s[0], rel=0.1
    )
    assert expects(costs, 0, 60) == pytest.approx(1.1, rel=0.03)


def test_a_slow_first_step_does_not_stick() -> None:
    costs = taught(([64, 64], [9.0, 5.0]), ([64, 64], [0.5, 1.0]))
    assert expects(costs, 0, 64) == pytest.approx(0.5, rel=0.05)
    assert expects(costs, 1, 64) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("factor", [4.0, 1.6, 0.25])
def test_a_change_of_speed_is_believed_at_once(factor: float) -> None:
    rng = np.random.default_rng(0)
    costs = taught(*(([64], [rng.lognormal(0, 0.05)]) for _ in range(30)))
    moved = costs.observe(record(30, [64], [factor]))
    assert moved.tolist() == [True]
    assert expects(costs, 0, 64) == pytest.approx(factor)
    assert expects(costs, 0, 16) < 0.5 * factor


def test_a_smaller_change_is_believed_when_seen_twice() -> None:
    rng = np.random.default_rng(0)
    costs = taught(*(([64], [rng.lognormal(0, 0.02)]) for _ in range(30)))
    assert not costs.observe(record(30, [64], [1.25])).any()
    assert expects(costs, 0, 64) < 1.15
    assert costs.observe(record(31, [64], [1.25])).all()
    assert expects(costs, 0, 64) == pytest.approx(1.25, rel=0.01)


def test_a_stall_is_forgotten_with_the_next_normal_time() -> None:
    costs = taught(*(([64], [1.0]) for _ in range(20)))
    normal = expects(costs, 0, 8)
    costs.observe(record(20, [64], [30.0]))
    assert expects(costs, 0, 64) == pytest.approx(30.0)
    costs.observe(record(21, [8], [normal]))
    assert expects(costs, 0, 64) == pytest.approx(1.0)


def test_noise_alone_is_not_taken_for_a_change() -> None:
    rng = np.random.default_rng(1)
    costs, jumps = Costs(), 0
    for step in range(500):
        moved = costs.observe(record(step, [64] * 4, rng.lognormal(0, 0.1, 4)))
        jumps += int(moved.sum()) if step >= 20 else 0
    assert jumps < 0.01 * 4 * 480


def test_a_worker_that_sat_out_keeps_its_belief() -> None:
    costs = taught(([64, 64], [1.0, 9.0]), ([128, 0], [2.0, 0.0]))
    for step in range(2, 50):
        costs.observe(record(step, [128, 0], [2.0, 0.0]))
    assert expects(costs, 1, 64) == pytest.approx(9.0)


def test_what_was_measured_while_a_worker_looked_for_its_size_is_forgotten() -> None:
    """Worker 1 is three times as fast once it has found a size; worker 0 was given one that it had before."""
    seconds = ([3.2, 2.1, 1.7, 1.0], [1.0, 1.0])
    searched, plain = Costs(), Costs()
    for step, own_s in enumerate(seconds[0]):
        searched.observe(record(step, [64, 64], [2.0, own_s], sizes=[16, 0]))
        plain.observe(record(step, [64, 64], [2.0, 0.0]))
    assert expects(searched, 1, 64) == pytest.approx(1.0), "plans follow the newest time meanwhile"
    for step, own_s in enumerate(seconds[1], len(seconds[0])):
        searched.observe(record(step, [64, 80], [2.0, own_s], sizes=[16, 32]))
        plain.observe(record(step, [64, 80], [2.0, own_s]))
    mine, fresh = searched.state_dict()["columns"], plain.state_dict()["columns"]
    for name in set(mine) - {"size", "part"}:
        assert mine[name] == pytest.approx(fresh[name]), name


def test_a_worker_that_halves_its_size_begins_anew() -> None:
    costs = Costs()
    for step in range(8):
        costs.observe(record(step, [64, 64], [1.0, 1.0], sizes=[32, 32]))
    assert not costs.belief().doubtful.any()
    costs.observe(record(8, [64, 64], [1.0, 1.2], sizes=[32, 16]))
    assert costs.belief().doubtful.tolist() == [False, True]
    assert expects(costs, 1, 64) == pytest.approx(1.2)


@pytest.mark.parametrize("unusable", [0.0, math.nan, math.inf, -1.0])
def test_a_time_that_is_none_is_passed_over(unusable: float) -> None:
    costs = taught(([64], [1.0]), ([64], [unusable]))
    assert expects(costs, 0, 64) == pytest.approx(1.0)


def test_a_new_worker_is_taken_for_the_median_and_not_forecast() -> None:
    costs = taught(([64, 64, 64], [1.0, 2.0, 9.0]))
    belief = costs.belief((0, 1, 2, 77))
    assert belief.known.tolist() == [True, True, True, False]
    assert belief.seconds(np.array([64, 64, 64, 64]))[3] == pytest.approx(2.0)
    forecast = costs.forecast_s((0, 77), np.array([64, 64]))
    assert forecast is not None
    assert math.isnan(forecast[1])
    assert Costs().forecast_s((0,), np.array([64])) is None


def test_the_belief_follows_the_worker_not_the_rank() -> None:
    costs = taught(([64, 64], [1.0, 3.0]))
    costs.observe(record(1, [64], [3.0], workers=[1]))
    costs.observe(record(2, [64, 64], [3.0, 1.0], workers=[1, 0]))
    assert expects(costs, 0, 64) == pytest.approx(1.0, rel=0.02)
    assert expects(costs, 1, 64) == pytest.approx(3.0, rel=0.02)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1e300)), min_size=3, max_size=3), min_size=1, max_size=25
    )
)
def test_any_record_leaves_costs_that_make_sense(steps: list[list[tuple[int, float]]]) -> None:
    costs = Costs()
    for step, workers in enumerate(steps):
        samples, seconds = zip(*workers)
        costs.observe(record(step, samples, seconds))
    belief = costs.belief()
    assert np.all(np.isfinite(belief.fixed_s))
    assert np.all(belief.fixed_s >= 0)
    assert np.all(np.isfinite(belief.per_sample_s))
    assert np.all(belief.per_sample_s > 0)


class Unregularised:
    """What not to do: the same dead-band-free loop on a plain least-squares line through recent times."""

    name = "unregularised"

    def __init__(self, workers: int, *, window: int = 10) -> None:
        self.seen: list[StepRecord] = []
        self.workers, self.window = workers, window

    def check(self, workers: int) -> None: ...

    def observe(self, record: StepRecord) -> None:
        self.seen.append(record)

    def plan(self, ask: Ask) -> Plan:
        if len(self.seen) < 2:
            return Plan(generation=0, step=ask.step, samples=tuple(fill([0.0] * 4, [1.0] * 4, ask.total).tolist()))
        n, t = (np.array([getattr(r, name) for r in self.seen[-self.window :]]) for name in ("samples", "seconds"))
        spread = ((n - n.mean(0)) ** 2).sum(0) + 1e-9
        b = np.maximum(((n - n.mean(0)) * (t - t.mean(0))).sum(0) / spread, 1e-6)
        a = np.maximum(t.mean(0) - b * n.mean(0), 0.0)
        return Plan(generation=0, step=ask.step, samples=tuple(fill(a, b, ask.total).tolist()))

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def lost(pacer_of, fleet, *, noise: float, total: int = 1024, seeds: int = 6) -> float:  # type: ignore[no-untyped-def]
    """Mean time lost after the start, as a fraction, against somebody who knows the machines."""
    runs = [play(pacer_of(), fleet, total=total, steps=150, noise=noise, seed=seed) for seed in range(seeds)]
    return float(np.mean([run.wall_s[6:].sum() / run.best_s[6:].sum() for run in runs])) - 1


@pytest.mark.slow
def test_under_noise_it_stays_within_two_per_cent_where_a_plain_fit_does_not() -> None:
    fleet = machines([0.1, 0.02, 0.3, 0.05], [1e-3, 1e-3, 2e-3, 4e-3])
    ours = lost(Adaptive, fleet, noise=0.05)
    plain = lost(lambda: Unregularised(4), fleet, noise=0.05)
    assert ours < 0.02
    assert plain > ours + 0.03


@pytest.mark.parametrize(
    "fleet",
    [
        slower([1, 1, 2, 4]),
        machines([0.1, 0.02, 0.3, 0.05], [1e-3, 1e-3, 2e-3, 4e-3]),
        machines([0.09, 0.02, 0.02], [1e-4, 5e-3, 8e-3]),  # a GPU, mostly launch cost, beside two CPUs
        machines([0.005, 0.01, 0.02], [1e-4, 3e-3, 3e-3]),
    ],
    ids=["emulated", "affine", "gpu-launch-bound", "gpu-small-model"],
)
def test_unlike_machines_are_at_their_limit_within_a_few_steps(fleet) -> None:  # type: ignore[no-untyped-def]
    run = play(Adaptive(), fleet, total=512, steps=14)
    assert run.of_limit[0] < 0.7
    assert run.of_limit[6:].mean() > 0.97
    assert best_s(*fleet(0), 512) == pytest.approx(np.median(run.wall_s[6:]), rel=0.03)


@given(st.lists(st.lists(st.floats(1e-300, 1e300), min_size=7, max_size=7), min_size=1, max_size=9), st.integers(1, 7))
def test_the_median_is_numpys_bit_for_bit(rows: list[list[float]], width: int) -> None:
    values = np.array(rows)[:, :width]
    assert median(values).tolist() == np.median(values, axis=1).tolist()
    assert float(median(values[0])) == float(np.median(values[0]))
