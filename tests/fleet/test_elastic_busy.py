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
BUSY_S = 8.0


def train_beside_a_busy_one(folder: Path, *, busy: int, holds: bool) -> Any:
    told: list[tuple[str, dict[str, Any]]] = []
    args = {"epochs": 3, "busy": busy, "busy_at": 7, "busy_s": BUSY_S, "holds": holds}
    with Flock(CASE, 3, folder, args=args) as flock:
        flock.steward._observe = lambda kind, said: told.append((kind, said))
        outcomes = flock.wait()
    run = must_be_sound(folder, outcomes, ended={0, 1, 2}, epochs=3)
    return run, outcomes, told


@pytest.mark.parametrize("busy", [0, pytest.param(1, marks=pytest.mark.long)], ids=["the leader", "another"])
def test_a_worker_that_is_busy_with_its_own_code_is_waited_for_and_named(tmp_path: Path, busy: int) -> None:
    run, outcomes, _ = train_beside_a_busy_one(tmp_path, busy=busy, holds=False)
    assert {record.generation for record in run.records} == {1}, "nobody was done without"
    others = [outcomes[slot].err for slot in range(3) if slot != busy]
    for said in others:
        assert f"waiting for worker {busy} (its own code after step 7)" in said, said


def test_a_leader_that_keeps_the_interpreter_to_itself_is_waited_for_and_named(tmp_path: Path) -> None:
    """It cannot beat meanwhile, but its process computes, and on one computer the roster sees that."""
    run, _, told = train_beside_a_busy_one(tmp_path, busy=0, holds=True)
    assert {record.generation for record in run.records} == {1}, "nobody was done without"
    held = [said["text"] for kind, said in told if kind == "holding"]
    assert held, "the roster told of its silence"
    assert all("worker 0 is silent for" in text and "its process computes: it is waited for" in text for text in held)


def test_a_frozen_leader_is_done_without_and_is_back_as_the_last_when_it_wakes(tmp_path: Path) -> None:
    with Flock(CASE, 3, tmp_path, args={"epochs": 20}) as flock:
        flock.wait_for_step(8)
        flock.send(0, signal.SIGSTOP)
        frozen_at = time.time()
        before = flock.records()[-1]["step"]
        flock.wait_for_step(before + 10)
        waited = next(one["t"] for one in flock.records() if one["step"] == before + 3) - frozen_at
        flock.send(0, signal.SIGCONT)
        outcomes = flock.wait()
    run = must_be_sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=20)
    assert [change.workers for change in run.changes] == [(1, 2), (1, 2, 0)]
    assert "silent" in run.changes[0].left[0].text
    print(f"the others went on {waited:.2f} s after the freeze")
    assert waited < 5.0
