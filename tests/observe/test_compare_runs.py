from __future__ import annotations

import json
import math

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from page_runs import calm_run, run_event, step, write
from typer.testing import CliRunner

from paceline.cli.report import report as command
from paceline.observe import read_log
from paceline.page.side_by_side import compare, smoothed

app = typer.Typer()
app.command()(command)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def adaptive(tmp_path):
    return write(tmp_path / "adaptive", calm_run(60))


@pytest.fixture
def equal(tmp_path):
    events = [run_event(pace="equal"), *(step(k, (64,) * 4) for k in range(40))]
    evaluated = {"event": "evaluate", "t": 1100.0, "step": 39, "result": {"correct": 30, "count": 40}}
    return write(tmp_path / "equal", [*events, evaluated])


@given(st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=30), st.integers(1, 8))
def test_the_smoothed_loss_is_the_mean_of_the_last_few_that_are_numbers(values, window):
    found = smoothed(np.array(values), window)
    for place, mean in enumerate(found):
        good = [v for v in values[max(0, place + 1 - window) : place + 1] if math.isfinite(v)]
        assert mean == pytest.approx(sum(good) / len(good), abs=1e-9) if good else math.isnan(mean)


def test_time_to_loss_is_taken_to_the_lowest_loss_that_all_reached(adaptive, equal):
    compared = compare([read_log(adaptive), read_log(equal)])
    fast, slow = compared.runs
    assert compared.target == slow.loss.min()
    assert slow.time_to_loss_s == pytest.approx(40 * 0.522)
    # the same losses step by step, so as many steps, each as long as this run's
    assert fast.time_to_loss_s == pytest.approx(40 * 0.198)
    assert fast.verdict.figures.samples_per_s / slow.verdict.figures.samples_per_s == pytest.approx(
        0.522 / 0.198, rel=1e-3
    )


def test_runs_that_were_equally_soon_are_not_said_to_take_from_a_time_to_the_same_time(adaptive, tmp_path):
    told = call(adaptive, write(tmp_path / "again", calm_run(60)))
    assert told.exit_code == 0, told.output
    assert " it took 12 s, by each of them." in " ".join(told.output.split())


def test_a_loss_that_a_run_never_reached_is_said_so(adaptive, equal):
    told = call(adaptive, equal, "--loss", 0.04)
    assert told.exit_code == 0, told.output
    assert "never" in told.output
    assert json.loads(call(adaptive, equal, "--loss", 0.04, "--json").stdout)["runs"][1]["time_to_loss_s"] is None


def test_a_loss_that_no_run_reached_has_its_row_and_its_sentence(adaptive, equal):
    told = call(adaptive, equal, "--loss", 0.00001).output
    row = next(line.split() for line in told.splitlines() if "1e-05" in line)
    assert row == ["to", "loss", "1e-05", "never", "never"]
    assert "No run came down to a loss of 1e-05." in " ".join(told.split())


@pytest.mark.parametrize("loss", ["nan", "inf", "0", "-1"])
def test_a_loss_that_is_no_number_above_0_is_refused_in_one_line(adaptive, equal, loss):
    told = call(adaptive, equal, f"--loss={loss}")
    assert told.exit_code == 2
    assert told.stderr == f"paceline: report: the loss to reach must be a number above 0, not {loss}\n"


def test_the_table_names_the_runs_apart_and_the_sentence_says_who_was_fastest(adaptive, equal):
    result = call(adaptive, equal)
    flat = " ".join(result.output.split())
    assert "adaptive (digits) was the fastest: 1,293 samples/s, 2.6 times equal (digits)." in flat
    assert [run.name for run in compare([read_log(equal), read_log(equal)]).runs] == [
        "1: digits (equal)",
        "2: digits (equal)",
    ]


def test_runs_of_one_name_and_pace_go_by_their_folders_from_where_these_differ(tmp_path):
    logs = [read_log(write(tmp_path / f"20261115-{hour}-digits", calm_run(20))) for hour in ("195719", "200123")]
    assert [run.name for run in compare(logs).runs] == ["195719-digits", "200123-digits"]


def test_runs_are_drawn_as_one_page_with_names_escaped(adaptive, tmp_path):
    pytest.importorskip("plotly")
    bad = write(tmp_path / "bad", [run_event(name="<img src=x>", pace="<b>"), *(step(k, loss=None) for k in range(20))])
    result = call(adaptive, bad, "-o", tmp_path / "new" / "c.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "new" / "c.html").read_text()
    assert "<img" not in text.rpartition("</script>")[0].rpartition("<script type=")[2]
    assert "&lt;img src=x&gt;" in text
    assert "Loss over time" in text


def test_the_bars_lie_so_that_long_names_have_room(adaptive, equal):
    from paceline.page.side_by_side import _bars

    picture = _bars(compare([read_log(adaptive), read_log(equal)]))
    assert picture.data[0]["orientation"] == "h"
    assert picture.data[0]["y"] == ["adaptive (digits)", "equal (digits)"]
    assert picture.layout["yaxis"]["automargin"]


def test_what_only_one_run_or_only_several_have_is_refused_in_one_line(adaptive, equal, tmp_path):
    for words, said in (
        ((adaptive, "--loss", 0.1), "--loss compares runs: name two or more"),
        ((adaptive, equal, "--csv", tmp_path / "a.csv"), "--csv is of one run: name one"),
        ((adaptive, equal, "--html"), "the page of several runs needs its name: write -o compared.html"),
        ((adaptive, equal, "--html", "mine.html"), "the page of several runs needs its name: write -o mine.html"),
    ):
        result = call(*words)
        assert (result.exit_code, result.stderr) == (2, f"paceline: report: {said}\n")


def test_an_empty_run_or_no_run_is_one_line_and_exit_code_2(adaptive, tmp_path):
    empty = write(tmp_path / "empty", [run_event()])
    for words in ((adaptive, empty), (adaptive, tmp_path / "nowhere")):
        result = call(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith("paceline: report: ")
        assert result.stderr.count("\n") == 1
