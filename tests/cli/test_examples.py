"""The examples that come with the package: listed, copied, and there in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from shells import SOURCE, Shell
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline.cli.examples import chosen, examples_folder, first_sentence, read_examples

ROOT = Path(SOURCE).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examples(*names: str) -> Result:
    return CliRunner().invoke(app, ["examples", *names], env={"COLUMNS": "200"})


def test_each_example_is_listed_with_what_it_is_for(shell: Shell) -> None:
    done = shell.run("examples")
    assert done.returncode == 0, done.stderr
    for path in (ROOT / "examples").glob("*.py"):
        assert any(line.split()[:1] == [path.stem] and len(line.split()) > 3 for line in done.stdout.splitlines())
    assert "pip install 'paceline[demo]'" in done.stdout
    assert "fabric_digits, lightning_digits need Lightning: pip install 'paceline[lightning]'" in done.stdout


def test_a_copy_comes_with_the_examples_that_it_imports(folder: Path) -> None:
    done = examples("plain_ddp.py")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in folder.glob("*.py")} == {"plain_ddp.py", "digits.py"}
    assert (folder / "digits.py").read_bytes() == (ROOT / "examples" / "digits.py").read_bytes()
    assert "Try: paceline run -n 2 plain_ddp.py" in done.stdout


def test_an_example_for_workers_of_several_processes_says_how_to_start_them(folder: Path) -> None:
    assert "Try: paceline run -n 2 --procs-per-worker 2 sharded.py" in examples("sharded").stdout


def test_a_changed_copy_is_never_overwritten_and_nothing_else_is_written(folder: Path) -> None:
    mine = folder / "digits.py"
    mine.write_text("mine")
    done = examples("tiny_gpt", "digits")
    assert done.exit_code == 2
    assert "digits.py is here already and differs" in done.stderr
    assert mine.read_text() == "mine"
    assert not (folder / "tiny_gpt.py").exists()


def test_copying_twice_is_no_error(folder: Path) -> None:
    assert [examples("tiny_gpt").exit_code for _ in range(2)] == [0, 0]


def test_an_unknown_example_is_refused_with_those_there_are(folder: Path) -> None:
    done = examples("resnet")
    assert done.exit_code == 2
    assert (
        "no example 'resnet', but accelerate_digits, digits, fabric_digits, gan, lightning_digits, plain_ddp"
        in done.stderr
    )


def test_all_are_chosen_once_each_after_what_they_import() -> None:
    known = read_examples(examples_folder())
    assert sorted(chosen(["all"], known)) == sorted(known)
    assert chosen(["plain_ddp", "digits"], known) == ["digits", "plain_ddp"]


def test_the_purpose_is_one_sentence_of_the_docstring() -> None:
    assert first_sentence("Two\n    lines. And more.\n\nElse.") == "Two lines."
    assert first_sentence("No stop at the end") == "No stop at the end"


def test_a_wheel_has_the_examples_inside_the_package_where_the_command_finds_them(tmp_path: Path) -> None:
    """As pip unpacks a wheel: the package into site-packages."""
    wheel = built_wheel(tmp_path)
    site = tmp_path / "lib" / "python" / "site-packages"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    assert (site / "paceline" / "py.typed").is_file()
    assert wheel.name.startswith(f"paceline-{paceline.__version__}-")
    command = "from paceline.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    place = tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", command, "examples", "digits"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "digits.py").read_bytes() == (ROOT / "examples" / "digits.py").read_bytes()


def built_wheel(folder: Path) -> Path:
    hatchling = pytest.importorskip("hatchling.build", reason="hatchling is not installed")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return folder / hatchling.build_wheel(str(folder))
    finally:
        os.chdir(before)
