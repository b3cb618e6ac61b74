"""Generations: which records stand when workers come and go, and the sentences about it."""

from __future__ import annotations

import json

import pytest
from elastic_runs import (
    FIRST,
    FOURTH,
    KILLED,
    LEADER_DIES,
    SECOND,
    STEPS,
    THIRD,
    after_it,
    before_the_leaders_death,
    generation,
    member_step,
    write_elastic,
)
from hypothesis import given
from hypothesis import strategies as st
from page_runs import calm_run, run_event, write

from paceline.observe import EventLog, follow, read_log, verdict
from paceline.observe.analysis.generations import Departure, change_text, parse_generation
from paceline.observe.words.lines import describe


@pytest.fixture
def log(tmp_path):
    return read_log(write_elastic(tmp_path))


def test_a_step_that_only_the_dead_leader_knew_is_void_and_the_next_leaders_counts(log):
    assert [record.step for record in log.records] == list(range(STEPS))
    assert log.records[LEADER_DIES].workers == FOURTH
    assert log.unreadable == 1  # the line in the middle of which it died


def test_members_are_identities_and_every_machine_is_known(log):
    assert [r.workers for r in log.records[:: STEPS // 5]] == [FIRST, SECOND, SECOND, THIRD, FOURTH]
    assert set(log.machines) == {0, 1, 2, 3, 4}
    assert [(change.step, change.joined, [gone.worker for gone in change.left]) for change in log.changes] == [
        (20, (), [1]),
        (60, (4,), []),
        (80, (), [0]),
    ]


def test_following_a_log_goes_on_over_the_torn_line(tmp_path):
    folder = write_elastic(tmp_path)
    events = []
    for event in follow(folder):
        events.append(event)
        if event["event"] == "end":
            break
    assert len(events) == len(before_the_leaders_death()) + len(after_it())


def test_a_new_leader_appends_on_a_line_of_its_own(tmp_path):
    (tmp_path / "events.jsonl").write_text(json.dumps(run_event(transport="elastic")) + '\n{"event": "st')
    log = EventLog(tmp_path)
    log.write("generation", **{k: v for k, v in generation(2, 0, SECOND, left=(1,), t=0.0).items() if k != "event"})
    log.close()
    read = read_log(tmp_path)
    assert (len(read.changes), read.unreadable) == (1, 1)


def test_elastic_logs_say_version_2_and_others_stay_at_1(tmp_path):
    for transport, version in (("elastic", 2), ("fixed", 1)):
        log = EventLog(tmp_path / transport)
        log.write("run", transport=transport)
        log.close()
        assert read_log(log.path).run["version"] == version


@given(data=st.data())
def test_lines_that_a_leader_wrote_before_it_froze_may_come_at_any_later_time(tmp_path_factory, data):
    """The frozen one's steps 18 to 21 of generation 1 reach the file somewhere after those of generation 2."""
    live = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(18)]
    late = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(18, 22)]
    begin = generation(2, 20, SECOND, left=(0,), t=19.0)
    new = [member_step(k, SECOND, 2, 256 * k, float(k)) for k in range(20, 26)]
    lines = [*live, begin, *new]
    for event in late:
        lines.insert(data.draw(st.integers(len(live) + 1, len(lines))), event)
    folder = tmp_path_factory.mktemp("run")
    write(folder, [run_event(transport="elastic"), *lines])
    stands = [(r.step, r.generation) for r in read_log(folder).records]
    assert stands == [(k, 1 if k < 20 else 2) for k in range(26)]


def test_of_a_step_that_two_leaders_wrote_one_record_counts(tmp_path):
    """The new leader writes again what the old one may not have brought to the disk."""
    old = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(19)]
    again = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(15, 20)]
    new = [member_step(k, SECOND, 2, 256 * k, float(k)) for k in range(20, 25)]
    begin = generation(2, 20, SECOND, left=(0,), t=19.0)
    read = read_log(write(tmp_path, [run_event(transport="elastic"), *old, begin, *again, *new]))
    assert [record.step for record in read.records] == list(range(25))


def test_a_generation_is_no_restart_and_a_second_run_event_is(tmp_path):
    events = [*before_the_leaders_death(), *after_it()]
    assert len(read_log(write(tmp_path / "a", events)).records) == STEPS
    again = read_log(write(tmp_path / "b", [*events, *calm_run(7)]))
    assert (len(again.records), again.changes) == (7, [])


