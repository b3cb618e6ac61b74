"""The table of ``paceline report``: what it shows of a run with deadlines, and of one that waits."""

import json
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app


def header(folder: Path, **more: object) -> list[str]:
    step = {
        "epoch": 0, "generation": 0, "workers": [0, 1], "planned": [120, 120], "samples": [100, 100],
        "seconds": [1.0, 1.0], "wall_s": 1.1, "micro_batches": [10, 10], "slowest_s": [0.1, 0.1],
    }  # fmt: skip
    events = [{"event": "run", "name": "x"}, *({"event": "step", "step": k, **step, **more} for k in range(8))]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return next(line.split("  ") for line in result.output.splitlines() if line.startswith("worker "))


def test_a_run_that_waits_shows_who_was_last(tmp_path: Path) -> None:
    shown = [name.strip() for name in header(tmp_path) if name]
    assert shown == ["worker", "machine", "samples", "share", "samples/s", "waiting", "last in"]


def test_a_run_with_deadlines_shows_who_missed_rounds_and_what_was_lost(tmp_path: Path) -> None:
    late = {"deadline_s": 1.0, "samples": [100, 0], "seconds": [1.0, 0.0], "unfinished_s": [0.05, 1.0]}
    shown = [name.strip() for name in header(tmp_path, **late) if name]
    assert shown == ["worker", "machine", "samples", "share", "samples/s", "waiting", "missed", "stuck", "cut off"]
