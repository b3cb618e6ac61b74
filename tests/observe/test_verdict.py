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
    assert 'pace="auto"' in judged.text
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


@pytest.mark.parametrize("pace", ["equal", "adaptive"])
def test_a_run_of_warm_up_alone_is_told_its_speed_and_given_no_advice(make_record, run_event, pace):
    def told(steps):
        return verdict(run_of(make_record, (64, 64, 64, 64), steps=steps, other_s=0.2), run=run_event | {"pace": pace})

    short = told(3)
    assert short.text.splitlines() == [
        "3 steps only, warm-up included: 360 samples/s, 26 % of what these 4 machines can do together (1,375).",
        "Too short to tell who held the fleet back or what to change.",
    ]
    assert (short.held_back_by, short.in_reach) == (None, None)
    assert told(8).in_reach.pace in told(8).text


def test_a_lone_worker_is_measured_against_itself(make_record):
    text = verdict([make_record(k, (100.0,), (50,), other_s=0.125) for k in range(20)]).text
    assert text.splitlines()[0] == "80 samples/s on one machine, 80 % of its own compute speed (100)."
    assert "qual shares" not in text
    assert "held" not in text


def test_a_dear_round_a_slow_host_and_skipped_updates_are_mentioned(make_record, run_event):
    records = run_of(make_record, (96, 96, 48, 24), other_s=0.1, round_s=0.1, shortfall_s=(0, 0, 0, 0.032))
    records[7] = make_record(7, SPEEDS, (96, 96, 48, 24), applied=False)
    text = verdict(records, run=run_event).text
    assert "The round took 34 % of the time (97 ms per step)" in text
    assert "too slow to play worker 3 (cpu, emulated 4x): it ran 20 % slower than asked" in text
    assert "1 update was skipped" in text


def test_a_worker_that_froze_once_is_not_the_hosts_slowness(make_record, run_event):
    records = run_of(make_record, (96, 96, 48, 24))
    seconds = (0.192, 0.192, 3.192, 0.192)
    records[20] = make_record(
        20, SPEEDS, (96, 96, 48, 24), seconds=seconds, wall_s=3.192, shortfall_s=(0.0, 0.0, 3.0, 0.0)
    )
    text = verdict(records, run=run_event).text
    assert "Worker 2 (cpu, emulated 2x) held everybody up" in text
    assert "too slow to play" not in text


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


