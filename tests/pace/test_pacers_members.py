"""Pacers under members that change: known by identity, newcomers from a prior, those that return remembered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pace_rig import play, record, slower

from paceline.pace import Adaptive, Ask, Epoch, Equal, Fixed, Joint, Pacer
from paceline.pace.forecast import Smoothed
from paceline.pace.forecasting import Followed
from paceline.records import StepRecord
from paceline.research.auto_forecast import AutoForecast as Auto
from paceline.research.cutoff import Cutoff
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.model import DeepModel, Shape
from paceline.research.forecasts import LastValue, OrderStatistics, Window
from paceline.research.general import General
from quick import examples


def deep() -> Deep:
    """A small model that always speaks, so that its columns are what is drawn from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Deep(DeepModel(Shape(lag=4, memory=8, context=4, state=2, summary=4, hidden=8)), always=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PACERS: dict[str, Callable[[], Pacer]] = {
    "equal": Equal,
    "fixed": lambda: Fixed([1, 0, 2.5]),
    "epoch": Epoch,
    "adaptive": Adaptive,
    "adaptive-bounded": lambda: Adaptive(every=3, minimum=[1, 0, 4], maximum=[500, 700, 900]),
    "cutoff-last": lambda: Cutoff("last"),
    "cutoff-smoothed": lambda: Cutoff("smoothed"),
    "cutoff-elfving": lambda: Cutoff("elfving"),
    "cutoff-auto": Cutoff,
    "cutoff-window": lambda: Cutoff("window"),
    "cutoff-deep": lambda: Cutoff(deep()),
    "cutoff-static": lambda: Cutoff(static=0.6),
    "joint-last": lambda: Joint("last"),
    "joint-smoothed": lambda: Joint("smoothed"),
    "joint-window": lambda: Joint("window"),
    "joint-deep": lambda: Joint(deep()),
    "joint-eager": lambda: Joint(least_gain=0.0),
}
each_pacer = pytest.mark.parametrize("name", PACERS)

TOTAL = 400
SAMPLE_S = {worker: 1e-3 * (1 + worker % 4) for worker in range(12)}
"""True seconds a sample of every machine there is."""


@dataclass(frozen=True)
class Stage:
    """Some steps: who was there when they were planned, who was left at the end of the last, and what went wrong."""

    planned_for: tuple[int, ...]
    survivors: tuple[int, ...]
    done: tuple[float, ...]
    """The part of its share that each survivor had done when another one was lost; all of it when nobody was."""
    stall: int
    """How many times slower than usual the first one was."""
    epoch: int
    total: int
    steps: int = 1


def an_order(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 11), min_size=low, max_size=high, unique=True).map(tuple)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    planned_for = draw(an_order(1, 5))
    lost = draw(st.sampled_from([0, 0, 0, 1, 2]))
    survivors = planned_for[min(lost, len(planned_for) - 1) :]
    part = st.floats(0, 1) if len(survivors) < len(planned_for) else st.just(1.0)
    return Stage(
        planned_for,
        survivors,
        tuple(draw(part) for _ in survivors),
        stall=draw(st.sampled_from([1, 1, 40])),
        epoch=draw(st.integers(0, 2)),
        total=draw(st.sampled_from([TOTAL, TOTAL, TOTAL, 7])),
        steps=draw(st.integers(1, 8)),
    )


def one_by_one(journey: list[Stage]) -> list[tuple[int, Stage]]:
    """A stage for each step, and its generation; whoever is lost is lost in a stage's last step."""
    told = []
    for number, stage in enumerate(sorted(journey, key=lambda stage: stage.epoch)):
        calm = replace(stage, survivors=stage.planned_for, done=(1.0,) * len(stage.planned_for))
        told += [(2 * number, calm)] * (stage.steps - 1)
        told.append((2 * number + (stage.survivors != stage.planned_for), stage))
    return told


journeys = st.lists(stages(), min_size=1, max_size=6).map(one_by_one)


def ask(step: int, workers: Sequence[int], *, total: int = TOTAL, epoch: int = 0, generation: int = 0) -> Ask:
    return Ask(step=step, total=total, workers=tuple(workers), epoch=epoch, generation=generation)


