from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from paceline.observe import EventLog, follow, latest, new_run_dir, read_log
from paceline.observe.log import writer as log_module
from paceline.observe.log.writer import encode
from paceline.records import LOG_VERSION

SPEEDS = (500.0, 500.0, 250.0, 125.0)


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@contextmanager
def ended_after(seconds):
    """Return a stop that comes by itself, so that a follower that misses something fails and does not hang."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    yield stop
    timer.cancel()


def test_what_is_written_is_read_back(tmp_path, make_record, run_event):
    records = [make_record(k, SPEEDS, (93, 93, 47, 23), sums={"correct": 3.0}) for k in range(3)]
    log = EventLog(tmp_path / "deep" / "run")
    log.write("run", **{key: value for key, value in run_event.items() if key not in ("event", "t", "version")})
    log.write("steps", steps=3, epochs=1, first_step=0)
    for record in records:
        log.write("step", **vars(record))
    log.write("evaluate", step=2, result={"accuracy": 0.5})
    log.write("end", reason="finished", text="")
    log.close()
    read = read_log(tmp_path / "deep" / "run")
    assert read.records == tuple(records)
    assert read.run["version"] == LOG_VERSION
    assert read.run["workers"] == run_event["workers"]
    assert [event["event"] for event in read.others] == ["evaluate"]
    assert read.loops[0]["steps"] == 3
    assert read.end is not None
    assert read.end["reason"] == "finished"
    assert read.unreadable == 0
    assert all(abs(t - time.time()) < 60 for t in read.times)
    assert read_log(log.path) == read


def test_not_a_number_is_null_in_the_log_and_seconds_come_back_as_nan(tmp_path, make_record):
    log = EventLog(tmp_path)
    log.write(
        "step", **vars(make_record(0, SPEEDS, (1, 1, 1, 1), seconds=(math.nan, math.inf, 1.0, 2.0), loss=math.nan))
    )
    log.close()
    line = json.loads(log.path.read_text())
    assert line["seconds"] == [None, None, 1.0, 2.0]
    assert line["loss"] is None
    record = read_log(tmp_path).records[0]
    assert math.isnan(record.seconds[0])
    assert record.seconds[2:] == (1.0, 2.0)


def test_numpy_values_paths_and_odd_keys_are_written_as_plain_json(tmp_path):
    event = {"event": "x", "n": np.int64(3), "a": np.array([1.0, np.nan]), "path": tmp_path, ("k",): {1, 2}}
    assert json.loads(encode(event)) == {
        "event": "x",
        "n": 3,
        "a": [1.0, None],
        "path": str(tmp_path),
        "('k',)": [1, 2],
    }


def test_events_reach_the_file_within_half_a_second_without_a_close(tmp_path):
    log = EventLog(tmp_path)
    log.write("note", text="a")
    wait_until(lambda: log.path.read_text().count("\n") == 1)
    assert log_module.PERIOD_S < 0.5
    log.close()


def test_a_flush_returns_when_every_event_is_in_the_file(tmp_path):
    log = EventLog(tmp_path)
    for number in range(300):
        log.write("note", number=number)
        if number % 100 == 99:
            log.flush()
            assert len((tmp_path / "events.jsonl").read_text().splitlines()) == number + 1
    log.close()
    log.flush()  # nothing is left, and nobody is waited for


def test_writing_costs_the_training_thread_under_thirty_microseconds(tmp_path, make_record):
    log, record, costs = EventLog(tmp_path), make_record(0, SPEEDS, (93, 93, 47, 23)), []
    for _ in range(500):
        started = time.perf_counter()
        log.write("step", **vars(record))
        costs.append(time.perf_counter() - started)
    log.close()
    assert sorted(costs)[250] < 30e-6


def test_a_vanished_folder_warns_once_and_the_run_goes_on(tmp_path, caplog):
    log = EventLog(tmp_path / "run")
    log.write("note", text="a")
    wait_until(lambda: log.path.exists() and log.path.read_text())
    shutil.rmtree(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        log.write("note", text="b")
        wait_until(lambda: caplog.records)
        for _ in range(10):
            log.write("note", text="c")
        log.close()
    assert len(caplog.records) == 1
    assert "was deleted" in caplog.text


def test_a_folder_that_cannot_be_made_warns_once_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        log = EventLog(tmp_path / "file")
        log.write("note", text="a")
        log.close()
    assert len(caplog.records) == 1
    assert "goes on without a log" in caplog.text


@pytest.mark.slow
def test_a_full_disk_warns_once_and_nothing_is_lost_when_there_is_room_again(tmp_path, caplog, monkeypatch):
    real, full = log_module.os.write, threading.Event()

    def write(file, data):
        if not full.is_set():
            return real(file, data)
        if len(data) > 10:  # a full disk takes a part of the line first
            return real(file, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_module.os, "write", write)
    with caplog.at_level(logging.WARNING):
        log = EventLog(tmp_path)
        full.set()
        log.write("note", text="a")
        wait_until(lambda: caplog.records)
        log.write("note", text="b")
        time.sleep(2 * log_module.PERIOD_S)
        full.clear()
        log.close()
    assert [event["text"] for event in read_log(tmp_path).others] == ["a", "b"]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_an_event_that_cannot_be_encoded_is_left_out_and_the_others_are_kept(tmp_path, caplog):
    circle: list[object] = []
    circle.append(circle)
    log = EventLog(tmp_path)
    log.write("note", text="a", circle=circle)
    log.write("note", text="b")
    log.close()
    assert [event["text"] for event in read_log(tmp_path).others] == ["b"]
    assert len(caplog.records) == 1


def test_what_the_disk_could_not_take_in_time_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MOST_EVENTS", 3)
    monkeypatch.setattr(log_module, "PERIOD_S", 60.0)
    log = EventLog(tmp_path)
    for k in range(5):
        log.write("note", text=str(k))
    log.close()
    texts = [event["text"] for event in read_log(tmp_path).others]
    assert texts == ["2 events are missing here: the disk did not keep up", "0", "1", "2"]


def test_writing_after_close_and_closing_twice_are_harmless(tmp_path):
    log = EventLog(tmp_path)
    log.close()
    log.write("note", text="late")
    log.close()
    assert log.path.read_text() == ""


def test_a_cut_off_last_line_is_left_out_and_a_later_writer_starts_a_new_one(tmp_path, make_record):
    log = EventLog(tmp_path)
    log.write("step", **vars(make_record(0, SPEEDS, (1, 1, 1, 1))))
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + whole[: len(whole) // 2])
    read = read_log(tmp_path)
    assert (len(read.records), read.unreadable) == (1, 1)
    again = EventLog(tmp_path)
    again.write("step", **vars(make_record(1, SPEEDS, (1, 1, 1, 1))))
    again.close()
    assert [record.step for record in read_log(tmp_path).records] == [0, 1]


def test_a_log_of_before_names_the_number_format_as_it_was_called_then(tmp_path):
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run", "wire": "bf16"}) + "\n")
    assert read_log(tmp_path).run["comm_dtype"] == "bf16"


def test_unknown_events_and_fields_are_kept_or_ignored_and_broken_steps_counted(tmp_path, make_record):
    step = {"event": "step", "t": 1.0, **make_record(0, SPEEDS, (1, 1, 1, 1)).to_json()}
    lines = [
        {"event": "comet", "tail": 3}, {**step, "colour": "blue"}, {"event": "step", "step": 1},
        {**step, "seconds": ["a"] * 4}, {**step, "samples": [1]}, 17, {"no": "event"},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n\xff\n")
    read = read_log(tmp_path)
    assert [event["event"] for event in read.others] == ["comet"]
    assert len(read.records) == 1
    assert read.unreadable == 6


def test_a_newer_version_is_read_with_a_warning(tmp_path, caplog):
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run", "version": LOG_VERSION + 2, "name": "x"}) + "\n")
    assert read_log(tmp_path).run["name"] == "x"
    assert "newer Paceline" in caplog.text


def test_of_several_starts_in_one_folder_the_last_counts(tmp_path, make_record):
    for name in ("first", "second"):
        log = EventLog(tmp_path)
        log.write("run", name=name)
        log.write("step", **vars(make_record(0, (1.0,), (1,))))
        log.close()
    read = read_log(tmp_path)
    assert (read.run["name"], len(read.records)) == ("second", 1)


def test_an_empty_log_is_a_run_without_steps_and_a_missing_one_an_error(tmp_path):
    (tmp_path / "events.jsonl").touch()
    assert read_log(tmp_path).records == ()
    with pytest.raises(ValueError, match="give a run's folder"):
        read_log(tmp_path / "nothing")


def test_follow_yields_events_as_they_are_written_and_ends_when_stopped(tmp_path):
    stop, seen = threading.Event(), []
    path = tmp_path / "run"
    reader = threading.Thread(target=lambda: seen.extend(follow(path, stop=stop, poll_s=0.01)))
    reader.start()
    log = EventLog(path)
    for k in range(100):
        log.write("note", n=k)
        time.sleep(0.002)
    log.close()
    stop.set()
    reader.join(30)
    assert [event["n"] for event in seen] == list(range(100))


def test_follow_waits_for_the_rest_of_a_partial_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note", "n": 0}\n{"event": "no')
    with ended_after(30.0) as stop:
        events = follow(path, stop=stop, poll_s=0.01)
        assert next(events)["n"] == 0
        with path.open("a") as stream:
            stream.write('te", "n": 1}\n')
        assert next(events)["n"] == 1
        events.close()


def test_follow_starts_again_when_the_file_is_replaced_by_a_shorter_one(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note", "n": 0, "padding": "long"}\n')
    with ended_after(30.0) as stop:
        events = follow(path, stop=stop, poll_s=0.01)
        assert next(events)["n"] == 0
        path.write_text('{"event": "note", "n": 1}\n')
        assert next(events)["n"] == 1


def test_run_folders_are_unique_and_safe_whatever_the_name(tmp_path):
    folders = [new_run_dir(tmp_path / "runs", name) for name in ("a b/../c;$(x)", "a b/../c;$(x)", "", "ß", "x" * 500)]
    assert len(set(folders)) == 5
    for folder in folders:
        assert folder.parent == tmp_path / "runs"
        assert set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        assert len(folder.name) < 100
    assert folders[2].name.endswith(("-run", "-run-2"))


def test_a_run_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ValueError, match="choose one that can be written"):
        new_run_dir(tmp_path / "runs", "x")


def test_the_latest_run_is_the_one_written_last(tmp_path):
    assert latest(tmp_path) is None
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").touch()
        log_module.os.utime(tmp_path / name / "events.jsonl", (1000 - age, 1000 - age))
    (tmp_path / "empty").mkdir()
    assert latest(tmp_path) == tmp_path / "new"
