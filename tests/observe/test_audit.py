from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import record

from paceline.observe.analysis.audit import audit, audit_verdict
from paceline.observe.log.reader import RunLog

FINISHED = {"event": "end", "reason": "finished"}


def log(*records, end=FINISHED, loops=({"first_step": 0},)):
    return RunLog(path=Path(), records=records, times=(0.0,) * len(records), end=end, loops=loops)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=20))
def test_twice_and_missing_agree_with_counting_positions_one_by_one(spans):
    pieces = [[start, start + length] for start, length in spans]
    (found,) = audit(log(record(0, (1,), speeds=(1.0,), ranges=[pieces])))
    times: dict[int, int] = {}
    for start, stop in pieces:
        for position in range(start, stop):
            times[position] = times.get(position, 0) + 1
    assert found.twice == sum(count > 1 for count in times.values())
    assert found.missing == sum(position not in times for position in range(max(times)))


def test_an_epoch_dealt_in_any_order_is_sound():
    (found,) = audit(
        log(record(0, (10, 10), ranges=[[[10, 20]], [[0, 10]]]), record(1, (5, 5), ranges=[[[25, 30]], [[20, 25]]]))
    )
    assert found.sound
    assert (found.counted, found.whole) == (30, True)


def test_an_epoch_that_is_still_open_is_not_blamed_for_what_is_still_in_a_queue():
    (found,) = audit(log(record(0, (5, 5), ranges=[[[0, 5]], [[50, 55]]]), end=None))
    assert found.sound
    assert not found.whole


@pytest.mark.parametrize(("dealt", "whole"), [(40, False), (20, True), (None, False)])
def test_an_epoch_in_which_the_script_left_its_loop_is_not_missing_the_rest(dealt, whole):
    left = ({"event": "left", "step": 1},)
    loops = ({"first_step": 0, "dealt": dealt}, {"first_step": 1, "dealt": 10})
    records = record(0, (20,), speeds=(1.0,), ranges=[[[0, 20]]]), record(1, (10,), speeds=(1.0,), ranges=[[[0, 10]]])
    first, second = audit(replace(log(*records, loops=loops), others=left))
    assert (first.sound, first.whole, first.missing) == (True, whole, 0)
    assert (second.sound, second.whole) == (True, True)


def test_after_a_resume_in_mid_epoch_what_came_before_is_not_missing():
    (found,) = audit(log(record(7, (5, 5), ranges=[[[50, 55]], [[60, 65]]])))
    assert found.sound


@pytest.mark.parametrize(("start", "whole"), [(0, True), (50, False)])
def test_a_run_that_went_on_from_a_checkpoint_may_have_begun_in_the_middle_of_an_epoch_or_not(start, whole):
    loops = ({"first_step": 7, "dealt": 60},)
    first = record(7, (60 - start,), speeds=(1.0,), ranges=[[[start, 60]]])
    second = replace(record(8, (60,), speeds=(1.0,), ranges=[[[0, 60]]]), epoch=first.epoch + 1)
    found = audit(log(first, second, loops=loops))
    assert [(epoch.sound, epoch.whole, epoch.resumed) for epoch in found] == [
        (True, whole, not whole),
        (True, True, False),
    ]
    rest = "in 2 epochs." if whole else "in 1 epoch; of the epoch that was resumed, none twice."
    assert audit_verdict(found) == f"Audit: every sample counted once, {rest}"


@pytest.mark.parametrize(("ranges", "twice", "missing"), [([[[0, 5]], [[4, 9]]], 1, 0), ([[[0, 5]], [[7, 9]]], 0, 2)])
def test_a_sample_counted_twice_or_not_at_all_is_found(ranges, twice, missing):
    (found,) = audit(log(record(0, (5, 5), ranges=ranges)))
    assert (found.twice, found.missing, found.sound) == (twice, missing, False)


def test_a_second_loop_counts_its_first_epoch_anew():
    found = audit(
        log(
            record(0, (5,), ranges=[[[0, 5]]]),
            record(1, (5,), ranges=[[[0, 5]]]),
            loops=({"first_step": 0}, {"first_step": 1}),
        )
    )
    assert [epoch.sound for epoch in found] == [True, True]


def test_a_stream_has_no_positions_to_audit_and_undone_samples_are_counted():
    (found,) = audit(log(record(0, (5, 5), planned=[9, 5], ranges=[])))
    assert (found.recorded, found.undone, found.sound) == (False, 4, False)


@pytest.mark.parametrize("ranges", [[["a", "b"]], [[1]], [[[0, 5, 7]]], [[[-3, 2]]], [None]])
def test_positions_that_make_no_sense_are_not_audited(ranges):
    (found,) = audit(log(record(0, (5,), ranges=ranges)))
    assert not found.recorded
