from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.figures import Figures, own_speeds, summarise
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


def test_records_without_times_or_samples_give_zeros_and_no_error(make_record):
    assert summarise([]) == Figures()
    nothing = summarise([make_record(0, SPEEDS, (0, 0, 0, 0))])
    assert (nothing.samples_per_s, nothing.limit, nothing.equal) == (0, 0, 0)
    untimed = summarise([make_record(0, (1.0, 1.0), (4, 4), seconds=(math.nan, 0.0), wall_s=2.0)])
    assert (untimed.samples_per_s, untimed.limit, untimed.waiting) == (4, 0, 0)


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
        records.append(StepRecord(step, 0, 0, ranks, samples, samples, own, wall_s=wall, round_s=round_s))
    figures = summarise(records)
    ratios = [figures.work, figures.waiting, figures.round, figures.rest]
    assert all(math.isfinite(r) and r > -1e-9 for r in [*ratios, figures.limit, figures.equal, figures.balanced])
    assert figures.seconds == 0 or sum(ratios) == pytest.approx(1)
    assert all(0 <= w.waiting <= 1 and 0 <= w.last <= 1 for w in figures.workers)
