"""Every reader of a log, with workers that come and go."""

from __future__ import annotations

import csv
import io
import json

import pytest
from elastic_runs import (
    FIRST,
    KILL,
    KILLED,
    LEADER_DIES,
    SECOND,
    STEPS,
    after_it,
    before_the_leaders_death,
    generation,
    member_step,
    write_elastic,
)
from page_runs import run_event, write
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import app
from paceline.observe import read_log, verdict
from paceline.observe.analysis.downsampling import DownsampledRun
from paceline.observe.analysis.progress import Progress
from paceline.observe.exports import write_csv, write_perfetto
from paceline.observe.views import PlainView, table
from paceline.page.html import picture_data
from paceline.page.live import LiveRun, metrics, server_sent_event
from paceline.page.pictures import membership_text, presence, shares, speed, what_if_words
from paceline.page.whatif import what_if

ALL = [*before_the_leaders_death(), *after_it()]


def until_step(number):
    """Return the events up to and including this step."""
    place = next(k for k, event in enumerate(ALL) if event["event"] == "step" and event["step"] == number)
    return ALL[: place + 1]


def progress_of(events):
    progress = Progress()
    for event in events:
        progress.add(event)
    return progress


def drawn(events, *, width=100, height=30):
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    screen.print(table(progress_of(events).snapshot(), console=screen))
    return screen.file.getvalue().splitlines()


def rows(events, **more):
    lines = drawn(events, **more)
    first = next(k for k, line in enumerate(lines) if line.startswith("worker"))
    return {line.split()[0]: line.rstrip() for line in lines[first + 1 :]}


@pytest.fixture
def log(tmp_path):
    return read_log(write_elastic(tmp_path))


@pytest.fixture
def live(tmp_path):
    run = LiveRun(tmp_path)
    for event in ALL:
        run.add(event)
    return run


def test_the_table_shows_who_left_and_why_among_those_at_work():
    shown = rows(until_step(KILL + 2))
    assert list(shown) == ["0", "1", "2", "3"]
    assert shown["1"].endswith("left: killed by signal 9")
    assert not shown["0"].endswith("signal 9")


def test_after_a_while_only_those_who_are_there_have_a_line():
    late = [event | {"t": event["t"] + 30.0} if event.get("step", 0) > KILL + 2 else event for event in until_step(40)]
    assert list(rows(late)) == ["0", "2", "3"]


def test_between_the_death_and_the_next_step_the_dead_one_already_counts_as_gone():
    place = next(k for k, event in enumerate(ALL) if event.get("number") == 2)
    shown = rows(ALL[: place + 1])
    assert shown["1"].endswith("left: killed by signal 9")
    assert len(progress_of(ALL[: place + 1]).snapshot().present) == 3


def test_a_joiner_has_a_line_at_once_and_its_machine_with_it():
    place = next(k for k, event in enumerate(ALL) if event.get("number") == 3)
    before_its_first_step = rows(ALL[: place + 1])
    assert before_its_first_step["4"].split() == ["4", "cpu", "0", "-", "-", "joined"]
    assert "93" in rows(until_step(61))["4"]


def test_lines_are_by_identity_whatever_the_ranks():
    back = [
        run_event(transport="elastic"),
        *(member_step(k, FIRST, 1, 0, float(k)) for k in range(5)),
        generation(2, 5, (0, 2, 3), left=(1,), t=5.0),
        *(member_step(k, SECOND, 2, 0, float(k)) for k in range(5, 8)),
        generation(3, 8, (0, 2, 3, 1), joined=(1,), t=8.0),
        *(member_step(k, (0, 2, 3, 1), 3, 0, float(k)) for k in range(8, 10)),
    ]
    shown = rows(back)
    assert list(shown) == ["0", "1", "2", "3"]
    assert shown["1"].endswith("joined")
    assert "left" not in "".join(shown.values())


def test_a_step_that_turned_out_void_is_not_shown_as_the_newest():
    place = next(k for k, event in enumerate(ALL) if event.get("number") == 4)
    assert progress_of(ALL[:place]).snapshot().step == LEADER_DIES + 1
    assert progress_of(ALL[: place + 1]).snapshot().step == LEADER_DIES


