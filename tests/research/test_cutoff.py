"""P3's cut-off: the decision against brute force, the pacer with its censored records, and counts fixed beforehand."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import paceline
from lone import join, linear, numbers
from paceline.pace import Ask, make
from paceline.pace.forecast import (
    Forecast,
    Seen,
    Smoothed,
    best_count,
    best_static_count,
    clairvoyant_counts,
    static_count,
)
from paceline.pace.forecast import make as make_forecast
from paceline.records import StepRecord
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.cutoff import Cutoff
from paceline.research.forecasts import LastValue, OrderStatistics, Window
from paceline.research.general import General
from quick import examples

TIMES = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(0.01, 100))


@given(TIMES, st.sampled_from([0.0, 0.3, 10.0]))
def test_the_count_is_the_best_of_all_counts(samples: np.ndarray, overhead_s: float) -> None:
    def gain(count: int) -> float:
        return float(np.mean([count / (sorted(row)[count - 1] + overhead_s) for row in samples.tolist()]))

    best = max(gain(count) for count in range(1, samples.shape[1] + 1))
    assert gain(best_count(samples, overhead_s=overhead_s)) == pytest.approx(best)


@given(TIMES, st.sampled_from([0.0, 0.3]))
def test_the_best_static_count_and_the_clairvoyant_are_the_best_of_all(own: np.ndarray, overhead_s: float) -> None:
    ordered = np.sort(own, axis=1)
    every = range(1, own.shape[1] + 1)
    static = [c * len(own) / float((ordered[:, c - 1] + overhead_s).sum()) for c in every]
    assert static[best_static_count(ordered, overhead_s=overhead_s) - 1] == pytest.approx(max(static))
    for row, count in zip(ordered, clairvoyant_counts(ordered, overhead_s=overhead_s)):
        assert count / (row[count - 1] + overhead_s) == pytest.approx(max(c / (row[c - 1] + overhead_s) for c in every))


def test_like_workers_are_all_waited_for() -> None:
    assert best_count(np.ones((3, 7))) == 7
    assert clairvoyant_counts(np.ones((3, 7))).tolist() == [7, 7, 7]


def test_a_costly_round_waits_for_more_workers() -> None:
    samples = np.array([[1.0, 1.0, 1.0, 3.0]])
    assert best_count(samples) == 3
    assert best_count(samples, overhead_s=10.0) == 4


def test_the_decision_averages_throughput_over_samples_and_not_times() -> None:
    # c / E[x] would leave the second worker: 2 / 5.5 < 1. E[c / x], which P3's rule takes, is (2 + 0.2) / 2 > 1.
    samples = np.array([[1.0, 1.0], [1.0, 10.0]])
    assert best_count(samples) == 2


def test_a_forecast_of_one_row_leaves_no_difference_between_the_mean_rate_and_the_rate_at_the_mean() -> None:
    rng, forecast = np.random.default_rng(0), OrderStatistics()
    forecast.observe(Seen.whole(rng.lognormal(size=9)))
    drawn = forecast.draw(32, rng)
    assert drawn.shape == (1, 9)
    assert best_count(drawn) == 1 + int(np.argmax(np.arange(1, 10) / drawn.mean(axis=0)))


@pytest.mark.parametrize(("fraction", "workers", "count"), [(0.9, 158, 142), (0.9, 1, 1), (0.1, 3, 1), (1.0, 8, 8)])
def test_a_static_count_is_the_nearest_whole_number(fraction: float, workers: int, count: int) -> None:
    assert static_count(fraction, workers) == count


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.1, math.nan])
def test_a_static_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        static_count(fraction, 4)


SHARE = 32


def ask(workers: int, *, step: int = 0, share: int = SHARE, last: bool = False) -> Ask:
    return Ask(step=step, total=share * workers, workers=tuple(range(workers)), last=last)


def step_record(
    own: Sequence[float], wait_for: int | None, *, share: int = SHARE, step: int = 0, round_s: float = 0.0
) -> StepRecord:
    """What a fleet tells of a step in which everybody was dealt ``share`` samples and took ``own`` seconds."""
    closed = sorted(own)[(wait_for or len(own)) - 1]
    late = [seconds > closed for seconds in own]
    return StepRecord(
        step=step,
        epoch=0,
        generation=0,
        workers=tuple(range(len(own))),
        planned=(share,) * len(own),
        samples=tuple(0 if missed else share for missed in late),
        seconds=tuple(closed / 2 if missed else seconds for missed, seconds in zip(late, own)),
        unfinished_s=tuple(closed / 2 if missed else 0.0 for missed in late),
        wait_for=wait_for,
        round_s=round_s,
    )


def played(rule: Cutoff, steps: Sequence[Sequence[float]], *, first: int = 0) -> list[int]:
    """The counts chosen, each seeing the steps before it alone."""
    chosen = []
    for step, own in enumerate(steps, start=first):
        plan = rule.plan(ask(len(own), step=step))
        chosen.append(plan.wait_for or len(own))
        rule.observe(step_record(list(own), plan.wait_for, step=step))
    return chosen


class Spy(LastValue):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def observe(self, seen: Seen) -> None:
        self.seen.append(seen)
        super().observe(seen)


def test_the_first_step_waits_for_everybody_and_the_next_knows_better() -> None:
    assert played(Cutoff("last"), [[1.0, 1.0, 1.0, 9.0]] * 3) == [4, 3, 3]


def test_shares_are_equal_and_a_plan_before_anything_was_seen_waits_for_everybody() -> None:
    rule = Cutoff("last")
    plan = rule.plan(Ask(step=0, total=10, workers=(0, 1, 2, 3)))
    assert (plan.samples, plan.wait_for, plan.deadline_s) == ((3, 3, 2, 2), None, None)
    rule.observe(step_record([1.0, 1.0, 1.0, 1.0], None))
    assert rule.plan(ask(4, step=1)).wait_for == 4, "fewer, if the leader finds so while the step runs"


def test_the_count_of_the_open_step_is_decided_again_from_the_record_that_its_plan_lacked() -> None:
    rule = Cutoff("last")
    rule.observe(step_record([1.0, 1.0, 1.0, 1.0], None))
    asked = ask(4, step=2)
    assert rule.plan(asked).wait_for == 4, "as planned while step 1 ran"
    rule.observe(step_record([1.0, 1.0, 1.0, 9.0], 4, step=1))
    before = repr(rule.state_dict())
    assert rule.recount(asked, SHARE) == 3
    assert repr(rule.state_dict()) == before, "a question changes nothing"
    assert Cutoff(static=0.5).recount(asked, SHARE) is None, "a static count stays"


def test_where_the_batch_is_not_kept_nobody_knows_the_number_of_steps(tmp_path: Path) -> None:
    with join(tmp_path, Cutoff(static=0.5, keep_batch=False)) as fleet:
        fleet.model(linear())
        with pytest.raises(TypeError, match=r"with keep_batch=False .* follow step.progress"):
            len(fleet.steps(numbers(), global_batch=8, micro_batch=4))
    assert repr(Cutoff(static=0.5, keep_batch=False)) == "Cutoff(static=0.5, keep_batch=False)"


def test_late_workers_are_known_to_be_slower_than_what_they_had_spent_and_nothing_else() -> None:
    spy = Spy()
    played(Cutoff(spy), [[1.0, 1.0, 1.0, 9.0], [1.1, 1.2, 1.0, 7.0]])
    assert [seen.late.tolist() for seen in spy.seen] == [[False] * 4, [False] * 3 + [True]]
    assert spy.seen[1].seconds == pytest.approx([1.1, 1.2, 1.0, 1.2])


def test_a_short_last_step_is_scaled_to_a_full_one() -> None:
    spy = Spy()
    rule = Cutoff(spy)
    rule.observe(step_record([1.0, 1.0, 8.0], None))
    rule.observe(step_record([0.25, 0.25, 2.0], None, share=SHARE // 4))
    assert spy.seen[1].seconds == pytest.approx(spy.seen[0].seconds)
    # And the count of a short step is chosen for its own times: a round of 1 s weighs more there.
    costly = Cutoff("last", overhead_s=1.0)
    costly.observe(step_record([1.0, 1.0, 1.0, 2.5], None))
    assert costly.plan(ask(4, step=1)).wait_for == 3
    assert costly.plan(ask(4, step=1, share=SHARE // 8)).wait_for == 4


def test_who_sat_out_says_nothing() -> None:
    spy = Spy()
    rule = Cutoff(spy)
    rule.observe(step_record([1.0, 2.0], None))
    quiet = StepRecord(1, 0, 0, workers=(0, 1), planned=(SHARE, 0), samples=(SHARE, 0), seconds=(1.0, 0.0))
    rule.observe(quiet)
    drawn = spy.draw(200, np.random.default_rng(0))
    assert drawn[:, 1].mean() == pytest.approx(2.0, rel=0.1)


def test_the_rounds_own_cost_is_learned_from_the_records() -> None:
    own = [1.0, 1.0, 1.0, 3.0]
    cheap, costly, given = Cutoff("last"), Cutoff("last"), Cutoff("last", overhead_s=0.0)
    for rule, round_s in ((cheap, 0.0), (costly, 10.0), (given, 10.0)):
        for step in range(5):
            rule.observe(step_record(own, None, step=step, round_s=round_s))
    assert [rule.plan(ask(4, step=5)).wait_for for rule in (cheap, costly, given)] == [3, 4, 3]


def test_the_last_step_of_an_epoch_waits_for_everybody() -> None:
    rule = Cutoff("last")
    rule.observe(step_record([1.0, 1.0, 1.0, 9.0], None))
    assert rule.plan(ask(4, step=1, last=True)).wait_for is None


def test_a_static_cut_off_waits_for_its_fraction_from_the_start() -> None:
    assert played(Cutoff(static=0.75), [[1.0, 1.0, 1.0, 9.0]] * 3) == [3, 3, 3]
    assert Cutoff(static=1.0).plan(ask(4)).wait_for is None


def test_the_same_seed_decides_the_same() -> None:
    times = np.exp(0.3 * np.random.default_rng(3).standard_normal((30, 20))).tolist()
    assert played(Cutoff("smoothed", seed=5), times) == played(Cutoff("smoothed", seed=5), times)
    assert len(set(played(Cutoff("smoothed", seed=5), times))) > 1


def test_planning_changes_nothing() -> None:
    rule = Cutoff("window")
    played(rule, np.exp(0.3 * np.random.default_rng(3).standard_normal((9, 5))).tolist())
    before = json.dumps(rule.state_dict())
    assert rule.plan(ask(5, step=9)) == rule.plan(ask(5, step=9))
    assert json.dumps(rule.state_dict()) == before


def test_workers_may_come_and_go() -> None:
    rule = Cutoff("smoothed")
    played(rule, [[1.0, 1.0, 1.0, 9.0]] * 5)
    three = Ask(step=5, total=3 * SHARE, workers=(0, 1, 3))
    assert rule.plan(three).wait_for == 2
    rule.observe(
        StepRecord(5, 0, 1, workers=(3, 0, 1), planned=(SHARE,) * 3, samples=(SHARE,) * 3, seconds=(9.0, 1.0, 1.0))
    )
    assert rule.plan(Ask(step=6, total=4 * SHARE, workers=(3, 0, 1, 8))).wait_for == 3


hostile = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 1e-300, math.inf, math.nan, -1.0]))
rows = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), hostile, hostile), min_size=3, max_size=3)


@given(st.lists(rows, max_size=8), st.sampled_from(["last", "smoothed", "elfving", "window", "general", "auto"]))
@settings(max_examples=examples(60), deadline=None)
def test_any_records_give_a_valid_plan(history: list[list[tuple[int, int, float, float]]], forecast: str) -> None:
    rule = Cutoff(forecast)
    for step, told in enumerate(history):
        planned, samples, seconds, unfinished = zip(*told)
        rule.observe(
            StepRecord(step, 0, 0, (0, 1, 2), planned, samples, seconds, unfinished_s=unfinished, round_s=seconds[0])
        )
    plan = rule.plan(ask(3, step=9))
    assert sum(plan.samples) == 3 * SHARE
    assert plan.wait_for in (None, 1, 2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"draws": 0},
        {"overhead_s": -1.0},
        {"overhead_s": math.inf},
        {"overhead_s": math.nan},
        {"static": 0.0},
        {"static": 1.5},
        {"forecast": "crystal ball"},
        {"forecast": 3},
        {"forecast": "last:x"},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not|unknown"):
        Cutoff(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_one", [LastValue, Smoothed, OrderStatistics, Window, General, Auto])
@pytest.mark.parametrize("saved_after", [0, 1, 15])
def test_a_rule_goes_on_from_its_saved_state_as_if_nothing_had_happened(
    make_one: Callable[[], Forecast], saved_after: int
) -> None:
    times = np.exp(0.4 * np.random.default_rng(3).standard_normal((30, 20))).tolist()
    whole, first, second = (Cutoff(make_one(), seed=1) for _ in range(3))
    before = played(first, times[:saved_after])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + played(second, times[saved_after:], first=saved_after) == played(whole, times)


def test_it_is_had_by_name_and_public() -> None:
    assert isinstance(make("cutoff"), Cutoff)
    assert paceline.research.Cutoff is Cutoff
    assert "auto" in repr(make("cutoff"))
    assert repr(Cutoff(static=0.9)) == "Cutoff(static=0.9)"
    assert make_forecast("elfving").name == "Elfving"
