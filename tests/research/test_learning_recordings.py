"""What a forecast is learned from: traces, run logs, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from paceline.records import StepRecord
from paceline.research.deep.recordings import LEAST_STEPS, NO_BOUND, from_records, recording, recordings


def record(step: int, **fields: object) -> StepRecord:
    usual = {"workers": (0, 1), "planned": (4, 4), "samples": (4, 4), "seconds": (2.0, 4.0)}
    return StepRecord(step=step, epoch=0, generation=0, **{**usual, **fields})  # type: ignore[arg-type]


def test_a_trace_is_a_recording_in_which_nobody_is_late(tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    file.write_text("".join(f"{step},1.0,{step + 1}.5\n" for step in range(LEAST_STEPS)))
    (found,) = recordings(file)
    assert (found.name, found.steps, found.workers) == ("two.csv", LEAST_STEPS, 2)
    assert found.seconds[3].tolist() == [1.0, 4.5]
    assert not found.late.any()


def test_a_run_log_is_seconds_per_sample_and_a_share_not_done_is_a_bound(tmp_path: Path) -> None:
    cut = record(5, samples=(4, 0), seconds=(2.0, 0.0), unfinished_s=(0.0, 3.0), wait_for=1)
    steps = [record(step) if step != 5 else cut for step in range(LEAST_STEPS)]
    lines = [json.dumps({"event": "step", **step.to_json()}) for step in steps]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    for path in (tmp_path, tmp_path / "events.jsonl"):
        (found,) = recordings(path)
        assert found.seconds[4].tolist() == [0.5, 1.0]
        assert found.seconds[5].tolist() == [0.5, 0.75]
        assert found.late.sum() == 1
        assert found.late[5, 1]


def test_of_a_worker_that_sat_out_nothing_is_known() -> None:
    idle = record(7, planned=(8, 0), samples=(8, 0), seconds=(4.0, 0.0))
    (found,) = from_records("run", [record(step) if step != 7 else idle for step in range(LEAST_STEPS)])
    assert found.late[7].tolist() == [False, True]
    assert found.seconds[7, 1] <= NO_BOUND * 1.0


def test_a_worker_that_was_never_measured_is_left_out() -> None:
    three = {"workers": (0, 1, 2), "planned": (4, 4, 0), "samples": (4, 4, 0), "seconds": (2.0, 4.0, 0.0)}
    (found,) = from_records("run", [record(step, **three) for step in range(LEAST_STEPS)])
    assert found.workers == 2


def test_a_run_whose_workers_changed_is_a_recording_for_each_set_long_enough_together() -> None:
    three = {"workers": (0, 1, 5), "planned": (4, 4, 4), "samples": (4, 4, 4), "seconds": (2.0, 4.0, 6.0)}
    steps = [record(step) for step in range(LEAST_STEPS)] + [record(50 + i, **three) for i in range(LEAST_STEPS + 1)]
    found = from_records("run", [*steps, record(99)])
    assert [(part.steps, part.workers) for part in found] == [(LEAST_STEPS, 2), (LEAST_STEPS + 1, 3)]


@pytest.mark.parametrize(
    ("seconds", "part"),
    [
        (np.ones((LEAST_STEPS - 1, 4)), "too short"),
        (np.ones((1, 4)), "too short"),
        (np.ones((LEAST_STEPS, 1)), "one worker"),
        (np.ones(LEAST_STEPS), "one row per step"),
        (np.full((LEAST_STEPS, 2), math.nan), "step 0, worker 0"),
        (np.full((LEAST_STEPS, 2), -1.0), "above 0"),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused_by_name(seconds: np.ndarray, part: str) -> None:
    with pytest.raises(ValueError, match=f"^this: .*{part}"):
        recording("this", seconds)


def test_a_run_without_steps_or_without_measurements_is_refused() -> None:
    with pytest.raises(ValueError, match="no steps"):
        from_records("run", [])
    blank = [record(step, samples=(0, 0), seconds=(0.0, 0.0)) for step in range(LEAST_STEPS)]
    with pytest.raises(ValueError, match="nobody was ever measured"):
        from_records("run", blank)
