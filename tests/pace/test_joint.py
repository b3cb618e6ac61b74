"""Shares and deadline together: the plan, when there is none, and what no record can do to it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pace_rig import expected_count, record

import paceline
from paceline.pace import Adaptive, Ask, Joint, make
from paceline.pace.joint import RANGE, Availability, solve
from paceline.records import Plan, StepRecord
from quick import examples

TOTAL = 400
FOUR = (0, 1, 2, 3)


def ask(step: int, *, total: int = TOTAL, workers: tuple[int, ...] = FOUR, last: bool = False, unit: int = 1) -> Ask:
    return Ask(step=step, total=total, workers=workers, last=last, unit=unit)


def work(plan: Plan, pace: list[float], *, stuck: tuple[int, ...] = (), workers: tuple[int, ...] = FOUR) -> StepRecord:
    """What a fleet with these seconds a sample makes of a plan; stuck workers finish nothing."""
    if plan.deadline_s is None:
        seconds = [n * r * (20.0 if i in stuck else 1.0) for i, (n, r) in enumerate(zip(plan.samples, pace))]
        return replace(record(plan.step, plan.samples, seconds, workers=workers), wall_s=max(seconds))
    end = plan.deadline_s
    done = [0 if i in stuck else min(n, int(end / r)) for i, (n, r) in enumerate(zip(plan.samples, pace))]
    return StepRecord(
        step=plan.step,
        epoch=0,
        generation=0,
        workers=workers,
        planned=plan.samples,
        samples=tuple(done),
        seconds=tuple(n * r for n, r in zip(done, pace)),
        unfinished_s=tuple(end if i in stuck else 0.0 for i in range(len(pace))),
        micro_batches=tuple(-(-n // 16) for n in done),
        deadline_s=end,
        wall_s=end,
    )


def stalling(joint: Joint, *, steps: int = 40, first: int = 0, every: int = 5) -> list[StepRecord]:
    """Every fifth step one of four like workers stalls."""
    records = []
    for step in range(first, first + steps):
        stuck = (step // every % 4,) if step % every == every - 1 else ()
        records.append(work(joint.plan(ask(step)), [0.01] * 4, stuck=stuck))
        joint.observe(records[-1])
    return records


def test_on_a_calm_fleet_it_is_adaptive_to_the_letter() -> None:
    noise = np.random.default_rng(0)
    joint, adaptive = Joint(), Adaptive()
    for step in range(60):
        plan = joint.plan(ask(step))
        assert plan == adaptive.plan(ask(step))
        done = work(plan, (np.array([0.01, 0.01, 0.02, 0.04]) * np.exp(0.005 * noise.standard_normal(4))).tolist())
        joint.observe(done)
        adaptive.observe(done)
    assert joint.gain < 0.01


def test_stalls_turn_the_deadline_on_and_calm_turns_it_off() -> None:
    joint = Joint()
    records = stalling(joint)
    first = next(done.step for done in records if done.deadline_s is not None)
    assert first <= 10
    assert all(done.deadline_s is not None for done in records[first:])
    for step in range(40, 400):
        joint.observe(work(joint.plan(ask(step)), [0.01, 0.01, 0.01, 0.01]))
    assert joint.plan(ask(400)).deadline_s is None


def test_more_is_dealt_than_needed_and_the_expected_count_is_the_total() -> None:
    joint = Joint()
    stalling(joint)
    plan = joint.plan(ask(40))
    assert plan.deadline_s is not None
    assert sum(plan.samples) > 1.2 * TOTAL
    drawn = joint._draws(FOUR)
    assert drawn is not None
    at_work = joint._at_work.factors(np.array([False, False, False, True]))  # worker 3 was stuck in step 39
    count = expected_count(plan.deadline_s, drawn, np.array(plan.samples, dtype=float), at_work=at_work)
    assert count == pytest.approx(TOTAL, rel=1e-6)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.lists(st.floats(0.002, 0.2), min_size=2, max_size=5),
    st.integers(50, 5000),
    st.integers(0, 2**16),
)
def test_the_plan_is_that_of_brute_force(pace: list[float], total: int, seed: int) -> None:
    """Of all deadlines on a fine grid, with the shares dealt, none is expected to count closer to the total."""
    workers = tuple(range(len(pace)))
    joint = Joint(seed=seed)
    noise = np.random.default_rng(seed)
    for step in range(30):
        now = np.array(pace) * np.where(noise.random(len(pace)) < 0.1, 15.0, 1.0) * noise.lognormal(0, 0.1, len(pace))
        joint.observe(work(joint.plan(ask(step, total=total, workers=workers)), now.tolist(), workers=workers))
    plan = joint.plan(ask(30, total=total, workers=workers))
    if plan.deadline_s is None:
        return
    drawn = joint._draws(workers)
    assert drawn is not None
    at_work = joint._at_work.factors(joint._ledger.look_up("stuck", workers) > 0)

    def miss(deadline_s: float) -> float:
        rows = [sum(a * min(n, deadline_s / r) for a, n, r in zip(at_work, plan.samples, row)) for row in drawn]
        return abs(sum(rows) / len(rows) - total)

    best = min(miss(plan.deadline_s * factor) for factor in np.linspace(0.5, 2.0, 151))
    assert miss(plan.deadline_s) <= best + 1e-6 * total


def test_the_count_is_near_the_total_step_by_step() -> None:
    noise, joint = np.random.default_rng(1), Joint()
    counts = []
    for step in range(200):
        pace = np.array([0.01, 0.01, 0.02, 0.04]) * noise.lognormal(0, 0.2, 4)
        done = work(joint.plan(ask(step)), pace.tolist())
        counts.append(done.total)
        joint.observe(done)
    assert done.deadline_s is not None
    assert np.mean(counts[50:]) == pytest.approx(TOTAL, rel=0.02)
    assert np.std(counts[50:]) < 0.15 * TOTAL


def test_a_stuck_worker_is_dealt_a_normal_share_and_not_counted_on() -> None:
    joint = Joint()
    stalling(joint)
    free = joint.plan(ask(40))
    for step in range(40, 60):
        joint.observe(work(joint.plan(ask(step)), [0.01] * 4, stuck=(2,)))
    plan = joint.plan(ask(60))
    assert free.deadline_s is not None
    assert plan.deadline_s is not None
    assert plan.samples[2] >= 0.9 * plan.samples[1]
    # Three workers do what four did.
    assert plan.deadline_s == pytest.approx(TOTAL / 3 * 0.01, rel=0.1)


def test_a_round_in_which_nobody_finished_lengthens_the_next_deadline_and_again() -> None:
    joint = Joint()
    stalling(joint)
    deadlines = []
    for step in range(40, 44):
        plan = joint.plan(ask(step))
        assert plan.deadline_s is not None
        deadlines.append(plan.deadline_s)
        joint.observe(work(plan, [0.01] * 4, stuck=FOUR))
    assert all(later > 1.9 * sooner for sooner, later in pairwise(deadlines))
    joint.observe(work(joint.plan(ask(44)), [0.01] * 4))
    after = joint.plan(ask(45)).deadline_s
    assert after is not None
    assert after < deadlines[-1] / 2


def test_the_last_step_of_an_epoch_deals_just_what_is_left_by_speed_with_time_for_those_at_work() -> None:
    joint = Joint()
    stalling(joint)
    joint.observe(work(joint.plan(ask(40)), [0.01] * 4, stuck=(1,)))
    plan = joint.plan(ask(41, total=90, last=True))
    assert sum(plan.samples) == 90
    assert max(plan.samples) - min(plan.samples) <= 4, "who is stuck now may be back, and what it leaves is dealt again"
    assert plan.deadline_s is not None
    assert 23 * 0.01 < plan.deadline_s < 1.3 * 23 * 0.01
    assert sum(joint.plan(ask(41, total=1, last=True)).samples) == 1


def test_adaptive_inside_learns_from_finished_work_alone() -> None:
    joint = Joint()
    stalling(joint)
    for step in range(40, 80):
        joint.observe(work(joint.plan(ask(step)), [0.01, 0.01, 0.02, 0.02], stuck=(step % 2,)))
    shares = joint.adaptive.plan(ask(80)).samples
    assert shares == pytest.approx((133, 133, 67, 67), abs=12)


def test_workers_come_and_go_and_a_newcomer_starts_from_the_median() -> None:
    joint = Joint()
    stalling(joint)
    plan = joint.plan(ask(40, workers=(3, 1, 9)))
    assert plan.deadline_s is not None
    assert plan.samples[2] == pytest.approx(plan.samples[1], rel=0.35)
    assert math.isnan(plan.forecast_s[2])  # type: ignore[index]
    joint.observe(work(plan, [0.01, 0.01, 0.03], workers=(3, 1, 9)))
    assert joint.plan(ask(41, workers=(9,))).samples == (TOTAL,)


def test_one_worker_has_no_deadline() -> None:
    joint = Joint()
    for step in range(20):
        plan = joint.plan(ask(step, workers=(0,)))
        assert (plan.samples, plan.deadline_s) == ((TOTAL,), None)
        joint.observe(work(plan, [0.01 * (50 if step % 4 == 0 else 1)], workers=(0,)))


def test_bounds_and_units_hold_under_a_deadline() -> None:
    joint = Joint(adaptive=Adaptive(maximum=[90, 400, 400, 400], minimum=5))
    stalling(joint)
    plan = joint.plan(ask(40, unit=8))
    assert plan.deadline_s is not None
    assert plan.samples[0] <= 90
    assert all(n % 8 == 0 for n in plan.samples[1:])
    assert min(plan.samples) >= 5


hostile = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 1e-300, math.inf, math.nan, -1.0]))
counts = st.integers(0, 10**6)
rows = st.lists(st.tuples(counts, counts, hostile, hostile), min_size=3, max_size=3)
members = st.permutations([0, 1, 2, 5, 9]).map(lambda order: tuple(order[:3]))
histories = st.lists(st.tuples(members, rows, st.one_of(st.none(), hostile), hostile), max_size=12)


def hostile_record(
    step: int, told: tuple[tuple[int, ...], list[tuple[int, int, float, float]], float | None, float]
) -> StepRecord:
    workers, work_rows, deadline_s, wall_s = told
    planned, samples, seconds, unfinished = zip(*work_rows)
    return StepRecord(
        step,
        0,
        0,
        workers,
        planned,
        samples,
        seconds,
        unfinished_s=unfinished,
        micro_batches=samples,
        deadline_s=deadline_s,
        wall_s=wall_s,
    )


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(histories, members, st.integers(0, 10**6), st.integers(1, 64), st.booleans(), st.booleans())
def test_any_records_give_a_valid_plan_with_a_finite_deadline(
    history: list, workers: tuple[int, ...], total: int, unit: int, last: bool, forced: bool
) -> None:
    joint = Joint()
    for step, told in enumerate(history):
        joint.observe(hostile_record(step, told))
    joint._gain.on = joint._gain.on or forced
    plan = joint.plan(Ask(step=99, total=total, workers=workers, unit=min(unit, max(1, total)), last=last))
    assert len(plan.samples) == 3
    assert sum(plan.samples) >= total
    assert min(plan.samples) >= 0
    if plan.deadline_s is None or last:
        assert sum(plan.samples) == total
    if plan.deadline_s is not None:
        assert 0 < plan.deadline_s < math.inf


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(histories, histories)
def test_a_pacer_resumed_from_json_plans_the_same_and_planning_changes_nothing(before: list, after: list) -> None:
    joint, resumed = Joint(), Joint()
    for step, told in enumerate(before):
        joint.observe(hostile_record(step, told))
    saved = json.dumps(joint.state_dict())
    resumed.load_state_dict(json.loads(saved))
    question = ask(20, workers=(0, 1, 2))
    assert repr(joint.plan(question)) == repr(resumed.plan(question)) == repr(joint.plan(question))
    assert json.dumps(joint.state_dict()) == saved
    for step, told in enumerate(after, start=30):
        for pacer in (joint, resumed):
            pacer.observe(hostile_record(step, told))
    assert repr(joint.plan(question)) == repr(resumed.plan(question))


def test_a_long_run_resumed_in_the_middle_goes_on_the_same() -> None:
    whole, first, second = Joint(), Joint(), Joint()
    stalling(whole, steps=60)
    stalling(first, steps=31)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    stalling(second, steps=29, first=31)
    assert second.plan(ask(60)) == whole.plan(ask(60))


@pytest.mark.parametrize("forecast", ["smoothed", "last", "window", "general", "auto"])
def test_any_forecast_of_workers_will_do(forecast: str) -> None:
    joint = Joint(forecast)
    records = stalling(joint, steps=80)
    assert np.mean([done.total for done in records[30:]]) == pytest.approx(TOTAL, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"forecast": "elfving"}, "tells no worker from another"),
        ({"forecast": "tea leaves"}, "unknown forecast"),
        ({"least_gain": -0.1}, "least_gain"),
        ({"least_gain": math.nan}, "least_gain"),
        ({"least_count": 1.1}, "least_count"),
        ({"least_count": math.nan}, "least_count"),
        ({"draws": 0}, "at least one draw"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Joint(**wrong)  # type: ignore[arg-type]


def test_it_is_had_by_name_and_public() -> None:
    assert isinstance(make("joint"), Joint)
    assert paceline.Joint is Joint
    begins = "Joint('window', least_gain=0.01, least_count=0.7, adaptive=Adaptive("
    assert repr(Joint("window", seed=3)).startswith(begins)


DRAWS = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(0.01, 100))


def brute_force(draws: np.ndarray, shares: list[float], total: float, at_work: list[float]) -> float:
    """Bisection on the sum written out."""

    def count(deadline_s: float) -> float:
        rows = [[min(n, deadline_s / r) for n, r in zip(shares, row)] for row in draws.tolist()]
        return sum(a * sum(row[i] for row in rows) / len(rows) for i, a in enumerate(at_work))

    low, high = 0.0, 1.0
    while count(high) < total:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) < total else (low, middle)
    return high


@given(DRAWS, st.data())
def test_the_deadline_is_the_one_of_brute_force(draws: np.ndarray, data: st.DataObject) -> None:
    workers = draws.shape[1]
    shares = data.draw(st.lists(st.integers(1, 1000), min_size=workers, max_size=workers))
    at_work = data.draw(st.lists(st.floats(0.1, 1.0), min_size=workers, max_size=workers))
    possible = sum(a * n for a, n in zip(at_work, shares))
    total = data.draw(st.integers(1, max(1, int(0.95 * possible))))
    if total > 0.95 * possible:
        return
    most = np.array(shares, dtype=float)
    found = solve(draws, total, most=most, at_work=np.array(at_work))
    assert found == pytest.approx(brute_force(draws, shares, total, at_work), rel=1e-6)
    assert expected_count(found, draws, most, at_work=np.array(at_work)) == pytest.approx(total, rel=1e-6)


def test_two_workers_by_hand() -> None:
    # Speeds 1 and 1/2: 30 samples in 20 s. With 10 at most for the first, the second needs 40 s for its 20.
    draws = np.array([[1.0, 2.0]])
    assert solve(draws, 30, most=np.array([99.0, 99.0])) == pytest.approx(20.0)
    assert solve(draws, 30, most=np.array([10.0, 99.0])) == pytest.approx(40.0)


def test_where_shares_are_too_small_the_deadline_is_when_all_are_done() -> None:
    assert solve(np.array([[1.0, 2.0]]), 30, most=np.array([5.0, 5.0])) == pytest.approx(10.0)


def test_a_worker_at_work_half_of_its_time_counts_half() -> None:
    draws = np.array([[1.0, 1.0]])
    assert solve(draws, 30, most=np.array([99.0, 99.0]), at_work=np.array([1.0, 0.5])) == pytest.approx(20.0)


def test_a_worker_that_is_sometimes_slow_counts_its_mean_speed() -> None:
    draws = np.array([[1.0, 1.0], [1.0, 4.0]])
    assert solve(draws, 65, most=np.array([99.0, 99.0])) == pytest.approx(65 / (1 + (1 + 1 / 4) / 2))


def test_what_was_counted_over_what_was_expected_is_learned_for_each_group() -> None:
    at_work = Availability()
    stuck = np.array([False, False, True])
    for _ in range(200):
        at_work.observe(np.array([9.0, 9.0, 2.0]), np.array([10.0, 10.0, 10.0]), stuck)
    assert at_work.working == pytest.approx(0.9, abs=0.001)
    assert at_work.stuck == pytest.approx(0.2, abs=0.001)
    assert at_work.factors(stuck).tolist() == [at_work.working, at_work.working, at_work.stuck]


def test_a_group_without_members_keeps_what_it_knows() -> None:
    at_work = Availability()
    at_work.observe(np.array([5.0, 0.0]), np.array([5.0, 5.0]), np.array([False, True]))
    before = at_work.stuck
    for _ in range(100):
        at_work.observe(np.array([5.0, 5.0]), np.array([5.0, 5.0]), np.array([False, False]))
    assert at_work.stuck == before


def test_it_stays_in_bounds_whatever_is_said() -> None:
    at_work = Availability()
    for counted in (0.0, 1e12):
        for _ in range(300):
            at_work.observe(np.array([counted]), np.array([1.0]), np.array([False]))
        assert RANGE[0] <= at_work.working <= RANGE[1]
    at_work.observe(np.array([3.0]), np.array([0.0]), np.array([False]))
    assert np.isfinite(at_work.working)


def test_the_state_survives_json() -> None:
    one, other = Availability(), Availability()
    one.observe(np.array([3.0, 0.0]), np.array([5.0, 4.0]), np.array([False, True]))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (one.working, one.stuck) == (other.working, other.stuck)