@pytest.mark.parametrize(
    "event",
    [
        {"event": "generation"},
        {"event": "generation", "number": "2", "step": 3, "workers": [0]},
        {"event": "generation", "number": 2, "step": 3, "workers": "all"},
        {"event": "generation", "number": 2, "step": 3, "workers": [0, None]},
    ],
)
def test_a_generation_that_makes_no_sense_changes_nothing(tmp_path, event):
    assert parse_generation(event) is None
    assert describe(event) is None
    read = read_log(write(tmp_path, [*calm_run(5)[:-1], event]))
    assert (len(read.records), read.changes) == (5, [])


def test_odd_entries_are_left_out_and_the_change_is_told(tmp_path):
    event = {"event": "generation", "number": 2, "step": 3, "workers": [0], "left": [{"id": 1}, 7], "joined": None}
    assert describe(event) == ("news", "worker 1 left; 1 worker goes on from step 3")


def test_the_first_generation_is_no_news():
    event = generation(1, 0, FIRST, joined=FIRST, t=0.0)
    assert describe(event) is None


def test_several_changes_at_once_are_one_line():
    change = parse_generation(generation(5, 33, (0, 4, 5), joined=(4, 5), left=(1,), t=0.0))
    assert change is not None
    assert change_text(change) == f"worker 1 {KILLED}; workers 4 and 5 joined; 3 workers go on from step 33"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (KILLED, "left: killed by signal 9"),
        ("left (SIGTERM)", "left: SIGTERM"),
        ("was silent for 2.1 s (frozen, or its network is cut)", "left: silent for 2.1 s"),
        ("ended with exit code 1", "left: ended with exit code 1"),
        ("is gone: its connection closed", "left: its connection closed"),
        ("left", "left"),
    ],
)
def test_a_narrow_place_gets_the_reason_in_short(text, short):
    assert Departure(1, text).short == short


def test_the_verdict_tells_who_left_who_joined_and_how_long_the_others_waited(log):
    judged = verdict(log)
    lines = judged.text.splitlines()
    assert "of what the 3 to 4 machines then there can do together" in lines[0]
    assert lines[-2] == (
        f"Worker 1 {KILLED} at step 20; the others went on after 0.7 s; worker 4 joined at step 60; "
        f"worker 0 {KILLED} at step 80; the others went on after 0.7 s."
    )
    assert lines[-1] == "Audit: every sample counted once, in 1 epoch."
    assert [(w.worker, w.steps) for w in judged.figures.workers] == [(0, 75), (1, 15), (2, 95), (3, 95), (4, 40)]
    data = json.loads(json.dumps(judged.to_json()))
    assert data["moves"][0] == {
        "step": 20,
        "left": [{"worker": 1, "text": KILLED}],
        "joined": [],
        "pause_s": pytest.approx(0.7),
    }


def test_the_limit_is_the_sum_of_the_speeds_of_those_then_there(log):
    parts = {1: 1375.0, 2: 875.0, 3: 1375.0, 4: 875.0}
    kept = log.records[5:]
    ideal = sum(record.total / parts[record.generation] for record in kept)
    assert verdict(log).figures.limit == pytest.approx(sum(record.total for record in kept) / ideal)


def test_many_changes_are_counted_beyond_the_first_few(tmp_path):
    events, number = [run_event(transport="elastic")], 1
    for k in range(30):
        if k and k % 3 == 0:
            number += 1
            away = number % 2 == 0
            members = SECOND if away else FIRST
            moved = {"left": (1,)} if away else {"joined": (1,)}
            events.append(generation(number, k, members, t=float(k), **moved))
        events.append(member_step(k, SECOND if number % 2 == 0 else FIRST, number, 256 * k, float(k)))
    told = verdict(read_log(write(tmp_path, events))).text
    assert told.count("at step") == 6
    assert "later 2 workers left and 1 worker joined." in told


def test_a_lost_sample_and_a_double_one_are_counted_in_the_verdict(tmp_path):
    events = [*before_the_leaders_death(), *after_it()]
    stepped = [event for event in events if event["event"] == "step"]
    stepped[30]["ranges"][0][0][0] += 5
    stepped[-1]["ranges"][0][0][1] -= 2
    stepped[40]["ranges"][1] = stepped[39]["ranges"][1]
    text = verdict(read_log(write(tmp_path, events))).text.splitlines()[-1]
    assert text == "Audit: NOT exact: 54 samples were lost, and 47 samples were counted more than once."