def joint_run(make_record, steps=40):
    """Deadlines of 0.2 s. Worker 3 is stuck in every eighth step, until well into the next one but one."""
    records = []
    for k in range(steps):
        begins, stuck, ends = (k % 8 == place for place in (4, 5, 6))
        samples = (100, 100 - 20 * (k % 2), 50, 0 if stuck else 12 if ends else 20)
        fields = {
            "planned": (120, 120, 60, 30),
            "deadline_s": 0.2,
            "wall_s": 0.21,
            "round_s": 0.01,
            "micro_batches": tuple(-(-n // 5) for n in samples),
            "slowest_s": tuple(5 / speed if n else 0.0 for n, speed in zip(samples, SPEEDS)),
            "unfinished_s": (0.0, 0.0, 0.0, 0.2 if stuck else 0.04 if begins else 0.0),
            "behind": (0, 0, 0, int(stuck)),
            "late_s": (0.0, 0.0, 0.0, 0.3 if ends else 0.0),
        }
        records.append(make_record(k, SPEEDS, samples, **fields))
    return records


def test_a_run_with_deadlines_is_told_who_was_late_and_what_waiting_would_have_cost(make_record, run_event):
    judged = verdict(joint_run(make_record), run=run_event | {"pace": "joint"})
    lines = judged.text.splitlines()
    assert "machines, stuck 5 % of the time, can do together" in lines[0]
    assert lines[1] == (
        "5 of 35 rounds with a deadline closed without one worker: worker 3 (cpu, emulated 4x) in 5 "
        "(stuck 5 times, each for about 295 ms)."  # 300, but the first one began during warm-up
    )
    assert lines[2] == (
        "By an estimate, waiting for everybody would have taken 1.13 times as long, mostly for worker 3 "
        "(cpu, emulated 4x), equal shares 2.7 times."
    )  # 256 samples at 1,375/s, 0.01 s and 5/35 of 0.295 s are 0.24 s, against 0.21 s
    assert lines[3].startswith("About 1 % of the work was cut off and done again. A step counted 25")
    assert "give or take" in lines[3]
    assert judged.held_back_by is None
    assert "adaptive" not in judged.text


def test_deadlines_that_gained_nothing_are_told_so(make_record, run_event):
    records = run_of(make_record, (96, 96, 48, 24), deadline_s=0.2, unfinished_s=(0.0,) * 4)
    text = verdict(records, run=run_event | {"pace": "joint"}).text
    assert "35 of 35 rounds had a deadline, and everybody had something done by then." in text
    assert "Waiting for everybody would have taken as long, by an estimate." in text
    assert "cut off" not in text
    assert "give or take" not in text


def test_deadlines_that_lose_work_are_told_that_waiting_is_better(make_record, run_event):
    records = run_of(
        make_record, (96, 96, 48, 0), planned=(96, 96, 48, 24), wait_for=3, deadline_s=None, wall_s=0.3,
        seconds=(0.192, 0.192, 0.192, 0.18), unfinished_s=(0.0, 0.0, 0.0, 0.012), micro_batches=(12, 12, 12, 0),
    )  # fmt: skip
    whole = run_of(make_record, (96, 96, 48, 24), steps=8, micro_batches=(12, 12, 12, 12))
    text = verdict([*whole, *records], run=run_event | {"pace": "cutoff"}).text
    assert "40 of 40 rounds with a deadline closed without one worker: worker 3 (cpu, emulated 4x) in 40." in text
    assert 'pace="joint" counts what is finished' in text


def test_adaptive_shares_under_stalls_are_told_that_a_deadline_does_not_wait(make_record, run_event):
    def step(k):
        stall = 1.1 if k % 10 == 9 else 0.0
        samples = (96, 96, 48, 24)
        seconds = (0.192, 0.192, 0.192 + stall, 0.192)
        slowest = (0.016, 0.016, 0.016 + stall, 0.016)
        more = {"seconds": seconds, "slowest_s": slowest, "micro_batches": (12, 12, 12, 12), "wall_s": 0.2 + stall}
        return make_record(k, SPEEDS, samples, **more)

    judged = verdict([step(k) for k in range(55)], run=run_event)
    assert judged.held_back_by == 2
    assert "stuck 9 % of the time" in judged.text  # a quarter of 5 times 1.1 s in 15.5 s
    assert (
        "Worker 2 (cpu, emulated 2x) held everybody up in 10 % of the steps, each time for about 1 s, and the others "
        'spent 35 % of the time waiting for it. pace="joint" does not wait for it: up to 1,200 samples/s are in reach.'
    ) in judged.text


def test_adaptive_workers_that_take_turns_are_told_so_too(make_record, run_event):
    speeds = [(100.0, 50.0, 100.0), (50.0, 100.0, 100.0), (100.0, 100.0, 50.0)]
    records = [make_record(k, speeds[k % 3], (32, 32, 32), micro_batches=(4, 4, 4)) for k in range(40)]
    text = verdict(records, run=run_event).text
    assert "In 100 % of the steps one held the others up, each time for about 320 ms." in text
    assert 'pace="joint" does not wait for anybody: up to 250 samples/s are in reach.' in text


def test_joint_without_deadlines_is_not_sent_to_adaptive(make_record, run_event):
    text = verdict(run_of(make_record, (64, 64, 64, 64)), run=run_event | {"pace": "joint"}).text
    assert "Worker 3 (cpu, emulated 4x) held the fleet back" in text
    assert "pace=" not in text


def test_of_many_late_workers_the_worst_are_named(make_record):
    size = 8
    records = []
    for k in range(20):
        samples = tuple(0 if k % 2 and rank >= 2 else 10 for rank in range(size))
        late = tuple(0.1 if n == 0 else 0.0 for n in samples)
        records.append(
            make_record(
                k, (100.0,) * size, samples, planned=(10,) * size, deadline_s=0.1, wall_s=0.1, unfinished_s=late
            )
        )
    text = verdict(records).text
    assert "closed without somebody: worker 2 in 8" in text
    assert " and 3 more." in text
    assert "worker 5 in" not in text


def test_sizes_that_auto_found_are_one_line_and_nobody_is_told_to_choose_smaller_ones(make_record, run_event):
    looking = run_of(make_record, (93, 93, 47, 64), steps=3, micro_size=(0, 0, 0, 8), memory_bound=(0, 0, 0, 1))
    found = run_of(
        make_record,
        (93, 93, 47, 64),
        micro_batches=(12, 12, 6, 1),
        micro_size=(32, 0, 16, 8),
        memory_bound=(0, 0, 0, 1),
    )
    judged = verdict(looking + found, run=run_event)
    assert "Micro-batches: worker 0 32, worker 2 16, worker 3 8 (memory)." in judged.text.splitlines()
    assert judged.to_json()["micro_sizes"] == {3: 8, 0: 32, 2: 16}
    assert judged.held_back_by == 3
    assert "smaller micro_batch" not in judged.text
    assert "Micro-batches" not in verdict(run_of(make_record, (93, 93, 47, 23)), run=run_event).text
