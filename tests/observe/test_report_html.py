from __future__ import annotations

import json

import pytest
import typer
from page_runs import calm_run, write
from typer.testing import CliRunner

from paceline.cli.report import report

pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")
app = typer.Typer()
app.command()(report)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "runs" / "a", calm_run())


def test_html_is_written_beside_the_log_and_its_path_is_said(folder):
    result = call(folder, "--html")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_every_export_is_written_where_asked_for_in_folders_that_are_made(folder, tmp_path, summary_writer):
    out = tmp_path / "new" / "place"
    result = call(
        folder, "-o", out / "a.html", "--perfetto", out / "t.json", "--tensorboard", out / "tb", "--csv", out / "a.csv"
    )
    assert result.exit_code == 0, result.output
    assert {path.name.partition(".")[0] for path in out.iterdir()} == {"a", "t", "tb"}
    assert len(result.stdout.splitlines()) == 4
    assert not (folder / "report.html").exists()


def test_json_beside_an_export_is_still_one_line_of_numbers(folder, tmp_path):
    result = call(folder, "--json", "--csv", tmp_path / "a.csv")
    assert json.loads(result.stdout)["name"] == "digits"
    assert "a.csv" in result.stderr


def test_a_place_that_cannot_be_written_is_one_line_and_exit_code_2(folder, tmp_path, summary_writer):
    (tmp_path / "file").write_text("")
    for option in ("-o", "--perfetto", "--csv", "--tensorboard"):
        result = call(folder, option, tmp_path / "file" / "x")
        assert result.exit_code == 2
        assert result.stderr.startswith("paceline: cannot write")
        assert result.stderr.count("\n") == 1
