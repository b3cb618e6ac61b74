"""The built package in an environment of its own: what a stranger has after ``pip install``.

The environment gets the wheel, without constraints and without the checkout. Torch and the other dependencies are
borrowed from the environment of the tests through a ``.pth`` file: on a machine without a GPU the index would bring
gigabytes of CUDA's libraries. `make install-wheel` installs it with its dependencies, as the workflow does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import paceline

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was made from it."""
    pytest.importorskip("build", reason="the package build is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (wheel,) = built.glob("*.whl")
    python = str(folder / "bin" / "python")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *options, str(wheel)], check=True)
    # Entries of the borrowed folder's own .pth files are not read: the checkout, installed there, stays out.
    (site / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin"


def run(bare: Path, folder: Path, *words: str) -> str:
    """Run a program of the bare environment outside of the checkout; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE_"))}
    done = subprocess.run(
        [str(bare / words[0]), *words[1:]], cwd=folder, env=kept, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_sdist_and_wheel_have_the_version_and_nothing_that_is_not_the_projects(built: Path) -> None:
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    version = paceline.__version__
    assert (source.name, wheel.name) == (f"paceline-{version}.tar.gz", f"paceline-{version}-py3-none-any.whl")
    with tarfile.open(source) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/test_wheel.py"} <= names
    assert not [name for name in names if re.search(r"__pycache__|^runs/|\.venv|^\.ci", name)]
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
        assert "paceline/examples/digits.py" in files.namelist()
    assert tops == {"paceline", f"paceline-{version}.dist-info"}


def test_the_wheel_asks_for_the_dependencies_of_the_project(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = files.read(name).decode()
    asked = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(one for one in asked if "extra ==" not in one) == sorted(project["dependencies"])
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(project["optional-dependencies"])


def test_the_command_is_the_wheels_and_says_its_version(bare: Path, tmp_path: Path) -> None:
    assert run(bare, tmp_path, "paceline", "--version") == f"paceline {paceline.__version__}\n"
    where = run(bare, tmp_path, "python", "-c", "import paceline; print(paceline.__file__)")
    assert Path(where.strip()).is_relative_to(bare.parent)


@pytest.mark.fleet
def test_the_demo_runs_outside_of_the_checkout(bare: Path, tmp_path: Path) -> None:
    said = run(bare, tmp_path, "paceline", "demo", "--epochs", "2", "--sample-ms", "1")
    assert re.search(r"Paceline trained [\d.]+ times as fast", said)


@pytest.mark.fleet
def test_the_script_of_the_readme_runs_outside_of_the_checkout(bare: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    said = run(bare, tmp_path, "paceline", "run", "-n", "2", "train.py")
    assert "samples/s" in said