def test_a_large_fleet_says_in_its_groups_who_left():
    size = 100
    members, rest = tuple(range(size)), tuple(k for k in range(size) if k not in (17, 18))

    def wide(k, workers, number):
        shares = [10] * len(workers)
        record = member_step(k, FIRST, number, 0, float(k)) | {"ranges": [], "forecast_s": None}
        return record | {
            "workers": list(workers), "planned": shares, "samples": shares, "seconds": [0.1] * len(workers),
            "micro_batches": shares,
        }  # fmt: skip

    events = [
        run_event(transport="elastic"),
        wide(0, members, 1),
        generation(2, 1, rest, left=(17, 18), t=0.5),
        wide(1, rest, 2),
    ]
    shown = rows(events, height=40)
    (group,) = [label for label, line in shown.items() if "left" in line]
    assert (group, shown[group][-6:]) == ("16-19", "2 left")
    assert shown[group].split()[1] == "20"  # the shares of the two that stayed


def test_plain_lines_tell_who_left_and_who_joined():
    out = io.StringIO()
    view = PlainView(out, clock=lambda: 0.0)
    for event in ALL:
        view.show(event)
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("worker")] == [
        f"worker 1 {KILLED}; 3 workers go on from step 20",
        "worker 4 joined at step 60: 4 workers",
        f"worker 0 {KILLED}; 3 workers go on from step 80",
    ]
    assert "shares 47 23 93" in lines[-1]


def test_autosaves_are_no_news_and_saves_are():
    out = io.StringIO()
    view = PlainView(out)
    view.show({"event": "save", "step": 7, "path": "auto.pt", "automatic": True})
    view.show({"event": "save", "step": 9, "path": "best.pt"})
    assert out.getvalue() == "saved step 9 to best.pt\n"


def test_the_live_page_counts_each_step_once_and_knows_who_is_there(live, log):
    assert live.steps == STEPS
    assert live.samples == sum(record.total for record in log.records)
    assert {row.worker for row in live.snapshot().present} == {2, 3, 4}
    message = live.full()
    server_sent_event(message)
    assert f"Worker 1 {KILLED} at step 20; the others went on after" in message["parts"]["verdict"]
    assert message["parts"]["verdict"].count("joined at step 60") == 1
    assert "Audit" not in message["parts"]["verdict"]  # it holds the last steps only
    assert "3 workers go on from step 80" in message["parts"]["notes"]


def test_the_live_picture_is_the_reports(live, log):
    report = DownsampledRun.from_records(log.records, log.times)
    mine, theirs = live._downsampled.buckets(), report.buckets()
    assert [(b.first, b.last, b.samples) for b in mine] == [(b.first, b.last, b.samples) for b in theirs]
    assert [b.present.tolist() for b in mine] == [b.present.tolist() for b in theirs]


def test_a_late_line_of_a_frozen_leader_is_not_counted_again_on_the_live_page(live):
    live.add(member_step(79, FIRST, 3, 0, 2000.0))
    live.add(member_step(85, FIRST, 3, 0, 2000.0))
    assert live.steps == STEPS
    assert live.snapshot().step == STEPS


def test_metrics_have_those_present_and_a_counter_of_generations(live):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client reads the format")
    found = {f.name: f.samples for f in parser.text_string_to_metric_families(metrics(live))}
    assert found["paceline_workers"][0].value == 3
    assert found["paceline_generations"][0].value == 4
    assert {sample.labels["worker"] for sample in found["paceline_worker_share_samples"]} == {"2", "3", "4"}


def test_metrics_of_a_fixed_fleet_know_no_generations(tmp_path):
    fixed = LiveRun(tmp_path)
    fixed.add(run_event())
    assert "generations" not in metrics(fixed)


def test_the_strip_has_a_line_a_worker_and_gaps_where_it_was_away(log):
    run_data = picture_data(log, verdict(log))
    strip = presence(run_data)
    assert [name.split()[1] for name in strip.layout["yaxis"]["ticktext"]] == ["0", "1", "2", "3", "4"]
    z = strip.data[0]["z"]
    assert [None in row for row in z] == [True, True, False, False, True]
    assert z[1][19:21] == [2, None]
    assert z[4][59:61] == [None, 2]
    assert z[0][79:81] == [2, None]
    assert "joined at step 60" in strip.caption
    assert membership_text(run_data).count("joined") == 1


