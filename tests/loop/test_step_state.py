"""A step whose members change in the middle."""

from __future__ import annotations

from paceline.loop.step_state import StepState
from paceline.records import Plan


def test_what_a_lost_worker_did_in_earlier_laps_is_given_back() -> None:
    plan = Plan(generation=1, step=4, samples=(6, 4, 2), deadline_s=1.0, forecast_s=(0.1, 0.2, 0.3))
    turn = StepState(
        plan=plan, shares=(6, 4, 2), epoch=0, dealt=12, expected=12, last=True, compare=False, opened=0.0,
        workers=(0, 1, 2), generation=1, ranges=(((0, 5),), ((6, 9),), ((10, 12),)),
    )  # fmt: skip
    assert turn.members_changed((0, 2), workers=(0, 2), generation=2) == [(6, 9)]
    assert turn.counted == (5, 2)
    assert turn.plan.samples == turn.shares == (6, 2)
    assert turn.plan.forecast_s == (0.1, 0.3)
    assert turn.expected == 8
