"""What a lap deals again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.records import Plan
from paceline.step.late.proxy import lap_seconds, lap_shares
from paceline.step.step_state import StepState


def state(samples: tuple[int, ...], *, last: bool, floor: int = 0) -> StepState:
    plan = Plan(generation=0, step=3, samples=samples, deadline_s=2.0)
    numbers = {"dealt": sum(samples), "expected": sum(samples), "opened": 0.0}
    return StepState(plan=plan, shares=samples, epoch=0, last=last, compare=False, floor=floor, **numbers)  # type: ignore[arg-type]


def test_the_last_step_deals_all_that_is_left_and_a_thin_one_what_it_lacks() -> None:
    idle = np.array([True, True, False])
    assert lap_shares(state((10, 20, 30), last=True), 9, 40, idle, smallest=1).tolist() == [3, 6, 0]
    assert lap_shares(state((10, 20, 30), last=False, floor=46), 9, 40, idle, smallest=1).tolist() == [2, 4, 0]
    assert not lap_shares(state((10, 20, 30), last=True), 9, 40, ~idle & False, smallest=1).any(), "nobody is idle"


@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.booleans(), min_size=3, max_size=3))
def test_nobody_gets_a_single_sample_where_none_can_be_trained_on(undone: int, counted: int, idle: list[bool]) -> None:
    step_state = state((10, 20, 30), last=False, floor=30)
    shares = lap_shares(step_state, undone, counted, np.array(idle), smallest=2)
    assert shares.sum() <= undone
    assert undone == 1 or 1 not in shares
    assert undone == 1 or undone - shares.sum() != 1 or not shares.any()
    assert not shares[~np.array(idle)].any()


def test_a_lap_takes_its_part_of_the_steps_time_and_longer_where_nobody_found_it_long_enough() -> None:
    step_state, shares = state((10, 20), last=True), np.array([5, 0])
    assert lap_seconds(step_state, shares) == pytest.approx(1.2 * 2.0 * 0.5)
    assert lap_seconds(replace(step_state, patience=4.0), shares) == pytest.approx(4 * 1.2)
    assert lap_seconds(step_state, 0 * shares) == pytest.approx(0.05 * 1.2 * 2.0)
