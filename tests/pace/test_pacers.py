"""What holds for every pacer, and what equal, fixed and per-epoch shares do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace_rig import machines, play, record, slower

import paceline.pace as pace
from paceline.pace import Adaptive, Ask, Epoch, Equal, Fixed, Pacer
from quick import examples

PACERS: list[Callable[[], Pacer]] = [
    Equal,
    lambda: Fixed([1, 0, 2.5]),
    Epoch,
    Adaptive,
    lambda: Adaptive(every=3, dead_band=0.0, minimum=1),
]
names = ["equal", "fixed", "epoch", "adaptive", "adaptive-every-3"]
each_pacer = pytest.mark.parametrize("make", PACERS, ids=names)

seconds = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 1e-300, math.inf, math.nan, -1.0]))
worker_steps = st.lists(st.tuples(st.integers(0, 10**6), seconds), min_size=3, max_size=3)
members = st.permutations([0, 1, 2, 5, 9]).map(lambda order: tuple(order[:3]))
histories = st.lists(st.tuples(members, st.integers(0, 3), worker_steps), max_size=15)
asks = st.builds(
    Ask,
    step=st.integers(0, 40),
    total=st.integers(0, 10**6),
    workers=members,
    epoch=st.integers(0, 4),
    unit=st.integers(1, 64),
    minimum=st.integers(0, 20),
)


def told(pacer: Pacer, history: list[tuple[tuple[int, ...], int, list[tuple[int, float]]]]) -> Pacer:
    for step, (workers, epoch, rows) in enumerate(history):
        pacer.observe(record(step, [n for n, _ in rows], [t for _, t in rows], workers=workers, epoch=epoch))
    return pacer


@each_pacer
@given(histories, asks)
def test_any_records_give_a_valid_plan(make: Callable[[], Pacer], history, ask: Ask) -> None:  # type: ignore[no-untyped-def]
    plan = told(make(), history).plan(ask)
    assert sum(plan.samples) == ask.total
    assert len(plan.samples) == len(ask.workers)
    assert min(plan.samples) >= 0
    assert sum(n % ask.unit != 0 for n in plan.samples) <= 1
    assert (plan.step, plan.generation, plan.deadline_s) == (ask.step, ask.generation, None)
    if 3 * (ask.minimum + ask.unit) <= ask.total:
        assert min(plan.samples) >= ask.minimum
    assert plan.forecast_s is None or all(s >= 0 or math.isnan(s) for s in plan.forecast_s)


@each_pacer
@given(histories, asks, st.integers(0, 10))
def test_a_maximum_is_never_exceeded(make: Callable[[], Pacer], history, ask: Ask, spare: int) -> None:  # type: ignore[no-untyped-def]
    cap = ask.unit * (ask.total // ask.unit // 2 + 1 + spare)  # two of them hold the total in whole units
    capped = Ask(step=ask.step, total=ask.total, workers=ask.workers, unit=ask.unit, maximum=(cap, 2 * cap, cap))
    plan = told(make(), history).plan(capped)
    assert sum(plan.samples) == ask.total
    assert all(n <= m for n, m in zip(plan.samples, (cap, 2 * cap, cap)))


@each_pacer
@settings(max_examples=examples(40))
@given(histories, histories, asks)
def test_a_pacer_resumed_from_json_plans_the_same(make: Callable[[], Pacer], before, after, ask: Ask) -> None:  # type: ignore[no-untyped-def]
    pacer, resumed = told(make(), before), make()
    resumed.load_state_dict(json.loads(json.dumps(pacer.state_dict())))
    assert repr(resumed.plan(ask)) == repr(pacer.plan(ask))
    assert repr(told(resumed, after).plan(ask)) == repr(told(pacer, after).plan(ask))


@each_pacer
@given(histories, asks)
def test_planning_changes_nothing(make: Callable[[], Pacer], history, ask: Ask) -> None:  # type: ignore[no-untyped-def]
    pacer = told(make(), history)
    before = json.dumps(pacer.state_dict())
    first = repr(pacer.plan(ask))
    assert repr(pacer.plan(ask)) == first
    assert json.dumps(pacer.state_dict()) == before


@each_pacer
def test_every_pacer_forecasts_its_own_plan_once_it_has_seen_a_step(make: Callable[[], Pacer]) -> None:
    pacer = make()
    assert pacer.plan(Ask(step=0, total=90, workers=(0, 1, 2))).forecast_s is None
    for step in range(3):
        pacer.observe(record(step, [30, 30, 30], [0.3, 0.3, 0.9]))
    plan = pacer.plan(Ask(step=3, total=90, workers=(0, 1, 2)))
    assert plan.forecast_s is not None
    expected = np.array(plan.samples) * np.array([0.01, 0.01, 0.03])
    assert plan.forecast_s == pytest.approx(expected, rel=0.15)


def test_equal_shares_differ_by_one_at_most() -> None:
    assert Equal().plan(Ask(step=0, total=256, workers=tuple(range(10)))).samples == (26,) * 6 + (25,) * 4
    assert Equal().plan(Ask(step=0, total=2, workers=(0, 1, 2))).samples == (1, 1, 0)


def test_fixed_ratios_are_ratios_of_work() -> None:
    run = play(Fixed([1, 1, 2]), slower([1, 9, 3]), total=64, steps=3)
    assert [plan.samples for plan in run.plans] == [(16, 16, 32)] * 3


@pytest.mark.parametrize("ratios", [[], [0, 0], [1, -1], [1, math.nan], [1, math.inf], ["x"], 3, None])
def test_ratios_that_make_no_sense_are_refused(ratios: object) -> None:
    with pytest.raises(ValueError, match="ratios must be"):
        Fixed(ratios)  # type: ignore[arg-type]


def test_ratios_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ratios for 3 workers"):
        Fixed([1, 2]).check(3)
    Fixed([1, 2]).check(2)


@each_pacer
def test_a_fleet_of_nobody_is_refused(make: Callable[[], Pacer]) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        make().check(0)


def test_epoch_keeps_its_shares_within_an_epoch_and_then_follows_p0() -> None:
    run = play(Epoch(), slower([1, 1, 2, 4]), total=275, steps=30, epoch_of=lambda step: step // 10)
    assert np.all(run.shares[:10] == run.shares[0])
    assert run.shares[0].max() - run.shares[0].min() <= 1
    assert np.all(run.shares[10:] == [100, 100, 50, 25])


def test_epoch_leaves_out_steps_in_which_a_worker_looked_for_its_size() -> None:
    pacer = Epoch()
    for step in range(6):
        looks = step < 4
        pacer.observe(record(step, [32, 32], [1.0, 9.0 if looks else 1.0], sizes=[8, 0 if looks else 16]))
    plan = pacer.plan(Ask(step=6, total=64, workers=(0, 1), epoch=1))
    assert plan.samples == (32, 32)


def test_epoch_converges_to_p0s_fixed_point_with_fixed_costs() -> None:
    """b_i = (tau - c_i) / m_i with tau = (B + sum c_i/m_i) / sum(1/m_i) (derived from P0)."""
    c, m, total = np.array([0.0, 0.1]), np.array([1e-3, 1e-3]), 512
    run = play(Epoch(), lambda step: (c, m), total=total, steps=200, epoch_of=lambda step: step // 10)
    tau = (total + (c / m).sum()) / (1 / m).sum()
    assert run.shares[-1].tolist() == np.rint((tau - c) / m).tolist() == [306, 206]


@pytest.mark.parametrize(
    ("fixed_s", "step_s", "shares"),
    [((0.10, 0.12), 0.142, [42, 22]), ((0.05, 0.06, 0.05, 0.06), 0.071, [21, 11, 21, 11])],
)
def test_epoch_carries_real_shares_so_small_corrections_add_up(
    fixed_s: tuple[float, ...], step_s: float, shares: list[int]
) -> None:
    """Derived again from whole samples they stop at 0.144 and 0.073 s; equal shares take 0.152 and 0.076 s."""
    fleet = machines(fixed_s, [1e-3] * len(fixed_s))
    run = play(Epoch(), fleet, total=64, steps=600, epoch_of=lambda step: step // 10)
    assert run.wall_s[-1] == pytest.approx(step_s)
    assert run.shares[-1].tolist() == shares


def test_real_shares_are_carried_through_whole_units_too() -> None:
    fleet = machines([0.10, 0.12], [1e-3] * 2)
    run = play(Epoch(), fleet, total=128, steps=600, epoch_of=lambda step: step // 10, unit=2)
    assert run.wall_s[-1] == pytest.approx(run.best_s[-1])


def settled(pacer: Epoch, *, steps: int = 600, first: int = 0) -> list[int]:
    fleet = machines([0.10, 0.12], [1e-3] * 2)
    run = play(pacer, fleet, total=64, steps=steps, first=first, epoch_of=lambda step: step // 10)
    return run.shares[-1].tolist()  # type: ignore[no-any-return]


def test_the_real_share_is_saved_and_goes_on() -> None:
    whole, before, after = Epoch(), Epoch(), Epoch()
    settled(whole, steps=70)
    settled(before, steps=33)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    settled(after, steps=37, first=33)
    weights = [np.array(pacer.state_dict()["speeds"]["columns"]["speed"]) for pacer in (whole, after)]
    assert weights[0] / weights[0].sum() == pytest.approx(weights[1] / weights[1].sum(), rel=1e-3)
    assert settled(after, first=70) == [42, 22]


def test_a_checkpoint_with_whole_samples_alone_goes_on_to_the_fixed_point() -> None:
    """As versions saved it that derived shares from whole samples: stalled at 40 and 24."""
    old = Epoch()
    state = old.state_dict()
    state["epoch"] = 5
    columns = {
        "samples": [400.0, 240.0],
        "seconds": [1.40, 1.44],
        "steps": [60.0, 60.0],
        "speed": [40 / 0.14, 24 / 0.144],
    }
    state["speeds"] = {"workers": [0, 1], "present": 2, "columns": columns}
    old.load_state_dict(state)
    assert old.plan(Ask(step=60, total=64, workers=(0, 1), epoch=6)).samples == (40, 24)
    assert settled(old, first=60) == [42, 22]


def test_shares_that_a_bound_set_are_measured_as_they_were_done() -> None:
    """Worker 0 may take 10 at most: it is as fast as it was seen to be, not as its real share would have it."""
    pacer = Epoch()
    for step in range(30):
        ask = Ask(step=step, total=60, workers=(0, 1, 2), epoch=step // 5, maximum=(10, 60, 60))
        samples = pacer.plan(ask).samples
        assert samples[0] == 10
        pacer.observe(record(step, samples, np.array(samples) * [1e-3, 2e-3, 2e-3], epoch=step // 5))
    assert pacer.plan(Ask(step=30, total=60, workers=(0, 1, 2), epoch=6)).samples == (30, 15, 15)


def test_the_real_share_survives_a_change_of_members() -> None:
    pacer, costs = Epoch(), {0: 0.10, 1: 0.12, 5: 0.10}

    def run(first: int, steps: int, *workers: int) -> list[int]:
        fleet = machines([costs[worker] for worker in workers], [1e-3] * len(workers))
        played = play(
            pacer, fleet, total=64, steps=steps, first=first, epoch_of=lambda step: step // 10, workers=workers
        )
        return played.shares[-1].tolist()  # type: ignore[no-any-return]

    run(0, 305, 0, 1)
    assert run(305, 600, 1, 5, 0) == [8, 28, 28]
    assert run(905, 600, 5, 1) == [42, 22]


def test_epoch_ignores_the_first_step_once_there_is_another() -> None:
    pacer = Epoch()
    pacer.observe(record(0, [50, 50], [60.0, 0.5]))
    for step in range(1, 5):
        pacer.observe(record(step, [50, 50], [0.5, 0.5]))
    assert pacer.plan(Ask(step=5, total=100, workers=(0, 1), epoch=1)).samples == (50, 50)


def test_epoch_counts_a_new_worker_as_the_median() -> None:
    pacer = Epoch()
    for step in range(4):
        pacer.observe(record(step, [30, 30, 30], [0.1, 0.2, 0.4]))
    plan = pacer.plan(Ask(step=4, total=90, workers=(0, 1, 2, 7), epoch=1))
    assert plan.samples == (40, 20, 10, 20)


@pytest.mark.parametrize(
    ("text", "kind"), [("equal", Equal), ("epoch", Epoch), ("adaptive", Adaptive), ("fixed:1,1,2", Fixed)]
)
def test_pacers_are_made_by_name(text: str, kind: type) -> None:
    made = pace.make(text)
    assert isinstance(made, kind)
    assert isinstance(made, Pacer)
    assert made.name == text.partition(":")[0]


def test_a_pacer_is_its_own_name() -> None:
    pacer = Adaptive(every=4)
    assert pace.make(pacer) is pacer
    assert "every=4" in repr(pacer)


@pytest.mark.parametrize("unknown", ["fast", "", "Adaptive", "equal:1", None, 3, Adaptive, [1, 2]])
def test_an_unknown_pace_names_the_known_ones(unknown: object) -> None:
    with pytest.raises(ValueError, match=r"equal, fixed:1,1,2.*epoch, adaptive"):
        pace.make(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["fixed", "fixed:", "fixed:a,b", "fixed:1,,2"])
def test_fixed_by_name_needs_its_ratios(text: str) -> None:
    with pytest.raises(ValueError, match="such as fixed:1,1,2"):
        pace.make(text)
