"""The simulated books against those of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pace import make
from paceline.pace.steering import goal, made_for
from paceline.records import History, Plan
from paceline.step.training_state import TrainingState

BATCH, LENGTH = 256, 256 * 10**6


def books(step: int, done: int) -> TrainingState:
    """Of worker 1 in the middle of a very long epoch."""
    dealing: Any = SimpleNamespace(
        remaining=LENGTH - done, length=LENGTH, epoch=0, progress=0.0, deal=lambda samples: tuple(samples)
    )
    books = TrainingState(
        transport=SimpleNamespace(rank=1, size=3, generation=0, workers=(0, 1, 2), elastic=False),  # type: ignore[arg-type]
        pacer=make("equal"),
        dealing=dealing,
        settings=SimpleNamespace(global_batch=BATCH, epochs=1),  # type: ignore[arg-type]
        unit=1,
        avoid_singles=False,
        history=History(),
        first_index=step,
        log_event=lambda *_: None,
    )
    books.epoch_step = step
    return books


def opened(plan: Plan, *, done: int, batch: int) -> Plan:
    """As the simulator opens a step."""
    return made_for(plan, goal(plan.step, done=done, batch=batch))


PLANS = st.builds(
    lambda samples, deadline_s, expects: Plan(0, 40, tuple(samples), deadline_s=deadline_s, expects=expects),
    st.lists(st.integers(0, 400), min_size=3, max_size=3).filter(any),
    st.one_of(st.none(), st.floats(0.01, 10)),
    st.integers(BATCH // 2, 3 * BATCH // 2),
)
DONE = st.integers(40 * BATCH - BATCH, 40 * BATCH + BATCH // 2)


@given(PLANS, DONE)
def test_a_step_is_opened_as_the_books_of_a_run_open_it(plan: Plan, done: int) -> None:
    turn, here = books(plan.step, done).open(plan), opened(plan, done=done, batch=BATCH)
    assert here.samples == turn.plan.samples == turn.shares
    assert here.deadline_s == (None if plan.deadline_s is None else pytest.approx(turn.plan.deadline_s))
    assert here.expects == turn.plan.expects


def test_the_goal_is_the_batch_and_what_is_owed_within_half_a_batch_and_never_thin() -> None:
    assert goal(3, done=3 * BATCH, batch=BATCH) == BATCH
    assert goal(3, done=3 * BATCH - 20, batch=BATCH) == BATCH + 20
    assert goal(3, done=BATCH, batch=BATCH) == BATCH * 3 // 2
    assert goal(3, done=9 * BATCH, batch=BATCH) == round(0.7 * BATCH)


def test_a_plan_is_scaled_to_what_the_step_before_really_did() -> None:
    plan = Plan(0, 1, (160, 160), deadline_s=2.0, expects=BATCH)
    late = opened(plan, done=BATCH // 2, batch=BATCH)
    assert (late.samples, late.deadline_s, late.expects) == ((240, 240), 3.0, BATCH * 3 // 2)
