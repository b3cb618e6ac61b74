"""The table of ``paceline report``: what it shows of a run with deadlines, and of one that waits."""

import json
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.report import LEAST_MISSED

LATE = {"deadline_s": 1.0, "samples": [100, 0], "seconds": [1.0, 0.0], "unfinished_s": [0.05, 1.0]}


def told(folder: Path, *, columns: int = 200, workers: object = None, **more: object) -> list[str]:
    """The lines of the report."""
    step = {
        "epoch": 0, "generation": 0, "workers": [0, 1], "planned": [120, 120], "samples": [100, 100],
        "seconds": [1.0, 1.0], "wall_s": 1.1, "micro_batches": [10, 10], "slowest_s": [0.1, 0.1],
    }  # fmt: skip
    events = [
        {"event": "run", "name": "x", "workers": workers},
        *({"event": "step", "step": k, **step, **more} for k in range(8)),
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def header(lines: list[str]) -> list[str]:
    return [name.strip() for name in next(line for line in lines if line.startswith("worker ")).split("  ") if name]


def test_a_run_that_waits_shows_who_was_last(tmp_path: Path) -> None:
    shown = header(told(tmp_path))
    assert shown == ["worker", "machine", "samples", "share", "samples/s", "waiting", "last in", "waited for"]


def test_a_run_with_deadlines_shows_who_missed_rounds_and_what_was_lost(tmp_path: Path) -> None:
    shown = header(told(tmp_path, **LATE))
    assert shown == ["worker", "machine", "samples", "share", "samples/s", "waiting", "missed", "stuck", "cut off"]


def test_on_80_columns_every_worker_is_one_line_and_what_has_no_room_is_named(tmp_path: Path) -> None:
    jittery = [{"rank": rank, "device": "cpu", "emulated": f"{2 * rank + 1}x slower, jitter 0.6"} for rank in range(2)]
    lines = told(tmp_path, columns=80, workers=jittery, **LATE)
    shown = header(lines)
    assert shown == ["worker", "machine", "samples", "share", "samples/s", "waiting", "missed", "stuck"]
    assert not any("…" in line for line in lines)
    at = next(place for place, line in enumerate(lines) if line.startswith("worker "))
    assert lines[at + 1].startswith("0       cpu 1x slower ~0.6  ")
    assert lines[at + 2].startswith("1       cpu 3x slower ~0.6  ")
    assert lines[at + 3].startswith("No room here for: cut off.")


def test_even_a_narrow_terminal_shows_who_missed_how_much(tmp_path: Path) -> None:
    shown = header(told(tmp_path, columns=45, **LATE))
    assert shown == ["worker", "machine", "share", "samples/s", "missed"]
    assert not set(shown) & set(LEAST_MISSED)