def test_the_end_of_an_epoch_that_nobody_counted_is_lost_too(tmp_path):
    events = [*before_the_leaders_death(), *after_it()]
    del events[-2]  # the last step
    last = verdict(read_log(write(tmp_path, events))).text.splitlines()[-1]
    assert last == "Audit: NOT exact: 163 samples were lost, and 0 samples were counted more than once."


def test_a_run_of_fixed_size_has_no_audit_in_its_verdict(tmp_path):
    assert "Audit" not in verdict(read_log(write(tmp_path, calm_run()))).text


def test_an_unfinished_epoch_is_not_blamed(tmp_path):
    log = read_log(write_elastic(tmp_path, steps=90))
    assert verdict(log).text.splitlines()[-1] == "Audit: no epoch was finished; no sample counted twice so far."


def test_a_frozen_leaders_steps_are_void_though_the_next_leader_died_before_it_announced_itself(tmp_path):
    """Generation 2 made steps 18 to 21 and wrote nothing; generation 3 writes its records again."""
    live = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(18)]
    frozen = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(18, 20)]
    begin = generation(3, 22, (2, 3), left=(0,), t=22.0)
    again = [member_step(k, SECOND, 2, 256 * k, float(k)) for k in range(18, 22)]
    new = [member_step(k, (2, 3), 3, 256 * k, float(k)) for k in range(22, 25)]
    expected = [(k, 1 if k < 18 else 2 if k < 22 else 3) for k in range(25)]
    for number, lines in enumerate(
        (
            [*live, *frozen, begin, *again, *new],
            [*live, begin, *again, *new, *frozen],
            [*live, begin, *frozen, *again, *new],
        )
    ):
        read = read_log(write(tmp_path / str(number), [run_event(transport="elastic"), *lines]))
        assert [(r.step, r.generation) for r in read.records] == expected


def test_a_generation_that_is_announced_late_does_not_make_its_own_records_the_newest(tmp_path):
    begun = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(5)]
    third = [generation(3, 5, (2, 3), t=5.0), *(member_step(k, (2, 3), 3, 256 * k, float(k)) for k in range(5, 9))]
    second = [generation(2, 5, SECOND, t=9.0), member_step(5, SECOND, 2, 256 * 5, 9.0)]
    last = member_step(9, (2, 3), 3, 256 * 9, 10.0)
    read = read_log(write(tmp_path, [run_event(transport="elastic"), *begun, *third, *second, last]))
    assert [(r.step, r.generation) for r in read.records] == [(k, 1 if k < 5 else 3) for k in range(10)]


def write_all(log: EventLog, events) -> None:
    for event in events:
        log.write(event["event"], **{key: value for key, value in event.items() if key not in ("event", "t")})


def test_a_leader_that_wakes_up_writes_no_step_that_the_others_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.observe.log.writer.PERIOD_S", 1e6)  # the queue is written by close alone
    frozen = EventLog(tmp_path)
    write_all(frozen, [run_event(transport="elastic"), *(member_step(k, FIRST, 1, 256 * k, 0.0) for k in range(3))])
    frozen._drain()
    write_all(frozen, (member_step(k, FIRST, 1, 256 * k, 0.0) for k in range(3, 7)))
    frozen.write("note", level="info", text="written in time")
    others = EventLog(tmp_path, goes_on=True)
    begin = generation(2, 5, SECOND, left=(0,), t=0.0)
    write_all(others, [begin, *(member_step(k, SECOND, 2, 256 * k, 0.0) for k in range(5, 9))])
    others.close()
    frozen.close()
    lines = [json.loads(line) for line in others.path.read_text().splitlines()]
    written = [(line["step"], line["generation"]) for line in lines if line["event"] == "step"]
    assert written == [(0, 1), (1, 1), (2, 1), (5, 2), (6, 2), (7, 2), (8, 2), (3, 1), (4, 1)]
    assert lines[-1]["text"] == "written in time"


def test_a_leader_that_never_wrote_learns_from_the_log_that_its_generation_is_over(tmp_path):
    write(tmp_path, [run_event(transport="elastic"), generation(3, 5, (2, 3), t=0.0)])
    late = EventLog(tmp_path, goes_on=True)
    write_all(late, [generation(2, 5, SECOND, t=0.0), *(member_step(k, SECOND, 2, 0, 0.0) for k in (4, 5))])
    late.close()
    assert [record.step for record in read_log(tmp_path).records] == [4]
    assert late.path.read_text().count('"event": "generation"') == 1
