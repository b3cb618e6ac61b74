"""Logs that the library wrote before its modules had rooms are still read, and reported in the same words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

DATA = Path(__file__).parent / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradients", "average", "elastic", "joint"])
def test_an_old_log_gives_the_report_that_it_gave_then(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "COLUMNS": "120", "TZ": "UTC"}
    command = [sys.executable, "-m", "paceline.cli", "report", name]
    done = subprocess.run(command, cwd=DATA, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (DATA / name / "report.txt").read_text()
