from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.analysis.figures import Figures, own_speeds, summarise
from paceline.records import StepRecord

SPEEDS = (500.0, 500.0, 250.0, 125.0)
"""Machines 1,1,2,4: together 1,375 samples/s; equal shares run at 4 x 125 = 500."""


def test_shares_by_speed_reach_the_limit_and_equal_shares_would_run_at_the_pace_of_the_slowest(make_record):
    figures = summarise([make_record(k, SPEEDS, (96, 96, 48, 24)) for k in range(10)])
    assert figures.samples_per_s == pytest.approx(1375)
    assert figures.limit == pytest.approx(1375)
    assert figures.of_limit == pytest.approx(1)
    assert figures.equal == pytest.approx(500)
    assert figures.waiting == pytest.approx(0)


def test_equal_shares_wait_for_the_slowest_which_gets_the_blame(make_record):
    figures = summarise([make_record(k, SPEEDS, (64, 64, 64, 64)) for k in range(10)])
    assert figures.samples_per_s == pytest.approx(figures.equal) == pytest.approx(500)
    assert figures.balanced == pytest.approx(figures.limit) == pytest.approx(1375)
    assert [w.waiting for w in figures.workers] == pytest.approx([0.75, 0.75, 0.5, 0])
    assert [w.last for w in figures.workers] == [0, 0, 0, 1]
    assert figures.workers[3].blamed == pytest.approx((0.75 + 0.75 + 0.5) / 3)


def test_other_time_costs_equal_and_balanced_shares_alike(make_record):
    figures = summarise([make_record(0, (100.0, 50.0), (100, 50), other_s=0.5, round_s=0.3)])
    assert figures.samples_per_s == pytest.approx(150 / 1.5)
    assert figures.equal == pytest.approx(150 / (75 / 50 + 0.5))
    assert figures.balanced == pytest.approx(150 / (1 + 0.5))
    assert (figures.work, figures.round, figures.rest) == pytest.approx((1 / 1.5, 0.3 / 1.5, 0.2 / 1.5))


def test_the_limit_of_drifting_machines_weighs_each_step_by_its_time(make_record):
    fast, slow = make_record(0, (100.0, 100.0), (50, 50)), make_record(1, (100.0, 25.0), (80, 20))
    figures = summarise([fast, slow])
    assert figures.limit == pytest.approx(200 / (100 / 200 + 100 / 125))
    assert figures.of_limit == pytest.approx(1)


def test_a_worker_that_sits_out_keeps_the_speed_it_last_showed(make_record):
    records = [make_record(0, SPEEDS, (64, 64, 64, 64)), make_record(1, SPEEDS, (100, 100, 50, 0))]
    figures = summarise(records[1:], known=own_speeds(records[:1]))
    assert figures.limit == pytest.approx(1375)
    assert figures.of_limit == pytest.approx(1250 / 1375)
    assert figures.workers[3].sat_out == 1
    assert figures.workers[3].speed == pytest.approx(125)
    assert figures.workers[3].waiting == 0


def test_a_worker_that_sits_out_at_first_counts_with_the_speed_it_shows_later(make_record):
    figures = summarise([make_record(0, SPEEDS, (100, 100, 50, 0)), make_record(1, SPEEDS, (96, 96, 48, 24))])
    assert figures.limit == pytest.approx(1375)


def test_workers_that_come_and_go_count_only_where_they_were(make_record):
    both = make_record(0, (100.0, 100.0), (50, 50))
    alone = make_record(1, (100.0,), (50,), workers=(0,))
    figures = summarise([both, alone])
    assert figures.limit == pytest.approx(150 / (100 / 200 + 50 / 100))
    assert [w.samples for w in figures.workers] == [100, 50]


def test_the_shortfall_is_measured_against_the_machine_that_was_asked_for(make_record):
    figures = summarise([make_record(0, (100.0, 100.0), (110, 100), shortfall_s=(0.1, 0.0))])
    assert [w.shortfall for w in figures.workers] == pytest.approx([0.1, 0])


def test_one_freeze_is_not_a_slow_host_but_a_host_that_is_slow_in_most_steps_is(make_record):
    def short(*seconds):
        steps = enumerate(seconds)
        records = [make_record(k, (100.0,), (100,), seconds=(1.0 + s,), shortfall_s=(s,)) for k, s in steps]
        return summarise(records).workers[0].shortfall

    assert short(0, 0, 0, 3.0, 0, 0, 0.01, 0) == 0
    assert short(0.2, 0.3, 0.2, 3.0, 0.2, 0, 0.2, 0.3) == pytest.approx(0.2)