def test_shares_and_the_limit_follow_the_members(log):
    run_data = picture_data(log, verdict(log))
    limit = speed(run_data).data[0]["y"]
    assert [round(limit[k]) for k in (10, 40, 70, 90)] == [1375, 875, 1375, 875]
    assert [shape["x0"] for shape in speed(run_data).layout["shapes"]] == [20, 60, 80]
    parts = {trace["name"].split()[1]: trace["y"] for trace in shares(run_data).data}
    assert parts["1"][19] > 0 == parts["1"][20]
    assert parts["4"][59] == 0 < parts["4"][60]


def test_what_if_replays_the_longest_stretch_and_says_so(log):
    tried = what_if(log.records)
    assert (tried.replayed, tried.span) == (40, (20, 59))
    assert tried.trusted("adaptive")
    words = what_if_words(tried, verdict(log))
    assert words.startswith("Steps 20 to 59, the longest stretch with the same workers, are replayed.")
    assert "With equal shares it would have taken" in words


def test_tracks_and_lines_of_the_exports_go_by_identity(log, tmp_path):
    trace = json.loads(write_perfetto(log, tmp_path / "trace.json").read_text())["traceEvents"]
    last = {}
    for event in trace:
        if event["ph"] == "X" and event["name"].startswith("step "):
            last[event["tid"] - 1] = event["name"]
    assert last == {0: "step 79", 1: "step 19", 2: "step 99", 3: "step 99", 4: "step 99"}
    assert any(event["name"] == "worker 4 joined at step 60: 4 workers" for event in trace)
    with write_csv(log, tmp_path / "run.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(record.workers) for record in log.records)
    assert {line["worker"] for line in lines if line["step"] == "80"} == {"2", "3", "4"}
    assert {line["machine"] for line in lines if line["worker"] == "4"} == {"cpu"}


def test_the_report_ends_with_the_audit(tmp_path):
    folder = write_elastic(tmp_path)
    said = CliRunner().invoke(app, ["report", str(folder)])
    assert said.exit_code == 0, said.output
    assert said.output.splitlines()[-1] == "Audit: every sample counted once, in 1 epoch."
    assert "digits: 3 to 4 workers, pace adaptive" in said.output
    rows = [line.split() for line in said.output.splitlines() if line[:1].isdigit() and "cpu" in line]
    assert [row[-1] for row in rows] == ["75", "15", "95", "95", "40"]  # the steps in which each was there


def test_several_runs_side_by_side_say_how_many_workers_each_had(tmp_path):
    folders = [write_elastic(tmp_path / name) for name in "ab"]
    said = CliRunner().invoke(app, ["report", *map(str, folders)])
    assert said.exit_code == 0, said.output
    assert "3 to 4" in said.output


def test_a_log_with_a_generation_and_no_steps_is_read_by_all(tmp_path):
    events = [run_event(transport="elastic"), generation(2, 0, SECOND, left=(1,), t=1.0)]
    log = read_log(write(tmp_path, events))
    assert verdict(log).text == "No steps were recorded, so there is nothing to judge."
    live = LiveRun(tmp_path)
    for event in events:
        live.add(event)
    server_sent_event(live.full())
    assert progress_of(events).snapshot().step is None


def test_a_view_takes_a_frozen_leaders_step_back_when_a_later_generations_record_of_it_comes(tmp_path):
    live = LiveRun(tmp_path)
    frozen = [member_step(k, FIRST, 1, 256 * k, float(k)) for k in range(4)]
    again = [member_step(k, SECOND, 2, 256 * k, float(k)) for k in range(2, 6)]
    for event in (run_event(transport="elastic"), *frozen, *again, generation(1, 0, FIRST, t=9.0), frozen[3]):
        live.add(event)
    assert (live.steps, live.newest.step, live.newest.generation, live.snapshot().step) == (6, 5, 2, 6)
