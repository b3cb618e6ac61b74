"""Runs tests against another torch than the one of the development environment, in an environment of its own.

    python harness/other_torch.py 2.9.0 -- tests/pace -n 2

The environment lies in .venv-torch-VERSION and is kept: later calls only run the tests. Ray, Lightning and Transformers
are not installed, so that their tests are skipped. Arguments after -- go to pytest; without any, all tests but the
longest run. The last line is a row for a table of versions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install(folder: Path, torch: str, index: str | None) -> Path:
    """Return the Python of an environment with this torch, Paceline and the tools of the tests."""
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={torch}", *(["--extra-index-url", index] if index else [])], check=True)
        subprocess.run([*pip, *requirements(), f"torch=={torch}"], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)  # also where the floor is above this torch
        done.touch()
    return python


def requirements() -> list[str]:
    """Return what Paceline and its tests need besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [one for one in needed if not re.match(r"torch\b", one)]


def main() -> int:
    """Install, run pytest, and print one line of what was seen; return pytest's exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("torch", help="version of torch, such as 2.9.0")
    options.add_argument("--extra-index-url", help="where else pip looks, such as an index of CPU builds")
    options.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    asked = options.parse_args()
    python = install(ROOT / f".venv-torch-{asked.torch}", asked.torch, asked.extra_index_url)
    tests = asked.tests or ["-m", "not long and not browser", "-n", "3", "--dist", "worksteal"]
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    seen = subprocess.run([python, "-c", "import torch, sys; print(torch.__version__)"], capture_output=True, text=True)
    print(f"| {seen.stdout.strip()} | {sys.version.split()[0]} | {last.strip()} |")
    return running.returncode


if __name__ == "__main__":
    sys.exit(main())
