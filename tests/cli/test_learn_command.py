"""``paceline learn``: a model and its held-out score, and one-line errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.research.deep.model import load_model


def learn(*args: str) -> Result:
    return CliRunner().invoke(app, ["learn", *args], env={"COLUMNS": "120"})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = np.exp(0.1 * np.random.default_rng(0).standard_normal((40, 3)))
    file = tmp_path / "trace.csv"
    file.write_text("".join(f"{step},{','.join(map(str, row))}\n" for step, row in enumerate(rows.tolist())))
    return file


def test_a_trace_becomes_a_model_and_a_score_beside_the_simple_forecasts(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    done = learn(str(trace), str(trace), "-o", str(target), "--updates", "2")
    assert done.exit_code == 0, done.stderr
    assert load_model(target).shape.lag == 20
    lines = done.stdout.splitlines()
    assert "last fifth of 80 steps" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["deep", "general", "smoothed", "last"]
    assert "does not win here" in lines[5]  # two updates teach nothing
    assert str(target) in lines[6]


def test_the_scores_come_as_one_line_of_json(trace: Path, tmp_path: Path) -> None:
    done = learn(str(trace), "-o", str(tmp_path / "model.pt"), "--updates", "1", "--json")
    told = json.loads(done.stdout)
    assert (told["steps"], told["workers"]) == (40, 3)
    assert set(told["held_out"]) == {"deep", "general", "smoothed", "last value"}
    assert 0.05 < told["held_out"]["smoothed"] < 0.1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,1.0,nan\n" * 40, "line 1, column 3"),
        ("1,1.0,-2.0\n" * 40, "above 0"),
        ("1,1.0,2.0\n2,1.0\n", "line 2"),
        ("1,1.0\n" * 40, "one worker"),
        ("1,1.0,2.0\n", "too short to learn from: 1 steps"),
        ("", "holds no steps"),
        ("model weights\n", "no steps"),
    ],
)
def test_a_broken_trace_is_one_line_that_says_where(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "broken.csv"
    file.write_text(text)
    done = learn(str(file), "-o", str(tmp_path / "model.pt"))
    assert done.exit_code == 2
    assert part in done.stderr
    assert done.stderr.startswith("paceline: learn: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["none.csv"], "there is no none.csv"),
        (["TRACE", "-o", "nowhere/model.pt"], "cannot be written to nowhere/model.pt"),
        (["TRACE", "-o", "."], "cannot be written"),
        (["TRACE", "--seed", "-1"], "--seed"),
        (["TRACE", "--updates", "0"], "updates"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    trace: Path, args: list[str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    done = learn(*(str(trace) if arg == "TRACE" else arg for arg in args))
    assert done.exit_code == 2
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = learn(str(tmp_path), "-o", str(tmp_path / "model.pt"))
    assert done.exit_code == 2
    assert "no event log" in done.stderr
