"""The general forecast: any cluster, any number of workers, from its first steps; cut-offs; its file and its making."""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pace import Ask
from paceline.pace.forecast import Forecast, Seen, Smoothed, best_count, make
from paceline.pace.forecasting import steps_ahead
from paceline.pace.joint import Joint
from paceline.records import StepRecord
from paceline.research.auto_forecast import BACKLOG, TRIAL
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.cutoff import Cutoff
from paceline.research.experts import EXPERTS, advise
from paceline.research.gate import FILE, Gate, LogMixture, shipped, spread_evenly
from paceline.research.general import WINDOW, General
from paceline.simulate import make as scenario
from quick import examples

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def told(seconds: np.ndarray, cut: float | None = None) -> General:
    forecast = General()
    for own in seconds:
        forecast.observe(Seen.whole(own) if cut is None else Seen.until(own, cut))
    return forecast


def mean(mixture: LogMixture) -> np.ndarray:
    return np.asarray((mixture.weights * mixture.means).sum(axis=1))


# -- any cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 7, 158])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 60])
def test_it_forecasts_any_number_of_workers_from_the_first_step_on(workers: int, steps: int) -> None:
    drawn = told(scenario("bursts", steps=steps, workers=workers)).draw(16, rng())
    assert drawn.shape == (16, workers)
    assert np.all(np.isfinite(drawn) & (drawn > 0))


@pytest.mark.parametrize("cut", [None, 1.05])
def test_the_order_of_the_workers_is_the_order_of_what_is_believed(cut: float | None) -> None:
    seconds, order = scenario("bursts", steps=30, workers=12), rng().permutation(12)
    straight, turned = told(seconds, cut).belief(), told(seconds[:, order], cut).belief()
    for one, other in zip(vars(straight).values(), vars(turned).values()):
        assert other == pytest.approx(one[order], rel=1e-6, abs=1e-9)


def test_the_unit_of_time_does_not_matter() -> None:
    seconds = scenario("periodic", steps=30, workers=9)
    assert mean(told(1000 * seconds).belief()) == pytest.approx(mean(told(seconds).belief()) + np.log(1000))


def test_the_same_steps_give_the_same_draws() -> None:
    seconds = scenario("bursts", steps=20, workers=8)
    assert told(seconds, 1.1).draw(8, rng()).tolist() == told(seconds, 1.1).draw(8, rng()).tolist()


def test_ten_steps_of_a_calm_fleet_are_enough_to_know_it() -> None:
    seconds = scenario("calm", steps=11, workers=40)
    drawn = told(seconds[:10]).draw(32, rng())
    assert np.median(drawn, axis=0) == pytest.approx(seconds[10], rel=0.12)
    assert best_count(drawn) >= 38


def test_it_finds_a_rhythm_that_no_weighted_mean_can_follow() -> None:
    seconds = scenario("periodic", steps=61, workers=24)
    general, smoothed, off = General(), Smoothed(), []
    for step, own in enumerate(seconds):
        if step >= 40:
            off.append([np.abs(np.log(np.median(f.draw(32, rng()), axis=0) / own)).mean() for f in (general, smoothed)])
        general.observe(Seen.whole(own))
        smoothed.observe(Seen.whole(own))
    ours, theirs = np.mean(off, axis=0)
    assert ours < 0.5 * theirs


def test_it_can_look_two_steps_ahead_where_plans_are_made_a_step_early() -> None:
    """Slow for 2 of every 6 steps, and the next change is two steps away: only a forecast of that step has it."""
    logs = np.log(3.0) * (np.arange(43)[:, None] % 6 < 2) + 0.02 * rng().standard_normal((43, 5))
    forecast = told(np.exp(logs[:41]))
    assert np.median(forecast.draw(64, rng())) == pytest.approx(1.0, rel=0.1)  # step 41 is fast
    forecast.ahead = 2
    assert np.median(forecast.draw(64, rng())) == pytest.approx(3.0, rel=0.1)  # step 42 is not
    forecast.observe(Seen.whole(np.exp(logs[41])))
    assert np.median(forecast.draw_early(64, rng())) == pytest.approx(3.0, rel=0.1)  # step 42, without step 41


