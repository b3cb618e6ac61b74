"""A benchmark whose workers fail says why, and leaves none of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from crew import run_program

pytestmark = pytest.mark.fleet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORKERS = """
import os, sys
sys.path.insert(0, {folder!r})
if {variable!r} in os.environ:
    raise ValueError("the reason of worker " + os.environ["RANK"])
from common import run_workers
run_workers(__file__, 2)
"""
FORKS = """
import os, sys, time
sys.path.insert(0, {folder!r})
from _smoke import forked
def work():
    if os.environ["RANK"] == "1":
        raise ValueError("the reason of worker 1")
    time.sleep(100)
forked(work, 3)
"""


def test_the_last_line_that_a_failed_worker_wrote_is_in_the_benchmark_s_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS.format(folder=str(BENCHMARKS), variable="BENCHMARK_RESULT"))
    done = run_program(script, tmp_path, within=120)
    assert done.code == 1
    _, _, error = done.err.partition("script.py: the 2 workers ended with exit code 1; worker 0 had left no figures")
    assert "ValueError: the reason of worker" in error, done.err


def test_a_fork_that_fails_ends_the_others_and_its_error_is_the_benchmark_s(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKS.format(folder=str(BENCHMARKS)))
    began = time.monotonic()
    done = run_program(script, tmp_path, within=80)
    assert done.code == 1
    _, _, error = done.err.partition("worker 1 of 3 ended with exit code 1, and the others were ended")
    assert "ValueError: the reason of worker 1" in error, done.err
    assert time.monotonic() - began < 80
