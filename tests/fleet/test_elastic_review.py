"""Awkward moments of an elastic fleet: results handed over, scripts with several loops, signals at the wrong time."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from crew import Outcome
from elastic_cases import BATCH, LENGTH
from flock import Flock, sound
from test_elastic import UNHURRIED

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = pytest.mark.fleet

CASE = "review_cases.py:train"
DEADLINE = {"deadline_s": 0.15, "over": 1.3}
FLOOR = {"deadline_s": 0.03, "over": 1.0, "least_count": 0.9}
COUNT = {"deadline_s": None, "wait_for": 2, "over": 1.3}


def equal_and_sound(folder: Path, outcomes: dict[int, Outcome], *, ended: set[int], epochs: int | None = 4) -> Any:
    """Those who ended well hold the same weights; every sample counted once in every epoch."""
    run, values = sound(folder, outcomes, ended=ended, epochs=epochs, length=LENGTH)
    assert all(value["scale"] == values[0]["scale"] for value in values)
    return run


# -- a result is handed to a worker that missed its end --------------------------------------------------------------


@pytest.mark.parametrize("own", [None, "clip", "decay", "commit clips", "zero"])
def test_what_the_user_does_to_the_mean_gradient_is_not_handed_over(tmp_path: Path, own: str | None) -> None:
    with Flock(CASE, 3, tmp_path, args={"half": 7, "own": own, "epochs": 2}) as flock:
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={1, 2}, epochs=2)


def test_what_an_optimiser_does_to_the_mean_gradient_is_not_handed_over(tmp_path: Path) -> None:
    sgd = {"momentum": 0.9, "nesterov": True, "foreach": True}  # adds the momentum to p.grad itself
    with Flock(CASE, 3, tmp_path, args={"half": 7, "sgd": sgd, "epochs": 2}) as flock:
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={1, 2}, epochs=2)


# -- the books' plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leader", [False, True])
def test_a_death_before_the_agreement_on_a_custom_order_harms_nobody(tmp_path: Path, leader: bool) -> None:
    die = {"0" if leader else "2": [["after commit", 9]]}  # the epoch's last step
    with Flock(CASE, 3, tmp_path, args={"die": die, "order": True}) as flock:
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={1, 2} if leader else {0, 1})


# -- newcomers -------------------------------------------------------------------------------------------------------


def test_a_newcomer_trains_what_the_fleet_trains_when_parameters_were_frozen(tmp_path: Path) -> None:
    with Flock(CASE, 2, tmp_path, args={"freeze_at": 5, **UNHURRIED}) as flock:
        flock.wait_for_step(12)
        flock.start(2)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=12)
    assert len(run.records[-1].workers) == 3, "it entered"


def test_a_newcomer_to_a_later_loop_of_the_script_ends_with_the_others(tmp_path: Path) -> None:
    with Flock(CASE, 2, tmp_path, args={"loops": [1, 20, 1], "pause_s": 0.05}) as flock:
        flock.wait_for_step(12)  # in the second loop
        flock.start(2)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=None)


# -- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("pace", "slot"), [("adaptive", 0), ("joint", 1), ("joint", 0), ("cutoff", 1)])
def test_whoever_freezes_enters_anew_and_the_log_stays_whole(tmp_path: Path, pace: str, slot: int) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 24, "pace": pace}) as flock:
        flock.wait_for_step(8)
        flock.send(slot, signal.SIGSTOP)
        before = flock.records()[-1]["step"]
        flock.wait_for_step(before + 10)
        flock.send(slot, signal.SIGCONT)
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=24)
    assert len(run.records[-1].workers) == 3, "it entered anew"
    written = [record["step"] for record in flock.records()]
    late = [step for step in written if step > before + 40]
    assert len(late) == len(set(late)), "two workers write the log"


def test_one_that_wakes_after_the_run_has_ended_ends_quietly(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.send(1, signal.SIGSTOP)
        (tmp_path / "hurry").touch()
        flock.wait_for_end(0)
        flock.wait_for_end(2)
        flock.send(1, signal.SIGCONT)
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={0, 2}, epochs=12)
    assert outcomes[1].code == 0, outcomes[1].err[-2000:]


# -- asked to leave --------------------------------------------------------------------------------------------------


def test_sigterm_while_the_fleet_is_formed_anew_holds_nobody_up(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"leave_while_settling": "1", **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.start(3)
        flock.wait_for_end(1)
        flock.wait_for_member(3)
        outcomes = flock.hurry()
    equal_and_sound(tmp_path, outcomes, ended={0, 2, 3}, epochs=12)
    assert outcomes[1].code == 143


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_a_late_worker_evaluates_among_those_who_are_there(tmp_path: Path) -> None:
    args = {"pace": DEADLINE, "sleeps": ["1", 12], "evaluate": 14}
    with Flock(CASE, 3, tmp_path, args=args) as flock:
        flock.wait_for("asleep")
        flock.wait_for("evaluating.2.13")
        flock.kill(2)
        (tmp_path / "wake").touch()
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1})
    alone = [record for record in run.records if record.step in (12, 13)]
    assert all(record.samples[1] < record.planned[1] for record in alone), "worker 1 was late in both"
    for slot in (0, 1):
        assert all(n == count == LENGTH for _, n, count in outcomes[slot].value["evaluations"]), outcomes[slot].value


# -- the log ---------------------------------------------------------------------------------------------------------


def test_the_log_names_everybody_who_left(tmp_path: Path) -> None:
    args = {"die": {"3": [["in work", 5]]}, "die_while_settling": "2"}
    with Flock(CASE, 4, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1})
    left = {one.worker for change in run.changes for one in change.left}
    assert left == {2, 3}


# -- the roster is away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", [DEADLINE, COUNT], ids=["deadline", "count"])
def test_with_deadlines_and_counts_too_the_fleet_trains_on_while_the_roster_is_away(
    tmp_path: Path, pace: dict[str, Any]
) -> None:
    args = {"pace": pace, "epochs": 12}
    with Flock(CASE, 3, tmp_path, state=tmp_path / "roster.json", args=args) as flock:
        flock.wait_for_step(8)
        flock.server.close()
        flock.wait_for_step(flock.records()[-1]["step"] + 10)
        flock.restart_roster(pause=0.0)
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=12)
    assert all(len(record.workers) == 3 for record in run.records)


@pytest.mark.parametrize("pace", ["adaptive", pytest.param("joint", marks=pytest.mark.long)])
def test_a_new_figure_may_be_added_while_the_roster_is_away(tmp_path: Path, pace: str) -> None:
    args = {"add_from": 20, "epochs": 12, "pace": pace}
    with Flock(CASE, 2, tmp_path, state=tmp_path / "roster.json", args=args) as flock:
        flock.wait_for_step(8)
        flock.server.close()
        time.sleep(1.5)
        flock.restart_roster(pause=0.1)
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)


# -- every round closes without the late -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("pace", [DEADLINE, COUNT, FLOOR], ids=["deadline", "count", "floor"])
@pytest.mark.parametrize("slot", [0, 2])
def test_with_deadlines_a_worker_dies_comes_back_leaves_and_freezes(tmp_path: Path, pace: Any, slot: int) -> None:
    with Flock(CASE, 3, tmp_path, args={"pace": pace, "epochs": 12, "die": {str(slot): [["in work", 7]]}}) as flock:
        flock.wait_for_step(12)
        flock.start(slot)
        flock.wait_for_step(25)
        flock.send(1, signal.SIGTERM)
        flock.wait_for_step(40)
        flock.send(slot, signal.SIGSTOP)
        flock.wait_for_step(55)
        flock.send(slot, signal.SIGCONT)
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={0, 2}, epochs=12)
    assert outcomes[1].code == 143


@pytest.mark.parametrize("slot", [0, 2])
def test_a_worker_lost_while_the_floor_is_waited_for_is_done_without(tmp_path: Path, slot: int) -> None:
    die = {str(slot): [["in work", 7]]}
    with Flock(CASE, 3, tmp_path, args={"pace": FLOOR, "pause_s": 0.01, "die": die}) as flock:
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1, 2} - {slot})
    ends = {record.step for record, after in zip(run.records, run.records[1:]) if after.epoch > record.epoch}
    thin = [record.total for record in run.records[:-1] if record.deadline_s and record.step not in ends]
    assert min(thin) >= 0.9 * BATCH
    assert len(run.records[-1].workers) == 2


# -- features --------------------------------------------------------------------------------------------------------


FEATURES: dict[str, Any] = {
    "scaler": {"scaler": True},
    "norm": {"norm": True},
    "gain": {"varying": "gain"},
    "stream": {"stream": True, "pause_s": 0.02},
    "order": {"order": True},
    "deadline with norm": {"norm": True, "pace": DEADLINE},
    "deadline with order": {"order": True, "pace": DEADLINE},
    "deadline with gain": {"varying": "gain", "pace": DEADLINE},
}


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_a_half_finished_round_and_a_newcomer(tmp_path: Path, feature: str) -> None:
    args = {"half": 7, "epochs": 6, **FEATURES[feature]}
    with Flock(CASE, 3, tmp_path, args=args) as flock:
        flock.wait_for_step(12)
        flock.start(0, PACELINE_TEST_WHOLE="1")
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=None if "stream" in args else 6)
    assert len(run.records[-1].workers) == 3


def test_a_mistake_of_one_worker_ends_that_worker_alone(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"raises": ["1", 7]}) as flock:
        outcomes = flock.wait()
    run = equal_and_sound(tmp_path, outcomes, ended={0, 2})
    assert "own mistake" in run.changes[0].left[0].text


def test_all_are_asked_to_leave_at_once(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 20}) as flock:
        flock.wait_for_step(8)
        for slot in range(3):
            flock.send(slot, signal.SIGTERM)
        outcomes = flock.wait()
    assert [outcomes[slot].code for slot in range(3)] == [143] * 3, flock.complaints()


@pytest.mark.parametrize(
    "pace",
    ["adaptive", DEADLINE, pytest.param(COUNT, marks=pytest.mark.long), pytest.param(FLOOR, marks=pytest.mark.long)],
    ids=["adaptive", "deadline", "count", "floor"],
)
def test_whoever_hands_a_result_over_may_die_over_it(tmp_path: Path, pace: Any) -> None:
    with Flock(CASE, 4, tmp_path, args={"half": 7, "hands_half_over": "1", "pace": pace, "evaluate": 2}) as flock:
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={2, 3})
    assert outcomes[0].code == outcomes[1].code == -signal.SIGKILL, "both died where they were told to"


def test_the_script_s_own_connections_are_left_alone(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"lines": True, "die": {"2": [["in work", 5]]}}) as flock:
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={0, 1})
    assert [outcomes[slot].value["cut"] for slot in (0, 1)] == [0, 0]
    assert [outcomes[slot].value["deaf"] for slot in (0, 1)] == [0, 0], "doors of the script's own were closed"


def test_listeners_of_the_script_s_own_keep_no_survivor_in_a_sum(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"doors": True, **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.send(2, signal.SIGSTOP)  # no connection breaks by itself
        flock.wait_for_workers(2)
        flock.send(2, signal.SIGCONT)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=12)


def test_an_optimiser_that_is_not_tracked_is_refused(tmp_path: Path) -> None:
    with Flock(CASE, 2, tmp_path, args={"untracked": True, "epochs": 6}) as flock:
        flock.wait_until(lambda: flock.workers[0].poll() is not None or len(flock.records()) > 8)
        if flock.workers[0].poll() is None:
            flock.start(2)
        outcomes = flock.wait()
    if outcomes[0].code == 0:  # not refused: then at least nobody's replica may differ
        equal_and_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=6)
    else:
        assert "fleet.track" in outcomes[0].err, outcomes[0].err[-1500:]


@pytest.mark.parametrize("pace", ["adaptive", DEADLINE], ids=["adaptive", "deadline"])
def test_the_fleet_trains_on_while_the_roster_is_away(tmp_path: Path, pace: Any) -> None:
    with Flock(CASE, 2, tmp_path, state=tmp_path / "roster.json", args={"pace": pace, **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.server.close()
        flock.wait_for_step(flock.records()[-1]["step"] + 20)  # more than the log can lag behind
        flock.restart_roster(pause=0.0)
        outcomes = flock.hurry()
    equal_and_sound(tmp_path, outcomes, ended={0, 1}, epochs=12)


def test_an_interrupted_worker_does_not_end_the_others_log(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args=UNHURRIED) as flock:
        flock.wait_for_step(8)
        flock.send(0, signal.SIGINT)
        flock.wait_for_end(0)
        outcomes = flock.hurry()
    equal_and_sound(tmp_path, outcomes, ended={1, 2}, epochs=12)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events.count("end") == 1
    assert events[-1] == "end"


@pytest.mark.parametrize("pace", ["adaptive", DEADLINE], ids=["adaptive", "deadline"])
def test_a_leader_that_dies_after_the_last_call_has_written_every_step(tmp_path: Path, pace: Any) -> None:
    with Flock(CASE, 2, tmp_path, args={"die_at_the_end": "0", "pace": pace, "epochs": 2}) as flock:
        outcomes = flock.wait()
    assert [outcomes[slot].code for slot in (0, 1)] == [-signal.SIGKILL, 0], flock.complaints()
    seen = audit(read_log(tmp_path / "run"))
    assert all(entry.sound for entry in seen), seen
    assert [entry.counted for entry in seen] == [LENGTH, LENGTH]


@pytest.mark.long
def test_one_that_freezes_in_an_evaluation_enters_anew_or_asks_to_be_started_again(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 10, "evaluate": 10, "slow_score": 0.03}) as flock:
        flock.wait_for_step(12)
        flock.wait_until(lambda: len(list(tmp_path.glob("scoring.1.*"))) > len(list(tmp_path.glob("scored.1.*"))))
        flock.send(1, signal.SIGSTOP)
        before = flock.records()[-1]["step"]
        flock.wait_for_step(before + 5)
        flock.send(1, signal.SIGCONT)
        outcomes = flock.wait()
    equal_and_sound(tmp_path, outcomes, ended={0, 2}, epochs=10)
    assert outcomes[1].code in (0, 75), outcomes[1].err[-1500:]