def test_how_far_ahead_a_plan_looks_follows_from_the_steps_planned_and_observed() -> None:
    assert [steps_ahead(5, 4), steps_ahead(5, 3), steps_ahead(5, 2), steps_ahead(1, -1)] == [1, 2, 2, 1]
    rule, workers = Cutoff(), tuple(range(4))
    for step in range(3):
        rule.observe(_whole(step, workers))
    for planned, ahead in ((3, 1), (4, 2), (3, 1)):
        rule.plan(Ask(step=planned, total=40, workers=workers))
        assert rule.forecast.ahead == ahead  # type: ignore[attr-defined]


def _whole(step: int, workers: tuple[int, ...]) -> StepRecord:
    each = (10,) * len(workers)
    done = {"planned": each, "samples": each, "seconds": (1.0,) * len(workers)}
    return StepRecord(step=step, epoch=0, generation=0, workers=workers, **done)  # type: ignore[arg-type]


def test_workers_of_a_node_slow_down_in_the_same_draws() -> None:
    """With 40 workers in nodes of 10: across draws, node-mates' times go together, strangers' do not."""
    quiet = 0.02 * rng().standard_normal((40, 40))
    for node, steps in enumerate([(5, 9), (15, 18), (24, 27), (31, 33)]):
        quiet[slice(*steps), 10 * node : 10 * node + 10] += 0.6
    drawn = np.log(told(np.exp(quiet)).draw(400, rng()))
    slow = drawn > np.median(drawn, axis=0) + 0.3
    assert slow.any()
    together = np.corrcoef(slow[:, slow.any(axis=0)].T.astype(float))
    node = np.flatnonzero(slow.any(axis=0)) // 10
    mates = (node[:, None] == node) & ~np.eye(len(node), dtype=bool)
    assert together[mates].mean() > 0.4
    assert together[~mates & ~np.eye(len(node), dtype=bool)].mean() < 0.2


# -- cut-offs ----------------------------------------------------------------------------------------------------------


def test_a_worker_known_to_be_slow_stays_slow_while_it_is_cut_off() -> None:
    seconds = np.array([1.0, 1.0, 1.0, 5.0]) * np.exp(0.02 * rng().standard_normal((65, 4)))
    forecast = told(seconds[:5])
    for own in seconds[5:]:
        forecast.observe(Seen.until(own, 1.2))
    assert np.median(forecast.draw(64, rng())[:, 3]) == pytest.approx(5.0, rel=0.1)


def test_what_enters_for_a_worker_cut_off_lies_beyond_the_cut_off_and_what_was_measured_enters_as_it_was() -> None:
    forecast = told(scenario("bursts", steps=12, workers=6))
    seen = Seen.until([1.0, 1.1, 0.9, 4.0, 9.0, 1.0], 1.05)
    row = forecast.beyond(seen)
    assert np.all(row[seen.late] > np.log(1.05))
    assert row[~seen.late].tolist() == np.log(seen.seconds[~seen.late]).tolist()


def test_a_worker_that_nobody_measures_does_not_drift_away() -> None:
    """Cut off in its own middle for a hundred steps, it is still believed to be about what it was."""
    forecast = told(np.exp(0.05 * rng().standard_normal((10, 6))))
    for noise in 0.05 * rng().standard_normal((100, 6)):
        forecast.observe(Seen.until(np.exp(noise), 0.9))
    assert np.all(np.abs(mean(forecast.belief())) < 0.5)


