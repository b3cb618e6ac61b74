"""Workers die, freeze, leave and join while a training goes on: no step is half done and no sample lost or doubled."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Outcome
from elastic_cases import LENGTH, replay
from flock import Flock, sound

pytestmark = pytest.mark.fleet

CASE = "elastic_cases.py:train"
UNHURRIED: dict[str, Any] = {"epochs": 12, "pause_s": 0.05}
"""Long enough for whatever is to happen meanwhile, on the busiest computer; then the test hurries."""


def must_be_sound(folder: Path, outcomes: dict[int, Outcome], *, ended: set[int], epochs: int = 4) -> Any:
    """Those who ended well have equal replicas, equal to one machine's; every sample counted once in every epoch."""
    run, values = sound(folder, outcomes, ended=ended, epochs=epochs, length=LENGTH)
    assert [record.step for record in run.records] == list(range(len(run.records)))
    for value in values[1:]:
        assert value["momentum"] == values[0]["momentum"]
        assert value["schedule"] == values[0]["schedule"]
    assert np.abs(np.array(replay(folder)) - np.array(values[0]["weights"])).max() < 1e-12
    return run


@pytest.mark.parametrize(
    "pace",
    [
        "adaptive",
        pytest.param("equal", marks=pytest.mark.long),
        pytest.param("epoch", marks=pytest.mark.long),
        "joint",
        "cutoff",
    ],
)
def test_a_killed_worker_is_done_without_and_comes_back(tmp_path: Path, pace: str) -> None:
    with Flock(CASE, 3, tmp_path, args={"pace": pace, "many_cores": pace == "adaptive", **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.kill(1)
        flock.wait_for_workers(2)
        flock.start(1)
        flock.wait_for_workers(3)
        flock.kill(2)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)
    assert [len(change.workers) for change in run.changes] == [2, 3, 2]
    assert run.changes[0].left[0].worker == 1
    assert run.changes[1].joined == (1,)


POINTS = ["before work", "in work", "before round", "in round", "after round", "after commit"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("leader", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_worker_may_die_at_any_point_of_a_step(tmp_path: Path, point: str, leader: bool) -> None:
    with Flock(CASE, 3, tmp_path, args={"die": {"0" if leader else "2": [[point, 7]]}}) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={1, 2} if leader else {0, 1})


@pytest.mark.parametrize("leader", [False, True])
def test_a_death_that_a_call_between_backward_and_commit_meets_leaves_nothing_of_the_dead_in_the_sums(
    tmp_path: Path, leader: bool
) -> None:
    die = {"0" if leader else "2": [["before asking", 7]]}
    args = {"die": die, "asks": True, "no_small_sums": True, "epochs": 2}
    with Flock(CASE, 3, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={1, 2} if leader else {0, 1}, epochs=2)


def test_a_death_in_the_very_last_step_makes_one_more_and_a_schedule_that_has_ended_stays_there(
    tmp_path: Path,
) -> None:
    with Flock(CASE, 3, tmp_path, args={"die": {"2": [["in round", 39]]}, "one_cycle": True}) as flock:
        outcomes = flock.wait()
    survivors = [outcomes[slot].value for slot in (0, 1)]
    assert survivors[0]["weights"] == survivors[1]["weights"]
    for survivor in survivors:
        assert len(survivor["steps"]) == 41, "what was lost in the last of 40 steps is made up for"
        assert survivor["schedule"] == 40, "OneCycleLR raises when it is stepped once more"


def test_two_die_at_once_and_then_all_but_one(tmp_path: Path) -> None:
    die = {"0": [["in work", 5]], "2": [["in round", 5]], "3": [["after round", 14]]}
    with Flock(CASE, 4, tmp_path, args={"die": die}) as flock:
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={1})
    assert run.records[-1].workers == (1,)


def test_workers_die_in_the_middle_of_an_evaluation_and_of_a_save(tmp_path: Path) -> None:
    die = {"0": [["before saving", 8]], "2": [["in work", 12]]}
    with Flock(CASE, 4, tmp_path, args={"die": die, "evaluate": 3, "save": 4}) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={1, 3})


def test_a_worker_that_is_asked_to_leave_does_so_in_good_order(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.send(0, signal.SIGTERM)
        flock.wait_for_end(0)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={1, 2}, epochs=12)
    assert outcomes[0].code == 143, outcomes[0].err
    assert run.changes[0].left[0].text == "left (SIGTERM)"


@pytest.mark.parametrize("slot", [0, pytest.param(1, marks=pytest.mark.long)], ids=["the leader", "another"])
def test_a_frozen_worker_is_done_without_and_enters_anew_when_it_wakes(tmp_path: Path, slot: int) -> None:
    with Flock(CASE, 3, tmp_path, args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.send(slot, signal.SIGSTOP)
        flock.wait_for_workers(2)
        flock.send(slot, signal.SIGCONT)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=12)
    assert [len(change.workers) for change in run.changes] == [2, 3]
    assert "silent" in run.changes[0].left[0].text


