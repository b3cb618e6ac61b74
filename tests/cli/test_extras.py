"""What the package says of itself: its extras, and which command needs which."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from shells import SOURCE
from typer.testing import CliRunner

from paceline.cli import app

ROOT = Path(SOURCE).parent


def test_every_extra_leads_somewhere() -> None:
    """An extra that nothing in the repository speaks of promises what is not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [path for part in ("src", "docs", "benchmarks") for path in (ROOT / part).rglob("*.[pm][yd]")]
    texts += [ROOT / "Makefile", ROOT / "CONTRIBUTING.md"]
    spoken = " ".join(path.read_text() for path in texts)
    for extra in set(project["optional-dependencies"]) - {"dev"}:
        assert f"[{extra}]" in spoken or f"extra `{extra}`" in spoken, extra


def test_the_package_says_that_it_is_typed_where_it_runs_and_where_it_lives() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(project["classifiers"])
    assert {"Homepage", "Documentation", "Changes", "Issues"} <= set(project["urls"])


@pytest.mark.parametrize("command", ["report", "watch", "simulate"])
def test_the_help_of_what_draws_pages_names_the_extra(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"]).output.replace("│", " ")
    assert "extra 'view'" in " ".join(said.split())


def test_a_page_without_what_draws_it_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("plotly", "plotly.offline", "starlette", "starlette.applications", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "events.jsonl").write_text('{"event": "run", "t": 0.0, "version": 1, "run_id": "r", "size": 1}\n')
    for extra, command in (
        ("view", ["report", str(tmp_path), "--html"]),
        ("view", ["watch", str(tmp_path)]),
        ("tensorboard", ["report", str(tmp_path), "--tensorboard", str(tmp_path / "board")]),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2, done.output
        assert f"pip install 'paceline[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1
