from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import record

from paceline.observe.analysis.downsampling import DownsampledRun


def told(records, capacity=800):
    run = DownsampledRun(capacity=capacity)
    for each in records:
        run.add(each, float(each.step))
    return run


@given(steps=st.integers(1, 200), capacity=st.sampled_from([2, 4, 10, 64]))
def test_whatever_the_length_buckets_are_few_in_order_and_lose_no_sample_and_no_second(steps, capacity):
    records = [record(k) for k in range(steps)]
    buckets = told(records, capacity).buckets()
    assert len(buckets) <= capacity
    assert [b.first for b in buckets[1:]] == [b.last + 1 for b in buckets[:-1]]
    assert sum(b.steps for b in buckets) == steps
    assert sum(b.samples for b in buckets) == sum(r.total for r in records)
    assert sum(b.wall_s for b in buckets) == pytest.approx(sum(r.wall_s for r in records))
    assert np.sum([b.done for b in buckets], axis=0).tolist() == [steps * n for n in (93, 93, 47, 23)]


@given(bad=st.integers(0, 99))
def test_one_bad_step_among_many_stays_visible(bad):
    records = [record(k, other_s=5.0 if k == bad else 0.01, loss=99.0 if k == bad else 1.0) for k in range(100)]
    buckets = told(records, 16).buckets()
    holding = [b for b in buckets if b.first <= bad <= b.last]
    slow = 256 / records[bad].wall_s
    assert [b.speed[0] for b in holding] == [pytest.approx(slow)]
    assert [b.loss[2] for b in holding] == [99.0]
    assert all(b.loss[2] == 1.0 for b in buckets if b not in holding)


def test_the_mean_loss_of_a_bucket_is_over_its_steps_however_they_were_merged():
    losses = [float(k * k) for k in range(64)]
    losses[5] = math.nan
    (bucket, *others) = told([record(k, loss=loss) for k, loss in enumerate(losses)], 2).buckets()
    whole = [loss for loss in losses[: bucket.last + 1] if math.isfinite(loss)]
    assert not others
    assert bucket.loss == (min(whole), pytest.approx(sum(whole) / len(whole)), max(whole))


def test_a_step_without_a_loss_leaves_a_gap_and_not_a_zero():
    (bucket,) = told([record(0, loss=None)]).buckets()
    assert all(map(math.isnan, bucket.loss))


def test_the_limit_counts_a_worker_that_sits_out_with_the_speed_it_last_showed():
    buckets = told([record(0, (100, 100), speeds=(100.0, 50.0)), record(1, (200, 0), speeds=(100.0, 50.0))]).buckets()
    assert [b.samples / b.ideal_s for b in buckets] == [pytest.approx(150.0), pytest.approx(150.0)]
    assert buckets[1].idle.tolist() == [0.0, 1.0]


def test_workers_that_come_and_go_keep_their_own_columns():
    run = told([record(0, (10, 20), workers=(4, 2)), record(1, (7, 9), workers=(2, 8))], 800)
    assert run.workers == (4, 2, 8)
    first, second = run.buckets()
    assert first.done.tolist() == [10, 20, 0]
    assert second.done.tolist() == [0, 7, 9]
    assert second.present.tolist() == [0, 1, 1]


@pytest.mark.parametrize("unfinished_s", [1.0, 0.0])
def test_a_worker_with_work_and_nothing_done_by_the_deadline_missed_the_round_and_was_not_idle(unfinished_s):
    step = {"planned": [5, 5], "samples": [5, 0], "seconds": [1.0, 0.0], "workers": [0, 1], "deadline_s": 1.0}
    (bucket,) = told([record(0, **step, unfinished_s=[0, unfinished_s])]).buckets()
    assert (bucket.missed.tolist(), bucket.idle.tolist(), bucket.undone) == ([0, 1], [0, 0], 5)


def test_a_micro_batch_cut_off_after_others_that_counted_misses_no_round():
    step = {"planned": [5, 9], "samples": [5, 6], "seconds": [1.0, 0.9], "workers": [0, 1], "deadline_s": 1.0}
    (bucket,) = told([record(0, **step, unfinished_s=[0, 0.1])]).buckets()
    assert (bucket.missed.tolist(), bucket.idle.tolist(), bucket.undone) == ([0, 0], [0, 0], 3)


def test_times_that_are_not_numbers_do_no_harm():
    (bucket,) = told([record(0, (5, 5), speeds=(1.0, 1.0), seconds=[math.nan, 2.0], workers=[0, 1])]).buckets()
    assert bucket.busy_s.tolist() == [0.0, 2.0]
    assert bucket.ideal_s == pytest.approx(10 / 2.5)