@pytest.mark.parametrize("point", [["receiving", 0], ["receiving", 7], ["taking", 0]], ids=["first", "amid", "last"])
def test_one_that_dies_while_it_takes_its_state_harms_nobody(tmp_path: Path, point: list[Any]) -> None:
    with Flock(CASE, 2, tmp_path, args={"die": {"2": [point]}, **UNHURRIED}) as flock:
        flock.wait_for_step(5)
        flock.start(2)
        flock.wait_for_end(2)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)


@pytest.mark.parametrize("point", [["receiving", 7], ["taking", 0]], ids=["amid", "last"])
def test_several_that_come_at_once_all_get_the_state_though_one_of_them_dies_over_it(
    tmp_path: Path, point: list[Any]
) -> None:
    with Flock(CASE, 2, tmp_path, args={"die": {"3": [point]}, **UNHURRIED}) as flock:
        flock.wait_for_step(5)
        for slot in (2, 3, 4):
            flock.start(slot)
        flock.wait_for_end(3)
        flock.wait_for_workers(4)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2, 4}, epochs=12)
    assert all(outcomes[slot].value["steps"] for slot in (2, 4)), "they entered in the end"


@pytest.mark.parametrize(
    ("frozen", "kills"),
    [({}, [1, 1]), ({}, [1, 0]), ({"differs": {"1": 0.5}}, [1]), ({"moves": 3}, [1])],
    ids=["same", "giver dies", "differs", "changed"],
)
def test_a_frozen_part_is_the_fleets_on_one_that_returns_and_travels_only_where_it_has_to(
    tmp_path: Path, frozen: dict[str, Any], kills: list[int]
) -> None:
    die = {"1": [["before work", 6], *([["receiving", 5]] if kills == [1, 1] else [])]}
    if 0 in kills:
        die["0"] = [["sending", 5]]
    with Flock(CASE, 3, tmp_path, args={"die": die, "frozen": frozen, **UNHURRIED}) as flock:
        for slot in kills:
            flock.wait_for_end(slot)
            generation = flock.server.snapshot()["generation"]
            flock.start(slot)
        flock.wait_until(lambda: flock.together_since(generation))
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=12)
    values = [outcome.value for outcome in outcomes.values()]
    assert all(value["frozen"] == values[0]["frozen"] for value in values)
    sizes = {size for value in values for size in value["left_out"]}
    assert sizes == ({0, 4000} if not frozen else {0}), sizes


@pytest.mark.parametrize("point", [["giving", 0], ["sending", 6]], ids=["before", "amid"])
def test_the_peer_that_gives_its_state_may_die_over_it(tmp_path: Path, point: list[Any]) -> None:
    with Flock(CASE, 3, tmp_path, args={"die": {"0": [point]}, **UNHURRIED}) as flock:
        flock.wait_for_step(5)
        flock.start(3)
        flock.wait_for_end(0)
        flock.wait_for_member(3)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={1, 2, 3}, epochs=12)
    assert outcomes[3].value["steps"], "it entered in the end"


def test_below_the_minimum_the_fleet_waits_and_goes_on_when_it_is_met(tmp_path: Path) -> None:
    with Flock(CASE, 2, tmp_path, minimum=2, args=UNHURRIED) as flock:
        flock.wait_for_step(5)
        flock.kill(1)
        flock.start(1)
        flock.wait_until(lambda: (last := flock.records()[-1])["generation"] > 1 and len(last["workers"]) == 2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)
    alone = [record for record in run.records if len(record.workers) == 1]
    assert len(alone) <= 1, "the step under way is finished, and no other begun"
    assert [change.wanting for change in run.changes] == [1, 0]


def test_the_roster_may_die_and_come_back(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, state=tmp_path / "roster.json", args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.restart_roster()
        flock.wait_until(lambda: flock.records()[-1]["generation"] > 1)
        flock.kill(1)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 2}, epochs=12)
    numbers = [record.generation for record in run.records]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


def test_who_is_asked_to_leave_while_it_waits_for_a_roster_that_is_gone_leaves(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 1000}) as flock:
        flock.wait_for_step(8)
        flock.server.close()
        flock.kill(1)
        flock.wait_until(lambda: flock.complaints().count("waiting for the roster, which is away") >= 2)
        for slot in (0, 2):
            flock.send(slot, signal.SIGTERM)
        outcomes = flock.wait()
    assert [outcomes[slot].code for slot in (0, 2)] == [143, 143], outcomes[0].err[-2000:]


def test_a_death_while_the_roster_is_away_pauses_the_fleet_until_it_is_back(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, state=tmp_path / "roster.json", args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.server.close()
        flock.kill(1)
        flock.restart_roster(pause=1.0)
        flock.tell_death(1)
        outcomes = flock.hurry()
    must_be_sound(tmp_path, outcomes, ended={0, 2}, epochs=12)
