from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.report import report
from paceline.observe import EventLog, read_log, verdict

app = typer.Typer()
app.command()(report)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path, make_record, run_event):
    log = EventLog(tmp_path / "runs" / "a")
    log.write("run", **{k: v for k, v in run_event.items() if k not in ("event", "t")})
    for k in range(40):
        log.write("step", **vars(make_record(k, (500.0, 500.0, 250.0, 125.0), (93, 93, 47, 23))))
    log.write("end", reason="finished", text="")
    log.close()
    return log.path.parent


def test_the_report_tells_the_run_its_workers_and_the_verdict_from_the_log_alone(folder):
    result = call(folder)
    assert result.exit_code == 0, result.output
    flat = " ".join(result.output.split())
    assert "digits: 4 workers, pace adaptive, combine gradients, gloo" in flat
    assert "finished" in flat
    assert "40 steps, 10,240 samples; the first 5 left out below as warm-up" in flat
    assert "3 cpu 4x 805 9 % 125" in flat
    assert " ".join(verdict(read_log(folder)).text.split()) in flat
    assert call(folder / "events.jsonl").output == result.output


def test_the_report_as_json_is_one_line_of_numbers(folder):
    result = call(folder, "--json")
    assert result.output.count("\n") == 1
    data = json.loads(result.output)
    assert data["limit"] == pytest.approx(1375)
    assert data["name"] == "digits"


def test_without_a_run_the_latest_is_reported(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    assert "digits: 4 workers" in call().output


def test_a_missing_or_empty_log_is_one_line_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "events.jsonl").write_text("\n{not json\n")
    for words in ((), (tmp_path / "nothing",), (tmp_path,)):
        result = call(*words)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("paceline: ")
        assert result.stderr.count("\n") == 1


def test_a_run_killed_before_its_first_step_is_reported_without_an_error(tmp_path, run_event):
    log = EventLog(tmp_path)
    log.write("run", **{k: v for k, v in run_event.items() if k not in ("event", "t")} | {"name": "[bold]x[/nope]"})
    log.close()
    result = call(tmp_path)
    assert result.exit_code == 0, result.output
    assert "[bold]x[/nope]: 4 workers" in result.output
    assert "still running, or killed" in result.output
    assert "No steps were recorded" in result.output
    assert ["3", "cpu", "4x"] in [line.split() for line in result.output.splitlines()], "who was there to begin with"
