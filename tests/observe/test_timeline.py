from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import record, run_with_deadlines

from paceline.observe.analysis.timeline import lay_out
from paceline.observe.log.reader import parse_step

seconds = st.floats(0, 10) | st.just(math.nan)


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4), seconds, seconds, seconds),
        min_size=1,
        max_size=6,
    )
)
def test_slices_of_a_worker_never_overlap_and_lie_within_their_step(steps):
    records = [
        record(
            k,
            [4] * len(workers),
            speeds=[1.0] * len(workers),
            seconds=[own for own, _, _ in workers],
            unfinished_s=[unfinished for _, unfinished, _ in workers],
            late_s=[late for _, _, late in workers],
            wall_s=0.0 if math.isnan(wall) else wall,
            round_s=0.0 if math.isnan(round_s) else round_s,
            deadline_s=None if math.isnan(deadline) else deadline,
        )
        for k, (workers, wall, round_s, deadline) in enumerate(steps)
    ]
    laid = list(lay_out(records, [math.nan] * len(records)))
    assert all(a.stop <= b.start for a, b in pairwise(laid))
    for step in laid:
        for worker in step.record.workers:
            mine = [piece for piece in step.slices if piece.worker == worker]
            assert all(step.start <= piece.start < piece.stop <= step.stop for piece in mine)
            assert all(a.stop <= b.start for a, b in pairwise(sorted(mine, key=lambda piece: piece.start)))


def test_compute_waiting_round_and_rest_follow_one_another_and_fill_the_step():
    (step,) = lay_out([record(0, (100, 50), speeds=(100.0, 100.0), wall_s=1.5, round_s=0.2)], [11.5])
    told = {(piece.worker, piece.kind): (piece.start, piece.stop) for piece in step.slices}
    assert told == {
        (0, "compute"): (10.0, 11.0),
        (1, "compute"): (10.0, 10.5),
        (1, "waiting"): (10.5, 11.0),
        **{(w, "round"): (11.0, pytest.approx(11.2)) for w in (0, 1)},
        **{(w, "rest"): (pytest.approx(11.2), 11.5) for w in (0, 1)},
    }
    assert step.last == 0


def test_time_between_steps_is_a_gap():
    first, second = lay_out([record(0, wall_s=1.0), record(1, wall_s=1.0)], [10.0, 15.0])
    assert (first.stop, second.start) == (10.0, 14.0)


def test_a_stuck_worker_is_late_until_its_micro_batch_has_ended_in_the_next_step():
    records = [parse_step(event) for event in run_with_deadlines() if event["event"] == "step"]
    stuck, ended = list(lay_out(records[1:3], [10.21, 10.42]))
    late = {step.record.step: [p for p in step.slices if p.kind == "late"] for step in (stuck, ended)}
    assert stuck.deadline == pytest.approx(10.2)
    assert [(p.worker, p.start, p.stop) for p in late[1]] == [(3, pytest.approx(10.0), pytest.approx(10.2))]
    assert [(p.worker, p.start, p.stop) for p in late[2]] == [(3, pytest.approx(10.21), pytest.approx(10.26))]
    own = next(p for p in ended.slices if p.worker == 3 and p.kind == "compute")
    assert own.start == pytest.approx(10.26)


def test_one_worker_waits_for_nobody():
    (step,) = lay_out([record(0, (5,), speeds=(5.0,))], [10.0])
    assert step.last is None
    assert "waiting" not in {piece.kind for piece in step.slices}
