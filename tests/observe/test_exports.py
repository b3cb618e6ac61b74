from __future__ import annotations

import csv
import json
import sys

import pytest
from page_runs import calm_run, record, run_event, run_with_a_death, run_with_deadlines, step, write
from summary_writers import calls

from paceline.observe import read_log
from paceline.observe.exports import scalars, write_csv, write_perfetto, write_tensorboard


def log_of(tmp_path, events):
    return read_log(write(tmp_path / "run", events))


@pytest.fixture(params=[calm_run, run_with_a_death, run_with_deadlines], ids=["calm", "death", "deadlines"])
def trace(request, tmp_path):
    path = write_perfetto(log_of(tmp_path, request.param()), tmp_path / "trace.json")
    return json.loads(path.read_text())["traceEvents"]


def ns(event):
    return round(event["ts"] * 1000), round((event["ts"] + event.get("dur", 0)) * 1000)


def test_slices_of_a_track_nest_and_never_cross(trace):
    tracks: dict[int, list] = {}
    for event in trace:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((*ns(event), event["name"]))
    assert len(tracks) == 4
    for slices in tracks.values():
        open_until: list[int] = []
        for start, stop, name in sorted(slices, key=lambda piece: (piece[0], -piece[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert stop >= start
            assert not open_until or stop <= open_until[-1], name
            assert bool(open_until) != name.startswith("step ")  # parts lie within a step, steps within nothing
            open_until.append(stop)


def test_times_are_microseconds_from_the_first_step_on(tmp_path):
    log = log_of(
        tmp_path,
        [
            run_event(1),
            step(0, (5,), speeds=(10.0,), wall_s=0.75, t=1005.0),
            step(1, (5,), speeds=(10.0,), wall_s=0.5, t=1006.0),
        ],
    )
    events = json.loads(write_perfetto(log, tmp_path / "t.json").read_text())["traceEvents"]
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == "step"]
    assert steps == [("step 0", 0.0, 750_000.0), ("step 1", 1_250_000.0, 500_000.0)]


def test_every_track_has_a_name_and_counters_hold_share_speed_and_loss(trace):
    named = {event["tid"] for event in trace if event["name"] == "thread_name"}
    assert named == {event["tid"] for event in trace if event["ph"] == "X"}
    counters = {event["name"] for event in trace if event["ph"] == "C"}
    assert counters == {"share", "samples/s", "loss"}
    assert all(isinstance(v, (int, float)) for e in trace if e["ph"] == "C" for v in e["args"].values())


def test_arrows_lead_from_the_late_worker_into_the_waits_for_it(tmp_path):
    log = log_of(tmp_path, [run_event(), *(step(k, (64,) * 4, speeds=(500.0, 500.0, 500.0, 100.0)) for k in range(3))])
    events = json.loads(write_perfetto(log, tmp_path / "t.json").read_text())["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 3 * 3
    assert {e["tid"] for e in starts.values()} == {4}
    assert {e["tid"] for e in ends.values()} == {1, 2, 3}
    for flow, kind in ((starts, "compute"), (ends, "waiting")):
        for arrow in flow.values():
            around = [e for e in events if e["ph"] == "X" and e["tid"] == arrow["tid"] and e["cat"] == kind]
            assert any(ns(e)[0] <= ns(arrow)[0] < ns(e)[1] for e in around)


def test_a_run_without_steps_is_an_empty_trace(tmp_path):
    events = json.loads(write_perfetto(log_of(tmp_path, [run_event()]), tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["process_name"]


def test_a_run_too_long_for_the_viewer_leaves_its_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.observe.exports.MOST_ROWS", 40)
    events = json.loads(write_perfetto(log_of(tmp_path, calm_run(40)), tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "step"} == {f"step {k}" for k in range(30, 40)}


def test_the_table_holds_a_line_a_step_and_worker_and_reads_back(tmp_path):
    log = log_of(tmp_path, run_with_a_death(3, 2))
    with write_csv(log, tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4 + 2 * 3
    last = rows[-1]
    assert (last["step"], last["worker"], last["samples"], last["deadline_s"]) == ("4", "3", "28", "")
    assert float(last["seconds"]) == log.records[-1].seconds[-1]


def test_a_machine_called_like_a_formula_stays_text_in_a_spreadsheet(tmp_path):
    log = log_of(tmp_path, [run_event(workers=[{"rank": 0, "device": '=cmd()\n,"x"'}]), step(0, (5,))])
    with write_csv(log, tmp_path / "a.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["machine"] == '\'=cmd()\n,"x"'


EVALUATED = {"event": "evaluate", "t": 1500.0, "step": 4, "result": {"correct": 30, "count": 40}}


def check_figures(found):
    """Return the figures of a calm run of five steps and one evaluation, by name and step."""
    assert found["loss", 3] == pytest.approx(0.5)
    assert found["share/worker 3", 0] == 23
    assert found["evaluate/accuracy", 4] == 0.75
    assert len([1 for name, _ in found if name == "loss"]) == 5


def test_tensorboard_gets_every_figure_at_its_step(tmp_path, summary_writer):
    file = write_tensorboard(log_of(tmp_path, [*calm_run(5)[:-1], EVALUATED]), tmp_path / "tb")
    assert file.parent == tmp_path / "tb"
    assert file.name.startswith("events.out.tfevents.")
    check_figures({(tag, step): value for tag, value, step, _ in calls(file)})
    assert {t for tag, _, _, t in calls(file) if tag.startswith("evaluate/")} == {1500.0}


def test_a_second_export_replaces_the_first_and_leaves_other_files_alone(tmp_path, summary_writer):
    log, folder = log_of(tmp_path, calm_run(5)), tmp_path / "tb"
    first, foreign = write_tensorboard(log, folder), folder / "events.out.tfevents.0000000001.there"
    foreign.write_text("")
    second = write_tensorboard(log, folder)
    assert set(folder.iterdir()) == {foreign, second}
    assert first != second


def test_a_figure_beyond_a_small_float_and_a_step_without_a_time_are_written_all_the_same(tmp_path, summary_writer):
    log = log_of(tmp_path, [run_event(1), step(0, (5,), loss=1e99, t=None)])
    told = {tag: (value, t) for tag, value, _, t in calls(write_tensorboard(log, tmp_path / "tb"))}
    assert told["loss"] == (3.4e38, 1000.0)


def test_of_a_long_run_every_few_steps_are_written(tmp_path, summary_writer, monkeypatch):
    monkeypatch.setattr("paceline.observe.exports.MOST_STEPS", 4)
    file = write_tensorboard(log_of(tmp_path, calm_run(10)), tmp_path / "tb")
    assert [step for tag, _, step, _ in calls(file) if tag == "loss"] == [0, 3, 6, 9]


def test_without_tensorboard_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'paceline\[tensorboard\]'$"):
        write_tensorboard(log_of(tmp_path, calm_run(5)), tmp_path / "tb")
    assert not (tmp_path / "tb").exists()


def test_the_real_tensorboard_reads_every_figure_at_its_step(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = write_tensorboard(log_of(tmp_path, [*calm_run(5)[:-1], EVALUATED]), tmp_path / "tb")
    read = reading.EventAccumulator(str(file)).Reload()
    tags = read.Tags()["scalars"]
    check_figures({(tag, event.step): event.value for tag in tags for event in read.Scalars(tag)})


def test_scalars_are_finite_numbers_with_what_was_not_measured_left_out():
    told = scalars(
        record(0, (5, 5), speeds=(10.0, 5.0), loss=None, sums={"correct": 7, "bad": float("nan")}, wall_s=2.0)
    )
    assert told["speed/samples_per_s"] == 5.0
    assert told["compute_s/worker 1"] == 1.0
    assert told["sum/correct"] == 7.0
    assert {"loss", "sum/bad", "time/deadline_s"}.isdisjoint(told)
