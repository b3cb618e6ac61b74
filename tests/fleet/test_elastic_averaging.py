"""Averages go on when workers die, freeze, leave and join: equal replicas, every sample counted once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Outcome
from elastic_averaging_cases import line_by_hand
from elastic_cases import EPOCHS, LENGTH
from flock import Flock, sound

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = pytest.mark.fleet

TRAIN, LINE = "elastic_averaging_cases.py:train", "elastic_averaging_cases.py:line"
AVERAGE: dict[str, Any] = {"combine": "average", "settings": {"every_steps": 2}}
SPRINGS: dict[str, Any] = {"combine": "elastic-average", "settings": {"tau": 2}}
UNHURRIED: dict[str, Any] = {"epochs": 16, "pause_s": 0.05}
BOTH = pytest.mark.parametrize("combine", [AVERAGE, SPRINGS], ids=["average", "elastic-average"])


def must_be_sound(folder: Path, outcomes: dict[int, Outcome], *, ended: set[int], epochs: int = EPOCHS) -> Any:
    """Those who ended well hold the same parameters; every sample counted once in every epoch."""
    run, values = sound(folder, outcomes, ended=ended, epochs=epochs, length=LENGTH)
    assert [record.step for record in run.records] == list(range(len(run.records)))
    for value in values:
        assert value["rounds"] == len(run.records)
    return run


@BOTH
@pytest.mark.parametrize("point", ["in work", "before round", "in round", "after round", "after commit"])
def test_a_worker_may_die_at_any_point_of_a_period(tmp_path: Path, combine: dict[str, Any], point: str) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**combine, "die": {"2": [[point, 4]]}}) as flock:
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1})
    assert run.records[-1].workers == (0, 1)


@BOTH
@pytest.mark.parametrize("point", ["in work", "half told"])
def test_the_leader_may_die_and_a_round_that_only_some_finished_is_handed_over(
    tmp_path: Path, combine: dict[str, Any], point: str
) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**combine, "die": {"0": [[point, 4]]}}) as flock:
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={1, 2})
    assert run.records[-1].workers == (1, 2)
    if point == "half told":
        assert run.records[4].workers == (0, 1, 2), "the round that the leader died in counts, with its samples"


@BOTH
def test_a_killed_worker_comes_back_with_the_shared_parameters(tmp_path: Path, combine: dict[str, Any]) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**combine, **UNHURRIED, "evaluate": True}) as flock:
        flock.wait_for_step(6)
        flock.kill(1)
        flock.wait_for_workers(2)
        flock.start(1)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=16)
    assert [len(change.workers) for change in run.changes] == [2, 3]
    assert run.changes[1].joined == (1,)
    said = [dict(map(tuple, outcomes[slot].value["evaluated"])) for slot in (0, 1, 2)]
    assert said[0] == said[2]
    assert said[1].items() <= said[0].items()
    assert said[1], "it came to the others' evaluations"


@BOTH
def test_a_frozen_worker_is_done_without_and_enters_anew_when_it_wakes(tmp_path: Path, combine: dict[str, Any]) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**combine, **UNHURRIED}) as flock:
        flock.wait_for_step(6)
        flock.send(1, signal.SIGSTOP)
        flock.wait_for_workers(2)
        flock.send(1, signal.SIGCONT)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=16)
    assert [len(change.workers) for change in run.changes] == [2, 3]
    assert "silent" in run.changes[0].left[0].text


@BOTH
def test_a_worker_that_is_asked_to_leave_does_so_after_a_round(tmp_path: Path, combine: dict[str, Any]) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**combine, **UNHURRIED}) as flock:
        flock.wait_for_step(6)
        flock.send(0, signal.SIGTERM)
        flock.wait_for_end(0)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={1, 2}, epochs=16)
    assert outcomes[0].code == 143, outcomes[0].err
    assert run.changes[0].left[0].text == "left (SIGTERM)"
    assert run.records[run.changes[0].step - 1].workers == (0, 1, 2), "its last round counts"


@BOTH
def test_a_worker_may_die_in_an_evaluation_that_all_came_to(tmp_path: Path, combine: dict[str, Any]) -> None:
    args = {**combine, "evaluate": True, "die": {"0": [["evaluating", 8]]}}
    with Flock(TRAIN, 3, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={1, 2})
    said = [outcomes[slot].value["evaluated"] for slot in (1, 2)]
    assert [epoch for epoch, _ in said[0]] == list(range(EPOCHS))
    assert said[0] == said[1]


def test_running_statistics_are_those_of_who_is_left(tmp_path: Path) -> None:
    with Flock(TRAIN, 3, tmp_path, args={**AVERAGE, "batch_norm": True, "die": {"2": [["in round", 4]]}}) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={0, 1})


def test_by_the_clock_with_an_outer_optimiser_workers_come_and_go(tmp_path: Path) -> None:
    settings = {"period_s": 0.15}
    args = {"combine": "average", "settings": settings, "outer": {"lr": 0.7, "momentum": 0.9}}
    with Flock(TRAIN, 2, tmp_path, args={**args, **UNHURRIED, "pace": "adaptive"}) as flock:
        flock.wait_for_step(5)
        flock.start(2)
        flock.wait_for_workers(3)
        flock.kill(0)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={1, 2}, epochs=16)
    assert [len(change.workers) for change in run.changes] == [3, 2]


def test_a_joiner_or_the_one_that_gives_its_state_may_die_over_it(tmp_path: Path) -> None:
    args = {**SPRINGS, **UNHURRIED, "die": {"0": [["giving", 0]], "3": [["taking", 0]]}}
    with Flock(TRAIN, 3, tmp_path, args=args) as flock:
        flock.wait_for_step(4)
        flock.start(3)
        flock.wait_for_end(0)
        flock.wait_for_end(3)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={1, 2}, epochs=16)


def test_the_average_is_over_those_who_are_left(tmp_path: Path) -> None:
    with Flock(LINE, 3, tmp_path, args={**AVERAGE, "die": {"2": [["before round", 3]]}}) as flock:
        outcomes = flock.wait()
    run = read_log(tmp_path / "run")
    assert [len(record.workers) for record in run.records[:5]] == [3, 3, 3, 2, 2]
    assert all(entry.sound and entry.whole for entry in audit(run))
    assert outcomes[0].value == outcomes[1].value
    assert np.abs(np.array(line_by_hand(tmp_path)) - np.array(outcomes[0].value)).max() < 1e-12


def test_springs_hold_those_who_are_left(tmp_path: Path) -> None:
    settings = {"tau": 2, "alpha": 0.2, "weights": "fixed"}
    args = {"combine": "elastic-average", "settings": settings, "die": {"2": [["in round", 3]]}}
    with Flock(LINE, 3, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    run = read_log(tmp_path / "run")
    assert [len(record.workers) for record in run.records[:5]] == [3, 3, 3, 2, 2]
    assert outcomes[0].value == outcomes[1].value
    assert np.abs(np.array(line_by_hand(tmp_path, alpha=0.2)) - np.array(outcomes[0].value)).max() < 1e-12


@pytest.mark.parametrize(
    ("combine", "env", "said"),
    [
        ({"combine": "average", "settings": {"groups": [[0, 1]]}}, {}, "groups"),
        ({"combine": "average", "settings": {"overlap": True}}, {}, "overlap"),
        ({"combine": "elastic-average", "settings": {"overlap": 0.25}}, {}, "overlap"),
        (SPRINGS, {"PACELINE_FAILURES": "lost:0.3"}, "kill:1@20"),
    ],
)
def test_what_needs_a_fleet_of_fixed_size_is_refused(
    tmp_path: Path, combine: dict[str, Any], env: dict[str, str], said: str
) -> None:
    with Flock(TRAIN, 2, tmp_path, args=combine, env=env) as flock:
        outcomes = flock.wait()
    for one in outcomes.values():
        assert one.code == 1
        assert "ValueError" in one.err
        assert said in one.err.splitlines()[-1]
