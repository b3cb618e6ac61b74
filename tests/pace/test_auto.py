"""The default pace: adaptive while machines are calm, joint while a deadline pays, and when it changes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from test_joint import ask, stalling, work

import paceline
from paceline.pace import DEFAULT, Adaptive, Auto, Joint, deadlines_needed, make, may_set_deadlines
from paceline.pace.auto import EVIDENCE, FEW
from paceline.records import StepRecord


def calm(auto: Auto, steps: range, *, noise: float = 0.005) -> list[StepRecord]:
    """Four machines, each of one speed but for the noise."""
    dice, done = np.random.default_rng(steps.start), []
    for step in steps:
        pace = np.array([0.01, 0.01, 0.02, 0.04]) * np.exp(noise * dice.standard_normal(4))
        done.append(work(auto.plan(ask(step)), pace.tolist()))
        auto.observe(done[-1])
    return done


def test_it_is_the_default() -> None:
    assert make(DEFAULT).name == "auto"
    assert isinstance(make("auto"), paceline.Auto)


def test_on_calm_machines_it_is_adaptive_to_the_letter() -> None:
    auto, adaptive = Auto(), Adaptive()
    for done in calm(auto, range(80)):
        assert replace(adaptive.plan(ask(done.step)), forecast_s=None).samples == done.planned
        adaptive.observe(done)
    assert auto.plan(ask(81)) == adaptive.plan(ask(81))
    assert auto.change is None


def test_stalls_bring_deadlines_once_enough_steps_were_judged_and_calm_ends_them() -> None:
    auto = Auto()
    records = stalling(auto, steps=60)
    assert auto.change is not None
    assert auto.change.deadlines
    assert FEW < auto.change.step <= EVIDENCE + 3
    assert 0.03 < auto.change.saves < 1
    assert auto.change.worker is None, "they took turns"
    first = next(done.step for done in records if done.deadline_s is not None)
    assert first == auto.change.step + 1
    assert all(done.deadline_s is not None for done in records[first:])
    began = auto.change
    later = calm(auto, range(60, 400))
    assert auto.change is not began
    assert not auto.change.deadlines
    assert later[-1].deadline_s is None


def test_steps_in_which_sizes_of_micro_batches_are_tried_bring_none() -> None:
    """Another size has another speed, which no share foresaw: the step waits, but for nobody who stalls."""
    given, searching = Auto(), Auto()
    for step in range(FEW + EVIDENCE):
        pace = [0.01, 0.01 if step % 2 else 0.02, 0.02, 0.04]
        for auto, sizes in ((given, ()), (searching, (8, 0, 8, 8))):
            auto.observe(replace(work(auto.plan(ask(step)), pace), micro_size=sizes))
    assert given.change is not None
    assert searching.change is None


def test_one_worker_that_stalls_alone_is_named() -> None:
    auto = Auto()
    for step in range(60):
        auto.observe(work(auto.plan(ask(step)), [0.01] * 4, stuck=(2,) if step % 6 == 5 else ()))
    assert auto.change is not None
    assert auto.change.worker == 2


def test_a_single_slow_step_of_the_start_brings_none() -> None:
    auto = Auto()
    for step in range(12):
        auto.observe(work(auto.plan(ask(step)), [0.01] * 4, stuck=(1,) if step == 5 else ()))
    assert auto.gain > 0.03
    assert auto.plan(ask(13)).deadline_s is None


def test_a_few_steps_are_enough_where_they_agree() -> None:
    dice, auto = np.random.default_rng(0), Auto()
    for step in range(16):
        pace = 0.01 * np.exp(0.3 * dice.standard_normal(4))
        auto.observe(work(auto.plan(ask(step)), pace.tolist()))
    assert auto.change is not None
    assert FEW <= auto.change.step < EVIDENCE


@pytest.mark.parametrize("noise", [0.025, 0.04])
def test_where_the_gain_is_about_the_least_it_does_not_flap(noise: float) -> None:
    done = calm(Auto(), range(300), noise=noise)
    bounded = [record.deadline_s is not None for record in done]
    assert sum(one != other for one, other in itertools.pairwise(bounded)) <= 4


def test_where_no_deadline_may_be_it_plans_adaptives_shares() -> None:
    auto = Auto()
    stalling(auto, steps=60)
    question = replace(ask(60), deadlines=False)
    assert auto.plan(ask(60)).deadline_s is not None
    assert auto.plan(question) == auto.adaptive.plan(question)


def test_only_auto_can_do_without_deadlines() -> None:
    assert may_set_deadlines(Auto())
    assert not deadlines_needed(Auto())
    assert deadlines_needed(Joint())
    assert deadlines_needed(make("cutoff"))
    assert not deadlines_needed(Adaptive())


def test_what_it_has_learned_can_be_saved() -> None:
    auto, other = Auto(seed=3), Auto(seed=3)
    stalling(auto, steps=8, every=3)
    other.load_state_dict(json.loads(json.dumps(auto.state_dict())))
    assert other.plan(ask(9)) == auto.plan(ask(9))
    for pacer in (auto, other):
        stalling(pacer, steps=20, first=9, every=3)
    assert other.change == auto.change is not None
    assert other.plan(ask(30)) == auto.plan(ask(30))


def test_settings_are_joints() -> None:
    auto = Auto("window", least_gain=0.1, least_count=0.5, adaptive=Adaptive(maximum=300), draws=8)
    assert repr(auto).startswith("Auto('window', least_gain=0.1, least_count=0.5, adaptive=Adaptive(")
    assert auto.draws == 8
    assert auto.forecast.name == "window"
    with pytest.raises(ValueError, match="least_gain is a fraction"):
        Auto(least_gain=1.0)
    with pytest.raises(TypeError, match="least"):
        Auto(least=0.1)