def test_records_without_times_or_samples_give_zeros_and_no_error(make_record):
    assert summarise([]) == Figures()
    nothing = summarise([make_record(0, SPEEDS, (0, 0, 0, 0))])
    assert (nothing.samples_per_s, nothing.limit, nothing.equal) == (0, 0, 0)
    untimed = summarise([make_record(0, (1.0, 1.0), (4, 4), seconds=(math.nan, 0.0), wall_s=2.0)])
    assert (untimed.samples_per_s, untimed.limit, untimed.waiting) == (4, 0, 0)


def stalled(make_record, step, stuck_s, **more):
    """Two machines of 100 samples/s, ten micro-batches of 10 each in a second; worker 1 stalls in one of them."""
    seconds = (1.0, 1.0 + stuck_s)
    slowest = (0.1, 0.1 + stuck_s)
    fields = {"seconds": seconds, "slowest_s": slowest, "micro_batches": (10, 10), "wall_s": 1.0 + stuck_s}
    return make_record(step, (100.0, 100.0), (100, 100), **(fields | more))


def test_a_stall_that_was_waited_for_is_time_stuck_and_no_slower_machine(make_record):
    figures = summarise([stalled(make_record, k, 2.0 if k % 4 == 0 else 0.0) for k in range(8)])
    # In 12 s worker 0 works 8 and waits 4; worker 1 is stuck for 4. At best 1,600 samples take 8 s and half of 4 more.
    assert figures.limit == pytest.approx(1600 / (8 + 4 / 2))
    assert figures.of_limit == pytest.approx(10 / 12)
    assert figures.stuck == pytest.approx(0.5 * 4 / 12)
    assert figures.waiting == pytest.approx(0.5 * 4 / 12)
    assert (figures.workers[1].stalls, figures.workers[1].stall_s) == (2, pytest.approx(2.0))
    assert figures.workers[1].speed == pytest.approx(800 / 12)
    assert (figures.workers[1].held, figures.workers[1].held_s) == (0.25, pytest.approx(2.0))


def test_a_machine_that_is_slow_for_a_whole_step_was_not_stuck(make_record):
    slow = make_record(4, (100.0, 10.0), (100, 100), slowest_s=(0.1, 1.0), micro_batches=(10, 10))
    figures = summarise([*(stalled(make_record, k, 0.0) for k in range(4)), slow])
    assert figures.stuck == 0
    assert figures.limit == pytest.approx(1000 / (4 + 200 / 110))


