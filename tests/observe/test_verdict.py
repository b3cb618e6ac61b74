from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe import RunLog, verdict

SPEEDS = (500.0, 500.0, 250.0, 125.0)


def run_of(make_record, shares, *, steps=40, **more):
    return [make_record(k, SPEEDS, shares, **more) for k in range(steps)]


def test_a_balanced_fleet_is_told_its_speed_its_limit_and_that_nobody_waited(make_record, run_event):
    judged = verdict(run_of(make_record, (93, 93, 47, 23), other_s=0.002), run=run_event)
    assert judged.text.splitlines() == [
        "1,347 samples/s, 98 % of what these 4 machines can do together (1,375).",
        "Equal shares would have run at 498 samples/s, 2.7 times slower.",
        "Worker 3 (cpu, emulated 4x) is the slowest: it did 9 % of the work, "
        "and nobody waited more than 2 % of the time.",
    ]
    assert judged.held_back_by is None


def test_equal_shares_are_told_who_held_them_back_and_what_to_change(make_record, run_event):
    judged = verdict(run_of(make_record, (64, 64, 64, 64)), run=run_event | {"pace": "equal"})
    assert judged.held_back_by == 3
    assert "500 samples/s, 36 % of what" in judged.text
    assert 'pace="adaptive"' in judged.text
    assert "1,375 samples/s are in reach, 2.8 times as fast" in judged.text
    assert "Worker 3 (cpu, emulated 4x) held the fleet back: it was last in every step" in judged.text
    assert "the others spent 67 % of the time waiting" in judged.text


def test_like_machines_with_equal_shares_have_nobody_to_blame(make_record):
    judged = verdict([make_record(k, (100.0, 100.0), (32, 32)) for k in range(10)])
    assert "Nobody held the fleet back: shares are balanced" in judged.text
    assert "Equal shares would have run as fast" in judged.text


def test_workers_that_take_turns_at_being_last_share_the_blame(make_record):
    speeds = [(100.0, 70.0, 100.0), (70.0, 100.0, 100.0), (100.0, 100.0, 70.0)]
    judged = verdict([make_record(k, speeds[k % 3], (32, 32, 32)) for k in range(40)])
    assert judged.held_back_by is None
    assert "took turns at being last" in judged.text


def test_a_share_too_coarse_to_fit_is_told_so(make_record, run_event):
    judged = verdict(run_of(make_record, (93, 93, 47, 64), micro_batches=(12, 12, 6, 1)), run=run_event)
    assert judged.held_back_by == 3
    assert "a smaller micro_batch" in judged.text


def test_the_first_steps_are_left_out_as_warm_up_but_never_more_than_a_quarter(make_record):
    slow_start = [make_record(k, (1.0, 1.0), (8, 8)) for k in range(5)]
    steady = [make_record(k, (100.0, 100.0), (8, 8)) for k in range(5, 30)]
    judged = verdict(slow_start + steady)
    assert judged.warm_up == 5
    assert judged.figures.samples_per_s == pytest.approx(200)
    assert [verdict(steady[:n]).warm_up for n in (0, 1, 3, 4, 8, 20)] == [0, 0, 0, 1, 2, 5]


def test_a_worker_that_sat_out_is_named_and_counts_in_the_limit(make_record, run_event):
    records = run_of(make_record, (64, 64, 64, 64), steps=2) + run_of(make_record, (93, 93, 47, 0))
    judged = verdict(records, run=run_event)
    assert judged.figures.limit == pytest.approx(1375)
    assert "Worker 3 (cpu, emulated 4x) sat out" in judged.text


def test_an_empty_record_and_one_without_samples_get_a_sentence_and_no_error(make_record):
    assert verdict([]).text == "No steps were recorded, so there is nothing to judge."
    assert "nothing to judge" in verdict(run_of(make_record, (0, 0, 0, 0), steps=3)).text
    assert verdict(run_of(make_record, (64, 64, 64, 64), steps=1)).text.startswith("1 step only, warm-up included: 500")


def test_a_lone_worker_is_measured_against_itself(make_record):
    text = verdict([make_record(k, (100.0,), (50,), other_s=0.125) for k in range(20)]).text
    assert text.splitlines()[0] == "80 samples/s on one machine, 80 % of its own compute speed (100)."
    assert "qual shares" not in text
    assert "held" not in text


def test_a_dear_round_a_slow_host_and_skipped_updates_are_mentioned(make_record, run_event):
    records = run_of(make_record, (96, 96, 48, 24), other_s=0.1, round_s=0.1, shortfall_s=(0, 0, 0, 0.032))
    records[7] = make_record(7, SPEEDS, (96, 96, 48, 24), applied=False)
    text = verdict(records, run=run_event).text
    assert "The round took 34 % of the time (97 ms a step)" in text
    assert "too slow to play worker 3 (cpu, emulated 4x): it ran 19 % slower than asked" in text
    assert "1 update was skipped" in text


def test_time_between_steps_is_told_apart_from_time_inside_them(make_record):
    records = tuple(make_record(k, (100.0,), (50,)) for k in range(20))
    log = RunLog(path=Path("x"), records=records, times=tuple(float(k) for k in range(20)))
    judged = verdict(log)
    assert judged.outside == pytest.approx(0.5)
    assert "50 % of the run passed between steps" in judged.text


def test_the_numbers_survive_json_and_carry_the_machines(make_record, run_event):
    judged = verdict(run_of(make_record, (93, 93, 47, 23)), run=run_event)
    data = json.loads(json.dumps(judged.to_json(), allow_nan=False))
    assert data["samples_per_s"] == pytest.approx(judged.figures.samples_per_s)
    assert data["over_equal"] == pytest.approx(judged.over_equal)
    assert data["workers"][3]["machine"] == "cpu, emulated 4x"
    assert data["text"] == judged.text
