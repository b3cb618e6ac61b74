"""The phases of a step, of the user's loop and of the round: which follow which, and what each of them means."""

from __future__ import annotations

from itertools import product

import pytest

from paceline.records import Plan
from paceline.step.step_state import LoopPhase, RoundPhase, StepState

LOOP = {
    "NOT_BEGUN": "WORKING WAITING CUT_OFF",
    "WORKING": "DONE WAITING CUT_OFF",
    "DONE": "DONE WORKING WAITING",
    "WAITING": "WAITING DONE WORKING",
    "CUT_OFF": "CUT_OFF DONE WAITING",
}
ROUND = {"OPEN": "CLOSED VOID", "CLOSED": "CLOSED OVER VOID", "OVER": "VOID", "VOID": ""}


def state(
    loop: LoopPhase = LoopPhase.NOT_BEGUN, round_: RoundPhase = RoundPhase.OPEN, *, deadline_s: float | None = None
) -> StepState:
    plan = Plan(generation=0, step=7, samples=(4,), deadline_s=deadline_s)
    return StepState(
        plan=plan, shares=(4,), epoch=0, dealt=4, expected=4, last=False, compare=False, opened=0.0,
        loop_phase=loop, round_phase=round_,
    )  # fmt: skip


def test_every_phase_is_in_these_tests() -> None:
    assert set(LOOP) == set(LoopPhase.__members__)
    assert set(ROUND) == set(RoundPhase.__members__)


@pytest.mark.parametrize(("now", "then"), list(product(LoopPhase, LoopPhase)), ids=lambda phase: phase.name)
def test_the_loops_phase_changes_by_its_transitions_alone(now: LoopPhase, then: LoopPhase) -> None:
    step_state = state(now, RoundPhase.CLOSED)
    if then.name in LOOP[now.name].split():
        step_state.enter(then)
        assert step_state.loop_phase is then
    else:
        with pytest.raises(AssertionError, match=f"step 7: from {now} to {then}"):
            step_state.enter(then)
        assert step_state.loop_phase is now
    assert step_state.round_phase is RoundPhase.CLOSED, "the round's phase is another matter"


@pytest.mark.parametrize(("now", "then"), list(product(RoundPhase, RoundPhase)), ids=lambda phase: phase.name)
def test_the_rounds_phase_changes_by_its_transitions_alone(now: RoundPhase, then: RoundPhase) -> None:
    step_state = state(LoopPhase.WORKING, now)
    if then.name in ROUND[now.name].split():
        step_state.enter(then)
        assert step_state.round_phase is then
    else:
        with pytest.raises(AssertionError, match=f"step 7: from {now} to {then}"):
            step_state.enter(then)
        assert step_state.round_phase is now
    assert step_state.loop_phase is LoopPhase.WORKING, "the loop's phase is another matter"


@pytest.mark.parametrize(("loop", "round_"), list(product(LoopPhase, RoundPhase)), ids=lambda phase: phase.name)
def test_what_the_phases_mean(loop: LoopPhase, round_: RoundPhase) -> None:
    step_state = state(loop, round_)
    assert step_state.idle == (loop.name in ("DONE", "WAITING"))
    assert step_state.closed == (round_.name != "OPEN")
    assert step_state.over == (round_.name == "OVER")
    assert step_state.takes_work == (round_.name == "OPEN" and loop.name != "CUT_OFF"), "cut-off work never joins"


@pytest.mark.parametrize("loop", LoopPhase, ids=lambda phase: phase.name)
def test_a_loop_begins_a_step_once_and_may_begin_it_anew(loop: LoopPhase) -> None:
    step_state = state(loop)
    step_state.work.samples = 3
    step_state.start(5.0)
    assert step_state.loop_phase is (loop if loop is LoopPhase.CUT_OFF else LoopPhase.WORKING), "it is not idle"
    assert step_state.began == 5.0
    assert step_state.work.samples == 0, "what a loop that was left had done is done again"


def test_the_clock_of_a_step_runs_from_the_first_beginning_anywhere() -> None:
    step_state = state(deadline_s=2.0)
    step_state.start_clock(10.0)
    step_state.start(11.0)
    assert (step_state.opened, step_state.until) == (10.0, 12.0)


def test_a_step_without_a_deadline_has_no_clock() -> None:
    step_state = state()
    step_state.start(11.0)
    assert step_state.until is None