def test_a_worker_of_which_nothing_is_heard_stays_as_it_was() -> None:
    """A bound near 0 for twenty steps is no sign of a slow worker."""
    forecast = told(np.exp(0.03 * rng().standard_normal((20, 4))))
    for noise in 0.03 * rng().standard_normal((20, 4)):
        seconds = np.exp(noise)
        seconds[3] = 1e-6
        forecast.observe(Seen(seconds, np.array([False, False, False, True])))
    assert forecast.draw(64, rng())[:, 3].mean() == pytest.approx(1.0, rel=0.05)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.floats(1e-4, 1e5), min_size=1, max_size=5),
    st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=6),
)
def test_any_times_and_cut_offs_leave_finite_positive_draws(own: list[float], cuts: list[float]) -> None:
    forecast = General()
    for cut in cuts:
        forecast.observe(Seen.until(own, cut))
    drawn = forecast.draw(8, rng())
    assert np.all(np.isfinite(drawn) & (drawn > 0))


def test_the_median_beyond_a_bound_is_that_of_the_draws_beyond_it() -> None:
    mixture = LogMixture(np.array([[0.7, 0.3]]), np.array([[0.0, 1.0]]), np.array([[0.1, 0.2]]))
    drawn = mixture.draw(rng().random((200_000, 1)), np.random.default_rng(8))[:, 0]
    for bound in (-0.5, 0.8, 1.1):
        found = mixture.beyond(np.array([bound]), np.array([True]))[0]
        assert found == pytest.approx(np.median(drawn[drawn > bound]), abs=0.01)
    assert mixture.beyond(np.array([9.0]), np.array([True]))[0] == pytest.approx(9.05, abs=0.05)


# -- fleets that change, states that are saved ----------------------------------------------------------------------


def test_columns_move_and_a_new_worker_starts_where_it_is_put() -> None:
    forecast = told(np.array([1.0, 2.0, 4.0]) * np.exp(0.01 * rng().standard_normal((12, 3))))
    forecast.rearrange([2, -1, 0], np.array([0.0, 3.0, 0.0]) + 1e-9)
    assert np.median(forecast.draw(64, rng()), axis=0) == pytest.approx([4.0, 3.0, 1.0], rel=0.05)


@pytest.mark.parametrize("kind", [General, Auto])
@pytest.mark.parametrize("saved_after", [0, 1, 30])
def test_it_goes_on_from_a_saved_state_as_if_nothing_had_happened(
    kind: Callable[[], Forecast], saved_after: int
) -> None:
    seen = [Seen.until(own, 1.2) for own in scenario("bursts", steps=40, workers=6)]
    whole, first, second = kind(), kind(), kind()
    for one in seen:
        whole.observe(one)
        whole.draw(1, rng())
    for one in seen[:saved_after]:
        first.observe(one)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in seen[saved_after:]:
        second.observe(one)
        second.draw(1, rng())
    assert second.draw(8, rng()).tolist() == whole.draw(8, rng()).tolist()


def test_steps_that_nobody_asks_about_cost_little_and_are_not_forgotten() -> None:
    seconds = scenario("skewed", steps=3 * BACKLOG, workers=6)
    asked, ignored = General(), General()
    for own in seconds:
        asked.observe(Seen.until(own, 2.0))
        asked.draw(1, rng())
        ignored.observe(Seen.until(own, 2.0))
    assert len(ignored._logs) == WINDOW
    assert mean(ignored.belief()) == pytest.approx(mean(asked.belief()), abs=0.1)


# -- the choice --------------------------------------------------------------------------------------------------------


def test_the_general_forecast_speaks_first_and_where_it_is_as_good(caplog: pytest.LogCaptureFixture) -> None:
    forecast = Auto()
    with caplog.at_level(logging.INFO, logger="paceline.forecast"):
        for own in scenario("periodic", steps=40, workers=8):
            forecast.observe(Seen.whole(own))
            assert forecast.speaking == "general"
    assert not caplog.records


