from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.analysis.steptimes import late_micro_batches, lost_time, usual_s
from paceline.observe.analysis.stretches import MOST_STEPS, stretches
from paceline.records import StepRecord


def steps(*rows, deadline_s=1.0, wall_s=1.1):
    """One worker's steps of 100 samples/s: (samples, unfinished, late, behind); worker 1 is always done."""
    return [
        StepRecord(
            k, 0, 0, (0, 1), (120, 100), (n, 100), (n / 100, 1.0), micro_batches=(-(-n // 10), 10),
            slowest_s=(0.1 if n else 0.0, 0.1), unfinished_s=(unfinished, 0.0), late_s=(late, 0.0), behind=(behind, 0),
            deadline_s=deadline_s, wall_s=wall_s, round_s=0.1,
        )
        for k, (n, unfinished, late, behind) in enumerate(rows)
    ]  # fmt: skip


def only(records):
    (stretch,) = stretches(records)
    return stretch


def test_a_spell_lasts_from_the_round_that_closed_without_it_to_its_end():
    records = steps((60, 0.4, 0, 0), (0, 1.0, 0, 1), (0, 1.0, 0, 2), (30, 0, 2.9, 0))
    (late,) = late_micro_batches(only(records), 0)
    # It ended 2.9 s after a deadline that lay 0.1 + 1.1 + 1.1 s before the last step's start.
    assert late.pieces == [(0, 0.4), (1, 1.0), (2, 1.0), (3, pytest.approx(0.6))]
    assert late.took_s == pytest.approx(0.4 + 2.9)


def test_a_worker_that_is_late_twice_in_a_row_has_two_spells():
    records = steps((60, 0.4, 0, 0), (0, 0.5, 0.6, 0), (0, 1.0, 0, 1), (80, 0, 1.2, 0))
    first, second = late_micro_batches(only(records), 0)
    assert first.pieces == [(0, 0.4), (1, pytest.approx(0.5))]
    assert [row for row, _ in second.pieces] == [1, 2, 3]


def test_a_spell_that_the_records_begin_or_end_in_is_as_long_as_they_show():
    (cut_short,) = late_micro_batches(only(steps((60, 0.4, 0, 0), (0, 1.0, 0, 1))), 0)
    assert (cut_short.pieces, cut_short.took_s) == ([(0, 0.4), (1, 1.0)], 0.0)
    (begun_before,) = late_micro_batches(only(steps((0, 1.0, 0, 1), (50, 0, 1.5, 0))), 0)
    assert begun_before.took_s == 0.0


def test_of_a_stall_the_usual_time_was_cut_off_and_the_rest_a_standstill():
    records = steps((100, 0, 0, 0), (60, 0.4, 0, 0), (0, 1.0, 0, 1), (100, 0, 0.1, 0))
    lost = lost_time(only(records), {0: 0.1, 1: 0.1})
    assert lost.cut_s[:, 0] == pytest.approx([0, 0.1, 0, 0])
    assert lost.stuck_s[:, 0] == pytest.approx([0, 0.3, 1.0, 0])
    assert not lost.cut_s[:, 1].any()
    assert not lost.stuck_s[:, 1].any()


def test_the_usual_micro_batch_is_not_moved_by_stalls_in_half_of_the_steps():
    records = [
        StepRecord(k, 0, 0, (0,), (8,), (8,), (1.0,), micro_batches=(4,), slowest_s=(0.1 if k % 2 else 5.0,))
        for k in range(40)
    ]
    assert usual_s(records) == {0: pytest.approx(0.1)}
    assert usual_s([StepRecord(0, 0, 0, (0,), (8,), (8,), (1.0,), micro_batches=(4,))]) == {0: 0.25}
    assert usual_s([StepRecord(0, 0, 0, (0,), (8,), (8,), (1.0,))]) == {}


def test_stretches_hold_every_step_once_and_part_where_the_workers_change():
    few = [
        StepRecord(
            k, 0, 0, (0, 1) if k < 3 else (0,), (1, 1)[: 2 - (k > 2)], (1, 1)[: 2 - (k > 2)], (0.1, 0.1)[: 2 - (k > 2)]
        )
        for k in range(5)
    ]
    assert [(part.workers, len(part.wall_s)) for part in stretches(few)] == [((0, 1), 3), ((0,), 2)]
    many = [few[-1]] * (MOST_STEPS + 1)
    assert [len(part.wall_s) for part in stretches(many)] == [MOST_STEPS, 1]
    assert list(stretches([])) == []


part = st.floats(0, 1)


@given(st.lists(st.tuples(st.integers(0, 120), part, part, st.integers(0, 3)), min_size=1, max_size=12), part)
def test_every_unfinished_second_is_booked_once_and_none_is_invented(rows, usual):
    stretch = only(steps(*rows))
    lost = lost_time(stretch, {0: usual})
    booked = (lost.cut_s + lost.stuck_s)[:, 0]
    assert (booked >= stretch.unfinished_s[:, 0] - 1e-9).all()
    assert (booked <= stretch.unfinished_s[:, 0] + stretch.late_s[:, 0] + 1e-9).all()
    assert np.isfinite(lost.stall_s).all()
    assert (lost.stall_s >= 0).all()