def with_deadline(make_record, step, samples, *, behind=(0, 0), unfinished_s=(0.0, 0.0), late_s=(0.0, 0.0), **more):
    """Two machines of 100 samples/s with micro-batches of 10; rounds close after a second and are free."""
    fields = {"deadline_s": 1.0, "wall_s": 1.0, "planned": (120, 120), "slowest_s": (0.1, 0.1), "behind": behind}
    fields |= {"unfinished_s": unfinished_s, "late_s": late_s, "micro_batches": tuple(-(-n // 10) for n in samples)}
    return make_record(step, (100.0, 100.0), samples, **(fields | more))


def one_stall(make_record):
    """Worker 1 is stuck from 0.6 s into step 2 until 0.3 s into step 4: 1.7 s, of which 0.1 were usual."""
    return [
        with_deadline(make_record, 0, (100, 100)),
        with_deadline(make_record, 1, (100, 100)),
        with_deadline(make_record, 2, (100, 60), unfinished_s=(0.0, 0.4)),
        with_deadline(make_record, 3, (100, 0), unfinished_s=(0.0, 1.0), behind=(0, 1)),
        with_deadline(make_record, 4, (100, 70), late_s=(0.0, 1.3)),
        with_deadline(make_record, 5, (100, 100)),
    ]


def test_a_late_micro_batch_counts_against_its_worker_and_not_against_the_round(make_record):
    figures = summarise(one_stall(make_record))
    late = figures.workers[1]
    assert (late.missed, late.stalls, late.stall_s) == (1, 1, pytest.approx(1.6))
    assert late.stuck == pytest.approx(1.6 / 6)
    assert late.cut == pytest.approx(0.1 / 6)
    assert late.speed == pytest.approx(430 / (4.3 + 1.6))
    # Nobody waited and rounds were free: all that is lost is the micro-batch that was cut off.
    assert figures.of_limit == pytest.approx(1 - 0.5 * 0.1 / 6)
    assert figures.waiting == pytest.approx(0, abs=1e-9)
    assert (figures.deadlines, figures.closed_without) == (6, 1)
    assert [w.blamed for w in figures.workers] == [0, 0]


def test_waiting_for_everybody_would_have_cost_the_whole_stall(make_record):
    figures = summarise(one_stall(make_record))
    assert figures.patient == pytest.approx(1030 / (1030 / 200 + 1.6))
    assert [w.would_hold for w in figures.workers] == pytest.approx([0, 1])


def test_a_worker_that_a_deadline_just_misses_was_cut_off_and_not_stuck(make_record):
    records = [
        with_deadline(make_record, 0, (100, 100)),
        with_deadline(make_record, 1, (100, 90), unfinished_s=(0.0, 0.1)),
        with_deadline(make_record, 2, (100, 95), late_s=(0.0, 0.05)),
    ]
    worker = summarise(records).workers[1]
    assert (worker.stalls, worker.stuck, worker.missed) == (0, 0, 0)
    assert worker.cut == pytest.approx(0.15 / 3)


def test_a_round_in_which_all_were_stuck_is_nobodys_waiting(make_record):
    stuck = with_deadline(make_record, 1, (0, 0), unfinished_s=(1.0, 1.0))
    figures = summarise([with_deadline(make_record, 0, (100, 100)), stuck])
    assert (figures.samples, figures.closed_without, figures.waiting) == (200, 1, 0)
    assert figures.stuck == pytest.approx((1.0 - 0.1) / 2)
    assert figures.limit == pytest.approx(200 / 1.9)


def test_a_share_that_the_cut_off_leaves_out_is_work_done_again(make_record):
    record = make_record(
        0, (100.0, 100.0), (100, 0), wait_for=1, planned=(100, 100), seconds=(1.0, 0.8), unfinished_s=(0.0, 0.2),
        slowest_s=(0.1, 0.1), micro_batches=(10, 0), wall_s=1.0, deadline_s=None,
    )  # fmt: skip
    figures = summarise([record])
    assert figures.workers[1].missed == 1
    assert figures.cut == pytest.approx(0.5 * 1.0)


def test_the_spread_of_the_count_leaves_out_the_last_step_of_an_epoch(make_record):
    counts = [(100, 80), (100, 120), (10, 10), (100, 80), (100, 120)]
    records = [with_deadline(make_record, k, n, epoch=k // 3) for k, n in enumerate(counts)]
    figures = summarise(records)
    assert figures.count == pytest.approx((180 + 220 + 180) / 3)
    assert figures.spread == pytest.approx(statistics.pstdev([180, 220, 180]) / figures.count)


share = st.integers(0, 1000)
seconds = st.one_of(st.just(0.0), st.just(math.nan), st.floats(1e-6, 1e3))


@given(st.data())
def test_any_record_gives_finite_figures_whose_parts_make_up_the_whole(data):
    size = data.draw(st.integers(1, 5))
    per_worker = st.lists(st.tuples(share, seconds), min_size=size, max_size=size)
    records = []
    for step, pairs in enumerate(data.draw(st.lists(per_worker, max_size=6))):
        samples, own = tuple(n for n, _ in pairs), tuple(s for _, s in pairs)
        wall, round_s = data.draw(st.tuples(seconds, seconds))
        ranks = tuple(range(size))
        late = {
            name: tuple(data.draw(st.lists(seconds, min_size=size, max_size=size)))
            for name in data.draw(st.sets(st.sampled_from(("unfinished_s", "late_s", "slowest_s"))))
        }
        limit = data.draw(st.sampled_from((None, 0.1, 10.0)))
        late |= {"deadline_s": limit, "micro_batches": samples}
        planned = tuple(n + data.draw(st.integers(0, 1)) for n in samples)
        records.append(StepRecord(step, 0, 0, ranks, planned, samples, own, wall_s=wall, round_s=round_s, **late))
    figures = summarise(records)
    ratios = [figures.work, figures.stuck, figures.cut, figures.waiting, figures.round, figures.rest]
    assert all(math.isfinite(r) and r > -1e-9 for r in [*ratios, figures.limit, figures.equal, figures.balanced])
    assert figures.seconds == 0 or sum(ratios) == pytest.approx(1)
    assert all(0 <= w.waiting <= 1 and 0 <= w.last <= 1 for w in figures.workers)