def test_one_that_is_better_on_the_last_steps_takes_over_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A general forecast that is wrong by half is replaced as soon as it was tried, and draws are the other's."""
    forecast = Auto()
    forecast._general = _Wrong()
    with caplog.at_level(logging.INFO, logger="paceline.forecast"):
        for step, own in enumerate(scenario("calm", steps=TRIAL + 5, workers=8)):
            forecast.observe(Seen.whole(own))
            assert forecast.speaking == ("general" if step < TRIAL else "smoothed")
    assert forecast.draw(64, rng()).mean() == pytest.approx(1.0, rel=0.1)
    assert f"step {TRIAL}: forecasts are smoothed's now; errors over the last {TRIAL} steps: general 4" in caplog.text


class _Wrong(General):
    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return 1.5 * super().draw(rows, rng)

    def draw_early(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return 1.5 * super().draw_early(rows, rng)


def test_cutoff_uses_it_unless_told_otherwise_and_joint_the_forecast_that_costs_nothing() -> None:
    assert isinstance(Cutoff().forecast, Auto)
    assert isinstance(Joint().forecast, Smoothed)
    assert isinstance(make("general"), General)


def test_smoothed_goes_on_from_a_state_saved_by_auto() -> None:
    auto, smoothed, alone = Auto(), Smoothed(), Smoothed()
    for own in scenario("skewed", steps=10, workers=5):
        auto.observe(Seen.whole(own))
        alone.observe(Seen.whole(own))
    smoothed.load_state_dict(auto.state_dict())
    assert smoothed.mean_s == pytest.approx(alone.mean_s)


def test_a_state_saved_when_smoothed_was_the_default_is_gone_on_from() -> None:
    smoothed, forecast = Smoothed(), Auto()
    for own in scenario("skewed", steps=10, workers=5):
        smoothed.observe(Seen.whole(own))
    forecast.load_state_dict(smoothed.state_dict())
    assert np.median(forecast.draw(64, rng()), axis=0) == pytest.approx(smoothed.mean_s, rel=0.1)
    forecast.load_state_dict(Smoothed().state_dict())
    with pytest.raises(ValueError, match="nothing was observed"):
        forecast.draw(4, rng())


# -- its parts and its file -----------------------------------------------------------------------------------------


def test_advice_has_a_row_a_worker_and_nothing_in_it_is_wild() -> None:
    for steps in (1, 2, 3, 48):
        logs = np.log(scenario("stalls", steps=steps, workers=5))
        advice = advise(logs, np.zeros(logs.shape, dtype=np.bool_))
        assert advice.means.shape == advice.spreads.shape == (5, len(EXPERTS))
        assert np.all(np.abs(advice.features) <= 4)
        assert np.all(advice.spreads > 0)


def test_numbers_spread_evenly_have_one_in_every_part_of_each_column() -> None:
    spread = np.sort(spread_evenly(rng().random((10, 3)), rng()), axis=0)
    assert np.all(np.floor(10 * spread) == np.arange(10)[:, None])


def test_the_file_is_small_is_no_program_and_is_what_the_recipe_makes(maker: ModuleType) -> None:
    assert FILE.stat().st_size < 1_000_000
    with np.load(FILE, allow_pickle=False) as arrays:
        assert str(arrays["recipe"]) == maker.recipe(), "make it again: python benchmarks/make_forecaster.py --write"
    assert isinstance(shipped(), Gate)


@pytest.mark.slow
def test_making_it_twice_gives_the_same_bytes(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, smaller in {"STEPS": 8, "EPOCHS": 1}.items():
        monkeypatch.setattr(maker, name, smaller)

    def made() -> bytes:
        parts = [maker.torch.from_numpy(part) for part in maker.episodes(range(3), maker.by_hand())]
        return bytes(maker.packed(maker.learn(parts, seed=0)[0], maker.recipe()))

    assert made() == made()


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the file."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["make_forecaster"])
    spec = importlib.util.spec_from_file_location("make_forecaster", BENCHMARKS / "make_forecaster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
