"""The adaptive pace: at the limit in a few steps, calm when there is nothing to gain, awake when there is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace_rig import Machines, best_s, machines, play, record, slower

from paceline.pace import Adaptive, Ask, Equal
from paceline.pace.adaptive import Probes

FOUR = slower([1, 1, 2, 4])


def changing(before: Machines, after: Machines, *, at: int, until: int = 10**9) -> Machines:
    return lambda step: after(step) if at <= step < until else before(step)


def test_unlike_machines_reach_the_limit_two_steps_after_the_first_record() -> None:
    run = play(Adaptive(), FOUR, total=256, steps=20)
    assert run.of_limit[0] == pytest.approx(1 / 2.75, abs=0.01)
    assert np.all(run.of_limit[2:] > 0.97)
    assert np.all(run.of_limit[4:] > 0.99)


@pytest.mark.parametrize(("speeds", "saved"), [([1, 2], 1 / 3), ([1, 3], 1 / 2)])
def test_it_saves_what_p1_predicts(speeds: list[float], saved: float) -> None:
    """T_adaptive / T_equal = v_min / mean(v): speeds 1:2 save one third, 1:3 one half (P1)."""
    fleet = slower([max(speeds) / v for v in speeds])
    adaptive, equal = (play(pacer, fleet, total=240, steps=60).wall_s[4:].sum() for pacer in (Adaptive(), Equal()))
    assert 1 - adaptive / equal == pytest.approx(saved, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "least"), [(0.05, 0.99), (0.2, 0.95)])
def test_noise_costs_little(noise: float, least: float) -> None:
    runs = [play(Adaptive(), FOUR, total=256, steps=200, noise=noise, seed=seed) for seed in range(6)]
    assert np.mean([run.best_s[4:].sum() / run.wall_s[4:].sum() for run in runs]) > least


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_a_worker_that_slows_down_is_redealt_in_the_plan_after_its_record(worker: int) -> None:
    times = [1.0, 1, 2, 4]
    times[worker] *= 4
    run = play(Adaptive(), changing(FOUR, slower(times), at=40), total=256, steps=60)
    assert run.of_limit[40] < 0.5  # nobody can know
    assert run.of_limit[41] < 0.5  # this plan was made before record 40
    assert np.all(run.of_limit[42:] > 0.95)


def test_a_worker_that_speeds_up_is_redealt_as_quickly() -> None:
    run = play(Adaptive(), changing(FOUR, slower([1, 1, 2, 1]), at=40), total=256, steps=60, noise=0.02)
    assert run.of_limit[40] < 0.8
    assert np.all(run.of_limit[42:] > 0.9)
    assert run.of_limit[42:].mean() > 0.97


def test_a_slow_drift_is_followed() -> None:
    def fleet(step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(4), np.array([1.0, 1 + 0.01 * step, 2, 4]) * 1e-3

    run = play(Adaptive(), fleet, total=1024, steps=150, noise=0.02)
    assert run.best_s[5:].sum() / run.wall_s[5:].sum() > 0.97


def test_a_single_stall_disturbs_two_steps() -> None:
    run = play(Adaptive(), changing(FOUR, slower([1, 20, 2, 4]), at=40, until=41), total=256, steps=60)
    disturbed = np.flatnonzero(run.of_limit[30:] < 0.95) + 30
    assert disturbed.tolist() == [40, 42]  # the stall, and the one plan that believed it


def test_a_slow_first_step_is_gone_by_the_fourth() -> None:
    fleet = changing(slower([30, 10, 10, 10]), FOUR, at=1)
    assert np.all(play(Adaptive(), fleet, total=256, steps=12).of_limit[3:] > 0.95)


def test_shares_rest_while_there_is_nothing_to_gain() -> None:
    run = play(Adaptive(), FOUR, total=256, steps=300, noise=0.01)
    changes = np.count_nonzero(np.any(np.diff(run.shares[20:], axis=0), axis=1))
    assert changes <= 3
    free = play(Adaptive(dead_band=0.0), FOUR, total=256, steps=300, noise=0.01)
    assert np.count_nonzero(np.any(np.diff(free.shares[20:], axis=0), axis=1)) > 30


def test_every_k_changes_shares_at_most_every_k_steps() -> None:
    run = play(Adaptive(every=10, dead_band=0.0), FOUR, total=2048, steps=200, noise=0.03)
    changed = np.flatnonzero(np.any(np.diff(run.shares[30:], axis=0), axis=1))
    assert len(changed) > 3
    assert np.all(np.diff(changed) % 10 == 0)


def test_a_replaced_worker_starts_at_the_median_and_is_soon_right() -> None:
    """P1: a slow worker is replaced by a fast one."""
    pacer = Adaptive()
    play(pacer, FOUR, total=256, steps=30, workers=[0, 1, 2, 3])
    run = play(pacer, slower([1, 1, 2, 1]), total=256, steps=10, first=30, workers=[0, 1, 2, 9])
    assert run.of_limit[0] > 0.6
    assert np.all(run.of_limit[3:] > 0.97)


def test_a_slow_worker_that_joins_helps_a_little_and_never_holds_back() -> None:
    """P1: a slow worker is added."""
    pacer = Adaptive()
    alone = play(pacer, slower([1, 1, 2]), total=256, steps=30, workers=[0, 1, 2]).wall_s[-1]
    run = play(pacer, slower([1, 1, 2, 8]), total=256, steps=20, first=30, workers=[0, 1, 2, 3])
    assert np.all(run.wall_s[4:] < alone)
    assert np.all(run.of_limit[4:] > 0.97)


def test_a_worker_that_leaves_is_not_dealt_to_and_known_when_it_returns() -> None:
    pacer = Adaptive()
    play(pacer, FOUR, total=256, steps=20)
    run = play(pacer, slower([1, 2, 4]), total=256, steps=5, first=20, workers=[0, 2, 3])
    assert np.all(run.of_limit > 0.95)
    back = play(pacer, slower([2, 4, 1, 1]), total=256, steps=5, first=25, workers=[2, 3, 1, 0])
    assert np.all(back.of_limit > 0.95)


def test_a_worker_too_slow_to_help_sits_out_at_no_cost() -> None:
    gpu_beside_cpus = machines([0.02, 0.06, 0.06], [1e-5, 0.02, 0.02])
    run = play(Adaptive(), gpu_beside_cpus, total=512, steps=900, noise=0.03)
    assert run.shares[3:100, 1:].sum() == 0
    tries = np.flatnonzero(run.shares[3:, 1])
    assert 1 <= len(tries) <= 3
    assert run.shares[3:, 1].max() == 1
    assert run.best_s[3:].sum() / run.wall_s[3:].sum() > 0.985


def test_a_worker_that_sat_out_is_tried_again_and_let_in_when_it_helps() -> None:
    slow = machines([0.02, 0.02, 0.06], [1e-4, 1e-4, 5e-3])
    fast = machines([0.02, 0.02, 0.02], [1e-4, 1e-4, 1e-4])
    run = play(Adaptive(), changing(fast, slow, at=20, until=60), total=512, steps=500, noise=0.02)
    assert run.shares[30:60, 2].max() <= 1
    back = np.flatnonzero(run.shares[60:, 2] > 100)
    assert len(back)
    assert back[0] < 200
    assert np.all(run.of_limit[60 + back[0] + 2 :] > 0.85)


def test_probe_zero_never_tries_again() -> None:
    run = play(Adaptive(probe=0.0), machines([0.02, 0.05], [1e-5, 0.05]), total=512, steps=400)
    assert run.shares[3:, 1].sum() == 0


def test_a_total_smaller_than_the_fleet_finds_the_fast_workers() -> None:
    run = play(Adaptive(), slower([10] * 9 + [1]), total=4, steps=80, noise=0.02)
    assert np.all(run.shares.sum(1) == 4)
    assert run.of_limit[-1] > 0.9


def test_a_tail_is_dealt_by_the_same_belief_and_leaves_full_steps_alone() -> None:
    pacer = Adaptive()
    played = play(pacer, FOUR, total=256, steps=20)
    ask = Ask(step=20, total=22, workers=(0, 1, 2, 3))
    tail = pacer.plan(ask)
    assert tail.samples == (8, 8, 4, 2)
    full = pacer.plan(Ask(step=20, total=256, workers=(0, 1, 2, 3))).samples
    pacer.observe(record(20, tail.samples, np.array(tail.samples) * np.array([1, 1, 2, 4]) * 1.01e-3))
    assert pacer.plan(Ask(step=22, total=256, workers=(0, 1, 2, 3))).samples == full == played.plans[-1].samples


def test_the_forecast_is_what_the_machines_then_take() -> None:
    run = play(Adaptive(), FOUR, total=256, steps=12)
    assert run.plans[0].forecast_s is None
    assert run.plans[-1].forecast_s == pytest.approx(np.array([1, 1, 2, 4]) * 1e-3 * run.plans[-1].samples, rel=0.02)


def test_units_minimum_and_maximum_are_kept() -> None:
    run = play(Adaptive(minimum=1, maximum=[64, 200, 200, 200]), slower([1, 1, 2, 40]), total=250, steps=30, unit=8)
    assert np.all(run.shares.sum(1) == 250)
    assert np.all(run.shares[:, 0] <= 64)
    assert np.all(run.shares >= 8)
    assert np.all(np.count_nonzero(run.shares % 8, axis=1) == 1)


def test_a_tail_too_small_for_the_minimum_is_dealt_without_it() -> None:
    plan = Adaptive(minimum=8).plan(Ask(step=0, total=3, workers=(0, 1, 2, 3)))
    assert sum(plan.samples) == 3


def test_a_tail_under_a_pending_probe_still_sums() -> None:
    pacer = Adaptive()
    play(pacer, machines([0.02, 0.02, 0.03], [1e-4, 1e-4, 5e-2]), total=512, steps=40)
    for total in range(20):
        for step in range(40, 60):
            assert sum(pacer.plan(Ask(step=step, total=total, workers=(0, 1, 2))).samples) == total


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"dead_band": -0.1}, "dead_band and probe are fractions"),
        ({"dead_band": float("nan")}, "dead_band and probe are fractions"),
        ({"probe": 1.5}, "dead_band and probe are fractions"),
        ({"minimum": -1}, "minimum must be a whole number"),
        ({"maximum": [1.5, 2]}, "maximum must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Adaptive(**settings)  # type: ignore[arg-type]


def test_bounds_are_checked_against_the_fleet() -> None:
    with pytest.raises(ValueError, match="maximum has 2 numbers for 3 workers"):
        Adaptive(maximum=[4, 4]).check(3)
    with pytest.raises(ValueError, match="is above maximum"):
        Adaptive(minimum=5, maximum=4).check(3)
    with pytest.raises(ValueError, match="maximum is too small"):
        Adaptive(maximum=4).plan(Ask(step=0, total=64, workers=(0, 1)))


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_two_pacers_with_the_same_records_make_the_same_plans(steps: int, seed: int) -> None:
    """Any worker can become the leader: asking changes nothing, and what was asked does not matter."""
    leader, other = Adaptive(), Adaptive()
    rng = np.random.default_rng(seed)
    for step in range(steps):
        plan = leader.plan(Ask(step=step, total=200, workers=(0, 1, 2)))
        told = record(step, plan.samples, np.array(plan.samples) * rng.lognormal(0, 1, 3))
        leader.observe(told)
        other.observe(told)
    ask = Ask(step=steps, total=200, workers=(0, 1, 2))
    assert json.dumps(leader.state_dict()) == json.dumps(other.state_dict())
    assert leader.plan(ask) == other.plan(ask) == leader.plan(ask)


def test_the_best_step_of_the_rig_is_the_sum_of_speeds() -> None:
    assert best_s(*FOUR(0), 275) == pytest.approx(0.1, rel=0.02)


def test_a_slow_first_step_does_not_shut_the_fastest_worker_out() -> None:
    def fleet(step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(2), np.array([1.0 if step == 0 else 1e-3, 5e-3])

    played = play(Adaptive(), fleet, total=128, steps=20, unit=16)
    assert (played.shares[6:, 0] == 112).all(), played.shares.tolist()


def test_a_stall_that_would_shut_a_worker_out_is_tried_again_at_once() -> None:
    def fleet(step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(2), np.array([1.0 if step == 30 else 1e-3, 1e-3])

    played = play(Adaptive(), fleet, total=128, steps=45, unit=16)
    assert (played.shares[36:] == 64).all(), played.shares[28:].tolist()


def test_a_slow_first_step_is_not_taken_for_fixed_cost() -> None:
    """The tail of an epoch would show it: a worker believed to be nearly all fixed cost sits it out."""

    def fleet(step: int) -> tuple[np.ndarray, np.ndarray]:
        slow_start = np.array([0.038, 0.0, 0.0, 0.0]) if step == 0 else np.zeros(4)
        return slow_start, 2e-3 * np.array([1.0, 1.0, 2.0, 4.0])

    pacer = Adaptive()
    play(pacer, fleet, total=128, steps=30)
    tail = pacer.plan(Ask(step=40, total=29, workers=(0, 1, 2, 3))).samples
    assert min(tail[:2]) >= 9, tail


def turns(probes: Probes, *, steps: int, added_s: float, worked_before: int = 0) -> list[int]:
    """Steps in which worker 1 of a fleet of two gets its turn, and takes it; plans lag one step behind records."""
    taken: list[int] = []
    for step in range(steps):
        if 1 in probes.due((0, 1), step, np.array([0.0, added_s]), 1.0):
            taken.append(step)
        if step:
            works = step - 1 in taken or step - 1 < worked_before
            probes.observe(record(step - 1, [8, int(works)], [1.0, 0.1]))
    return taken


def test_the_wait_doubles() -> None:
    taken = turns(Probes(budget=0.01), steps=600, added_s=-0.5)
    assert taken[0] == 8
    gaps = np.diff(taken)
    assert len(gaps) >= 3
    assert np.all(gaps[1:] >= 2 * gaps[:-1])


def test_a_turn_too_dear_waits_until_it_is_within_the_budget() -> None:
    taken = turns(Probes(budget=0.01), steps=1500, added_s=3.0)
    assert 300 <= taken[0] <= 302
    assert np.diff(taken)[0] >= 600


def test_the_first_turn_of_a_worker_that_had_worked_is_free() -> None:
    taken = turns(Probes(budget=0.01), steps=200, added_s=50.0, worked_before=20)
    assert taken == [28]


def test_a_worker_that_works_has_no_turn() -> None:
    assert turns(Probes(budget=0.01), steps=100, added_s=-0.5, worked_before=100) == []


def test_the_longest_unseen_comes_first() -> None:
    probes = Probes(budget=0.01)
    probes.observe(record(0, [8, 8, 0], [1.0, 1.0, 0.0]))
    for step in range(1, 8):
        probes.observe(record(step, [8, 1 if step == 4 else 0, 0], [1.0, 1.0, 0.0]))
    for step in range(8, 40):
        due = probes.due((0, 1, 2), step, np.full(3, -1.0), 1.0).tolist()
        assert due in ([], [1], [2], [2, 1])
        probes.observe(record(step, [8, 0, 0], [1.0, 0.0, 0.0]))
    assert 2 in probes.due((0, 1, 2), 40, np.full(3, -1.0), 1.0) or 2 in probes.due(
        (0, 1, 2), 41, np.full(3, -1.0), 1.0
    )


def test_all_tries_together_keep_to_the_budget() -> None:
    """Fifty idle workers that each add half a step: about one try in fifty steps, not one each."""
    probes, workers = Probes(budget=0.01), tuple(range(51))
    tries, due = 0, np.empty(0, dtype=np.intp)
    for step in range(1000):
        samples = np.zeros(51, dtype=int)
        samples[0] = 8
        samples[due[:1]] = 1
        tries += len(due[:1])
        probes.observe(record(step, samples.tolist(), samples.astype(float).tolist(), workers=workers))
        due = probes.due(workers, step + 1, np.r_[0.0, np.full(50, 0.5)], 1.0)
    assert 5 <= tries <= 1000 / 50 + 1


def test_the_schedule_survives_json() -> None:
    probes, copy = Probes(budget=0.01), Probes(budget=0.01)
    turns(probes, steps=50, added_s=-0.5)
    copy.load_state_dict(json.loads(json.dumps(probes.state_dict())))
    assert copy.state_dict() == probes.state_dict()


@given(
    factors=st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0, 30.0]), min_size=2, max_size=5),
    totals=st.lists(st.sampled_from([8, 64, 96, 256]), min_size=3, max_size=12),
    unit=st.sampled_from([1, 4]),
)
def test_a_plan_by_what_was_kept_is_that_of_a_pacer_that_has_kept_nothing(
    factors: list[float], totals: list[int], unit: int
) -> None:
    """Shares are kept while belief and question stay the same; a pacer with a loaded state computes them anew."""
    pacer, workers = Adaptive(), tuple(range(len(factors)))
    for step, total in enumerate(totals):
        for asked in (total, total, max(totals)):
            ask, fresh = Ask(step=step, total=asked, workers=workers, unit=unit), Adaptive()
            fresh.load_state_dict(json.loads(json.dumps(pacer.state_dict())))
            assert repr(pacer.plan(ask)) == repr(fresh.plan(ask))  # NaN where nothing is known
        shares = pacer.plan(Ask(step=step, total=total, workers=workers, unit=unit)).samples
        pacer.observe(record(step, shares, [n * factor for n, factor in zip(shares, factors, strict=True)]))