def travelled(pacer: Pacer, step: int, stage: Stage, generation: int = 0) -> str:
    """Plan a step and let it happen; the plan is returned as text, so that NaN equals NaN."""
    plan = pacer.plan(ask(step, stage.planned_for, total=stage.total, epoch=stage.epoch, generation=generation))
    assert len(plan.samples) == len(stage.planned_for)
    assert min(plan.samples) >= 0
    assert sum(plan.samples) >= stage.total
    if plan.deadline_s is None:
        assert sum(plan.samples) == stage.total
    else:
        assert 0 < plan.deadline_s < math.inf
    if plan.wait_for is not None:
        assert 1 <= plan.wait_for <= len(stage.planned_for) > 1
    if plan.forecast_s is not None:
        assert len(plan.forecast_s) == len(stage.planned_for)
    shares = dict(zip(stage.planned_for, plan.samples))
    done, seconds, unfinished = [], [], []
    for place, (worker, part) in enumerate(zip(stage.survivors, stage.done)):
        pace_s = SAMPLE_S[worker] * (stage.stall if place == 0 else 1)
        share = int(shares[worker] * part)
        in_time = share if plan.deadline_s is None else min(share, int(plan.deadline_s / pace_s))
        done.append(in_time)
        seconds.append(in_time * pace_s)
        unfinished.append(0.0 if in_time == shares[worker] else pace_s)
    pacer.observe(
        StepRecord(
            step=step,
            epoch=stage.epoch,
            generation=generation,
            workers=stage.survivors,
            planned=tuple(shares[worker] for worker in stage.survivors),
            samples=tuple(done),
            seconds=tuple(seconds),
            unfinished_s=tuple(unfinished),
            micro_batches=tuple(-(-count // 8) for count in done),
            deadline_s=plan.deadline_s,
            wait_for=plan.wait_for,
            wall_s=1.1 * max(seconds),
            round_s=0.01,
        )
    )
    return repr(plan)


@pytest.mark.slow
@each_pacer
@settings(max_examples=examples(25), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(journeys, st.integers(0, 30), an_order(1, 6))
def test_any_sequence_of_members_gives_valid_plans_and_a_newcomer_with_a_peers_state_plans_the_same(
    name: str, journey: list[tuple[int, Stage]], joins_after: int, asked_last: tuple[int, ...]
) -> None:
    pacer, newcomer = PACERS[name](), PACERS[name]()
    for step, (generation, stage) in enumerate(journey):
        first = travelled(pacer, step, stage, generation)
        if step > joins_after:
            assert travelled(newcomer, step, stage, generation) == first
        elif step == joins_after:
            newcomer.load_state_dict(json.loads(json.dumps(pacer.state_dict())))
    if len(journey) <= joins_after:
        newcomer.load_state_dict(json.loads(json.dumps(pacer.state_dict())))
    question = ask(99, asked_last, epoch=2)
    saved = json.dumps(pacer.state_dict())
    assert repr(newcomer.plan(question)) == repr(pacer.plan(question)) == repr(pacer.plan(question))
    assert json.dumps(pacer.state_dict()) == saved == json.dumps(newcomer.state_dict())


@each_pacer
def test_a_plan_follows_the_identity_and_not_the_rank(name: str) -> None:
    pacer = PACERS[name]()
    workers = (0, 5, 2)
    for step in range(12):
        stage = Stage(workers, workers, (1.0,) * 3, stall=1, epoch=step // 6, total=TOTAL)
        travelled(pacer, step, stage)
    straight = pacer.plan(ask(12, (0, 5, 2), epoch=2))
    turned = pacer.plan(ask(12, (2, 0, 5), epoch=2))
    assert straight.wait_for == turned.wait_for
    by_id = [dict(zip(order, plan.samples)) for order, plan in (((0, 5, 2), straight), ((2, 0, 5), turned))]
    assert all(abs(by_id[0][worker] - by_id[1][worker]) <= 1 for worker in workers)  # who has the odd one is free


@pytest.mark.parametrize("name", [name for name in PACERS if name not in ("fixed", "adaptive-bounded")])
def test_a_newcomer_is_neither_idle_nor_taken_for_the_fastest(name: str) -> None:
    pacer = PACERS[name]()
    for step in range(20):
        travelled(pacer, step, Stage((0, 1, 2), (0, 1, 2), (1.0,) * 3, stall=1, epoch=step // 10, total=TOTAL))
    plan = pacer.plan(ask(20, (0, 1, 2, 9), epoch=2))
    assert 0 < plan.samples[3] <= max(plan.samples[:3])


@each_pacer
def test_one_that_is_left_alone_does_everything(name: str) -> None:
    pacer = PACERS[name]()
    for step in range(6):
        travelled(pacer, step, Stage((4, 1, 2), (4, 1, 2), (1.0,) * 3, stall=1, epoch=0, total=TOTAL))
    for step, alone in enumerate((1, 1, 2, 4), start=6):
        plan = pacer.plan(ask(step, (alone,)))
        assert (plan.samples, plan.deadline_s, plan.wait_for) == ((TOTAL,), None, None)
        travelled(pacer, step, Stage((alone,), (alone,), (1.0,), stall=1, epoch=0, total=TOTAL))


def test_fixed_ratios_belong_to_identities() -> None:
    pacer = Fixed([1, 1, 4])
    assert pacer.plan(ask(0, (2, 0), total=50)).samples == (40, 10)
    assert pacer.plan(ask(0, (7, 1, 2), total=70)).samples == (20, 10, 40)  # 7 has the mean ratio, 2
    assert Fixed([0, 1]).plan(ask(0, (0,), total=9)).samples == (9,)


def test_bounds_belong_to_identities_and_one_beyond_the_list_has_the_loosest() -> None:
    pacer = Adaptive(minimum=[50, 10], maximum=[100, 300])
    assert pacer.plan(ask(0, (1, 0), total=400)).samples == (300, 100)
    assert pacer.plan(ask(0, (8, 0), total=400)).samples == (300, 100)


def test_maximums_give_way_when_so_many_left_that_they_cannot_hold_the_step() -> None:
    pacer = Adaptive(maximum=[100, 100, 300])
    with pytest.raises(ValueError, match="maximum is too small"):
        pacer.plan(ask(0, (0, 1)))  # nobody left: the settings are wrong
    pacer.observe(record(0, [100, 100, 200], [0.1, 0.1, 0.2]))
    assert pacer.plan(ask(1, (0, 1))).samples == (200, 200)
    assert pacer.plan(ask(1, (0, 2))).samples == (100, 300)
    assert Adaptive(maximum=[0, 9]).plan(ask(0, (1, 0), total=8)).samples == (8, 0)
    idle = Adaptive(maximum=[0, 400])
    idle.observe(record(0, [0, 400], [0.0, 0.4]))
    assert idle.plan(ask(1, (0,))).samples == (TOTAL,)


def test_survivors_of_a_large_fleet_are_dealt_by_their_speed_at_once() -> None:
    pacer = Adaptive()
    play(pacer, slower([1, 2, 4] + [1] * 9), total=1200, steps=12)
    assert pacer.plan(ask(12, (0, 1, 2), total=1400)).samples == pytest.approx((800, 400, 200), abs=24)


def test_a_newcomer_among_idle_workers_is_tried_at_once() -> None:
    """The median worker of this fleet sits out; a newcomer is not judged by that."""
    pacer = Adaptive()
    play(pacer, slower([1, 1000, 1000, 1000]), total=64, steps=12)
    assert pacer.plan(ask(12, (0, 1, 2, 3), total=64)).samples == (64, 0, 0, 0)
    assert pacer.plan(ask(12, (0, 1, 2, 3, 7), total=64)).samples == (63, 0, 0, 0, 1)


def test_a_newcomer_where_nobody_present_was_measured_starts_from_those_that_left() -> None:
    pacer = Adaptive()
    play(pacer, slower([1, 2, 3]), total=600, steps=6)
    pacer.observe(record(6, [0, 0], [0.0, 0.0], workers=(7, 8)))
    assert pacer.plan(ask(7, (0, 7), total=600)).samples == pytest.approx((400, 200), rel=0.1)


def test_epoch_remembers_one_that_left_before_the_epoch_was_over() -> None:
    pacer = Epoch()
    for step in range(4):
        pacer.observe(record(step, [30, 30, 30], [0.3, 0.3, 1.2], workers=(0, 1, 2)))
    pacer.observe(record(4, [45, 45], [0.45, 0.45], workers=(0, 1)))
    pacer.observe(record(5, [45, 45], [0.45, 0.45], workers=(0, 1), epoch=1))
    assert pacer.plan(ask(6, (2, 1, 0), total=90, epoch=1)).samples == (10, 40, 40)


@pytest.mark.parametrize("name", ["joint-last", "joint-smoothed", "joint-window", "joint-deep"])
def test_a_deadline_counts_on_one_that_returns_as_it_was(name: str) -> None:
    joint = PACERS[name]()
    assert isinstance(joint, Joint)
    for step in range(40):
        workers = (0, 1, 3) if step < 30 else (0, 1)
        travelled(joint, step, Stage(workers, workers, (1.0,) * len(workers), stall=1, epoch=0, total=TOTAL))
    joint._gain.on = True
    back = joint.plan(ask(40, (0, 1, 3)))
    assert back.deadline_s is not None
    assert back.samples[2] < 0.5 * back.samples[0]  # a quarter of the speed
    assert back.forecast_s is not None
    assert not math.isnan(back.forecast_s[2])


# -- forecasts -----------------------------------------------------------------------------------------------------

FORECASTS = [LastValue, Smoothed, Window, General, Auto, deep]


def believed(followed: Followed, workers: tuple[int, ...]) -> np.ndarray:
    drawn = followed.draws(workers, 400, np.random.default_rng(1))
    assert drawn is not None
    return drawn.mean(axis=0)


def tell(followed: Followed, workers: tuple[int, ...], seconds: list[float], late: list[bool] | None = None) -> None:
    mask = np.array([False] * len(workers) if late is None else late)
    followed.observe(workers, np.array(seconds), mask)


@pytest.mark.parametrize("make", FORECASTS)
def test_one_that_returns_starts_from_what_was_typical_of_it(make: Callable[[], Smoothed]) -> None:
    followed = Followed(make())
    for _ in range(6):
        tell(followed, (0, 1, 2), [1.0, 1.0, 5.0])
    for _ in range(6):
        tell(followed, (0, 1), [1.0, 1.0])
    assert believed(followed, (2, 0)) == pytest.approx([5.0, 1.0], rel=0.35)
    tell(followed, (0, 1, 2), [1.0, 1.0, 0.0], [False, False, True])
    assert believed(followed, (2, 0)) == pytest.approx([5.0, 1.0], rel=0.35)


@pytest.mark.parametrize("make", FORECASTS)
def test_a_newcomers_first_two_times_replace_what_was_believed_of_it(make: Callable[[], Smoothed]) -> None:
    followed = Followed(make())
    for _ in range(6):
        tell(followed, (0, 1), [1.0, 1.0])
    tell(followed, (0, 1, 4), [1.0, 1.0, 90.0])  # warming up
    tell(followed, (0, 1, 4), [1.0, 1.0, 3.0])
    assert believed(followed, (4,)) == pytest.approx([3.0], rel=0.25)
    assert followed.typical((4, 0)).tolist() == [3.0, 1.0]


def test_the_others_keep_what_was_learned_of_them_when_one_leaves() -> None:
    smoothed = Smoothed()
    followed = Followed(smoothed)
    rng = np.random.default_rng(0)
    for _ in range(60):
        tell(followed, (0, 1, 2), np.exp([0.01, 0.5, 0.1] * rng.standard_normal(3)).tolist())
    spread = dict(zip((0, 1, 2), smoothed.state_dict()["variance"]))
    tell(followed, (2, 1), [1.0, 1.0])
    left = smoothed.state_dict()["variance"]
    assert left[1] > 0.5 * spread[1]
    assert left[0] < 0.2 * left[1]


@pytest.mark.parametrize("make", [LastValue, Smoothed, Window, OrderStatistics, General, Auto, deep])
def test_rearranging_before_anything_was_seen_does_nothing(make: Callable[[], Smoothed]) -> None:
    forecast = make()
    forecast.rearrange([0, -1], np.array([1.0, 1.0]))
    with pytest.raises(ValueError, match="nothing was observed"):
        forecast.draw(2, np.random.default_rng(0))


def test_a_round_that_held_the_forming_of_new_members_says_nothing_about_rounds() -> None:
    rule = Cutoff("last")
    for step in range(5):
        rule.observe(StepRecord(step, 0, 1, (0, 1), (8, 8), (8, 8), (1.0, 1.0), round_s=0.01))
    rule.observe(StepRecord(5, 0, 2, (0, 1), (8, 8), (8, 8), (1.0, 1.0), round_s=9.0))
    assert rule.state_dict()["round_s"] == pytest.approx(0.01)
    rule.observe(StepRecord(6, 0, 2, (0, 1), (8, 8), (8, 8), (1.0, 1.0), round_s=0.02))
    assert rule.state_dict()["round_s"] > 0.01


def test_one_that_had_done_nothing_when_another_was_lost_is_not_called_slow() -> None:
    rule = Cutoff("smoothed")
    for step in range(8):
        rule.observe(StepRecord(step, 0, 1, (0, 1, 2), (8, 8, 8), (8, 8, 8), (1.0, 1.0, 1.0)))
    before = believed(rule._followed, (0, 1))
    rule.observe(StepRecord(8, 0, 2, (0, 1), (8, 8), (8, 0), (9.0, 0.0), unfinished_s=(0.0, 8.0)))
    after = believed(rule._followed, (0, 1))
    assert after[0] > before[0]
    assert after[1] == pytest.approx(before[1], rel=0.05)


def test_a_step_that_lost_somebody_does_not_judge_deadlines() -> None:
    joint = Joint()
    for step in range(8):
        joint.observe(StepRecord(step, 0, 1, (0, 1, 2), (8, 8, 8), (8, 8, 8), (1.0, 1.0, 1.0), wall_s=1.1))
    before = joint.gain
    joint.observe(StepRecord(8, 0, 2, (0, 1), (8, 8), (8, 1), (1.0, 0.9), wall_s=4.0))
    assert joint.gain == before
    joint.observe(StepRecord(9, 0, 2, (0, 1), (8, 8), (8, 8), (1.0, 1.9), wall_s=2.0))
    assert joint.gain != before
