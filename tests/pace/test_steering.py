"""How steps with deadlines are steered: the simulator against the books of a run, the floor, and whether they pay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pace import make
from paceline.pace.steering import Gain, goal, least_samples, made_for, more
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


FREE, BUSY, GONE = "free", "busy", "gone"


def asked(
    counts: list[int], shares: list[int], who: list[str], *, least: int = 70, room: int = 1000, **settings: float
) -> tuple[tuple[int, ...], float, bool] | None:
    free, busy = [one == FREE for one in who], [one == BUSY for one in who]
    return more(counts, shares, free=free, busy=busy, least=least, so_far_s=1.0, room=room, **settings)  # type: ignore[arg-type]


def test_a_round_closes_once_its_floor_is_counted() -> None:
    assert asked([40, 30], [60, 60], [FREE, BUSY]) is None
    assert asked([40, 29], [60, 60], [FREE, BUSY]) is not None
    assert asked([0, 0], [60, 60], [FREE, BUSY], least=0) is None


def test_the_floor_is_a_part_of_the_batch_in_whole_samples() -> None:
    assert [least_samples(0.7, batch) for batch in (10, 11, 1)] == [7, 8, 1]
    assert least_samples(0.0, 10) == 0


def test_those_that_are_free_do_what_is_missing_at_their_speed() -> None:
    shares, seconds, recall = asked([30, 10, 0], [40, 20, 40], [FREE, FREE, BUSY]) or ((), 0.0, True)
    assert not recall
    assert seconds == pytest.approx(1.1 * 30 / 40), "and a tenth more"
    assert shares == (30 + 29, 20, 40), "a quarter more than that; who has enough, or is stuck, keeps its own"


def test_where_nobody_is_free_it_waits_for_the_stuck_ones_twice_as_long_each_time() -> None:
    assert asked([40, 0], [60, 60], [GONE, BUSY]) == ((60, 60), 1.0, False)
    assert asked([0, 0], [60, 60], [BUSY, BUSY]) == ((60, 60), 1.0, False)


def test_where_the_free_ones_have_nothing_left_what_the_stuck_were_dealt_is_recalled() -> None:
    assert asked([40, 0], [40, 60], [FREE, BUSY], room=0) == ((40, 60), 1.0, True)


def test_it_closes_below_the_floor_when_nobody_can_bring_more() -> None:
    assert asked([40, 0], [40, 60], [FREE, GONE], room=0) is None
    assert asked([40, 0], [60, 60], [GONE, GONE]) is None


def test_one_that_has_done_nothing_is_given_something_and_a_short_wait_has_a_least_length() -> None:
    shares, seconds, _ = asked([0, 0], [0, 8], [FREE, BUSY]) or ((), 0.0, True)
    assert shares[0] > 0
    assert seconds == pytest.approx(77.0)
    assert (asked([69, 0], [70, 8], [FREE, BUSY]) or ((), 0.0, True))[1] == 0.05
    assert (asked([69, 0], [70, 8], [FREE, BUSY], patience=4.0) or ((), 0.0, True))[1] == 0.2


WORKERS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from([FREE, BUSY, GONE])), min_size=1, max_size=6
)


@given(WORKERS, st.integers(1, 400), st.integers(0, 300), st.sampled_from([1, 4]), st.sampled_from([1, 2]))
def test_nobody_loses_what_it_was_dealt_and_no_more_is_dealt_than_there_is(
    workers: list[tuple[int, int, str]], least: int, room: int, unit: int, smallest: int
) -> None:
    counts, left, who = map(list, zip(*workers))
    shares = [count + more_ for count, more_ in zip(counts, left)]
    given_ = asked(counts, shares, who, least=least, room=room, unit=unit, smallest=smallest)
    if given_ is None:
        assert sum(counts) >= least or BUSY not in who
        return
    added = np.array(given_[0]) - shares
    assert (added >= 0).all()
    assert added.sum() <= room
    assert (added % unit == 0).all()
    assert all(one == FREE for one, extra in zip(who, added) if extra)
    assert all(share - count >= smallest for share, count, extra in zip(given_[0], counts, added) if extra)
    assert 0 < given_[1] < np.inf
    assert BUSY in who or any(one == FREE and share > count for one, share, count in zip(who, given_[0], counts))


def judged(steps: list[tuple[float, float]], *, deadline: bool = False, least: float = 0.02) -> Gain:
    gain = Gain(least=least)
    for waited_s, together_s in steps:
        gain.observe(waited_s, together_s, 100, deadline=deadline)
    return gain


def test_a_calm_fleet_has_nothing_to_gain() -> None:
    gain = judged([(1.01, 1.0)] * 50)
    assert not gain.on
    assert abs(gain.value - 0.01) < 1e-9


def test_one_stall_among_a_hundred_calm_steps_turns_it_on_at_once() -> None:
    assert judged([(1.0, 1.0)] * 100 + [(50.0, 1.3)]).on


def test_it_goes_off_again_only_when_nothing_is_gained() -> None:
    gain = judged([(1.0, 1.0)] * 20 + [(50.0, 1.3)])
    for _ in range(300):
        gain.observe(1.01, 1.0, 100, deadline=True)
    assert gain.on  # between nothing and the least gain it stays as it is
    for _ in range(300):
        gain.observe(0.99, 1.0, 100, deadline=True)
    assert not gain.on


def test_nobody_is_waited_for_while_somebody_is_stuck() -> None:
    gain = judged([(50.0, 1.3)])
    for _ in range(300):
        gain.observe(0.9, 1.0, 100, deadline=True, may_end=False)
    assert gain.on
    gain.observe(0.9, 1.0, 100, deadline=True)
    assert not gain.on


def test_what_a_deadline_itself_costs_counts_against_it() -> None:
    gain = judged([(1.1, 1.0)] * 20)
    assert gain.on
    for _ in range(100):
        gain.observe(1.1, 1.0, 100, deadline=True, overhead_s=0.2)
    assert not gain.on
    for _ in range(100):  # and is not forgotten
        gain.observe(1.1, 1.0, 100, deadline=False)
    assert not gain.on


def test_the_state_survives_json() -> None:
    one, other = judged([(2.0, 1.0), (1.5, 1.2)]), Gain(least=0.02)
    one.observe(1.0, 1.0, 10, deadline=True, overhead_s=0.3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for gain in (one, other):
        gain.observe(3.0, 1.0, 10, deadline=False, overhead_s=0.1)
    assert (one.value, one.on) == (other.value, other.on)
