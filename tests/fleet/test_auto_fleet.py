"""The default pace in a fleet: one worker stalls now and then, and after a while nobody waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import run
from test_deadlines import check_invariants

from paceline.observe import read_log, verdict
from paceline.pace.auto import FEW

pytestmark = pytest.mark.fleet

CASE: dict[str, Any] = {
    "length": 1440,
    "global_batch": 48,
    "micro_batch": 4,
    "epochs": 2,
    "pace": "auto",
    "untracked": True,
    "stalls": [[1, step, 1] for step in range(5, 60, 5)],
    "long_s": 0.4,
}


def test_stalls_bring_deadlines_and_everything_stays_true(tmp_path: Path) -> None:
    told = run("deadline_cases.py:train", 3, tmp_path, args=CASE)
    check_invariants(told, CASE)
    bounded = [step["deadline"] is not None for step in told[0]["steps"]]
    assert not any(bounded[:FEW])
    assert any(bounded)
    (log,) = [read_log(file) for file in tmp_path.rglob("events.jsonl")]
    began = next(event for event in log.others if event["event"] == "pace")
    assert (began["deadlines"], began["worker"]) == (True, 1)
    assert bounded.index(True) > began["step"]
    assert f"Rounds had a deadline from step {began['step']}" in verdict(log).text
