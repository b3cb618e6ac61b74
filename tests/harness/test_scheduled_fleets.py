"""How a run of a fleet in memory is judged: an end that no fault of the case explains is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from memory_fleet import KILLED, Outcome, Verdict
from scheduled_fleets import TOO_LATE, draw, judge

from paceline.errors import FLEET_FAILED
from paceline.worker_exit import LEFT

FAILED, WELL = Outcome(FLEET_FAILED, error="the fleet went on without this worker"), Outcome(0)


def problems(*outcomes: Outcome, faults: Any = ()) -> int:
    verdict = Verdict(outcomes=dict(enumerate(outcomes)))
    judge(replace(draw(0), size=3, faults=tuple((300, kind, slot, "") for kind, slot in faults)), verdict)
    return len(verdict.problems)


def test_a_fleet_without_a_fault_in_which_anybody_fails_ended_wrong() -> None:
    assert not problems(WELL, WELL, WELL)
    assert problems(WELL, FAILED, WELL) == 1
    assert problems(FAILED, FAILED, FAILED) == 3


@pytest.mark.parametrize(
    ("kind", "outcome"), [("kill", Outcome(KILLED)), ("freeze", FAILED), ("leave", Outcome(LEFT)), ("store", FAILED)]
)
def test_a_worker_fails_by_its_own_faults_and_not_by_those_of_others(kind: str, outcome: Outcome) -> None:
    assert not problems(WELL, outcome, WELL, faults=[(kind, 1)])
    assert problems(WELL, outcome, WELL, faults=[(kind, 2)]) == 1


def test_some_faults_are_of_two_workers_or_of_everybody() -> None:
    assert not problems(FAILED, WELL, FAILED, faults=[("peers", 2)])
    assert problems(WELL, FAILED, WELL, faults=[("peers", 2)]) == 1
    assert not problems(FAILED, FAILED, FAILED, faults=[("roster restarts", 0)])


def test_whoever_comes_when_all_were_done_is_told_so_and_no_fault_has_to_explain_it() -> None:
    assert not problems(WELL, WELL, WELL, Outcome(FLEET_FAILED, error=TOO_LATE), faults=[("join", 0)])
    assert problems(WELL, WELL, WELL, FAILED, faults=[("join", 0)]) == 1


def test_an_exit_code_that_is_not_documented_is_wrong_whatever_the_faults() -> None:
    assert problems(WELL, Outcome(1, error="KeyError: 2"), WELL, faults=[("kill", 1)]) == 1
