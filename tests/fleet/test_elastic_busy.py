"""A worker that is busy is waited for and named, however long; one that is frozen is done without."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from flock import Flock
from test_elastic import must_be_sound

pytestmark = pytest.mark.fleet

CASE = "network_cases.py:train"


@pytest.mark.parametrize("busy", [0, pytest.param(1, marks=pytest.mark.long)], ids=["the leader", "another"])
def test_a_worker_that_is_busy_with_its_own_code_is_waited_for_and_named(tmp_path: Path, busy: int) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 3, "busy": busy, "busy_at": 7, "holds": False}) as flock:
        waiting = f"waiting for worker {busy} (its own code after step 7)"
        for other in {0, 1, 2} - {busy}:
            flock.wait_until(lambda other=other: waiting in flock.said(other))
        (tmp_path / "enough").touch()
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=3)
    assert {record.generation for record in run.records} == {1}, "nobody was done without"


def test_a_leader_that_keeps_the_interpreter_to_itself_is_waited_for_and_named(tmp_path: Path) -> None:
    """It cannot beat meanwhile, but its process computes, and on one computer the roster sees that."""
    told: list[tuple[str, dict[str, Any]]] = []
    args = {"epochs": 3, "busy": 0, "busy_at": 7, "busy_s": 8.0, "holds": True}
    with Flock(CASE, 3, tmp_path, args=args) as flock:
        flock.server._on_event = lambda kind, said: told.append((kind, said))
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=3)
    assert {record.generation for record in run.records} == {1}, "nobody was done without"
    held = [said["text"] for kind, said in told if kind == "holding"]
    assert held, "the roster told of its silence"
    assert all("worker 0 is silent for" in text and "it is waited for" in text for text in held)


def test_a_frozen_leader_is_done_without_and_is_back_as_the_last_when_it_wakes(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 20, "pause_s": 0.05}) as flock:
        flock.wait_for_step(8)
        flock.send(0, signal.SIGSTOP)
        frozen_at = time.time()
        flock.wait_for_workers(2)
        waited = next(one["t"] for one in flock.records() if len(one["workers"]) == 2) - frozen_at
        flock.send(0, signal.SIGCONT)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=20)
    assert [change.workers for change in run.changes] == [(1, 2), (1, 2, 0)]
    assert "silent" in run.changes[0].left[0].text
    print(f"the others went on {waited:.2f} s after the freeze")
    assert waited < 25.0, "patience has a ceiling of 20 s"
