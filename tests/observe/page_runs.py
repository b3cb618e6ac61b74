"""Made-up runs for the page, the exports and the live page: what they must show is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.records import StepRecord

SPEEDS = (500.0, 500.0, 250.0, 125.0)
SHARES = (93, 93, 47, 23)


def run_event(count: int = 4, **more: Any) -> dict[str, Any]:
    machines = [{"rank": r, "host": "here", "pid": r, "device": "cpu", "emulated": None} for r in range(count)]
    event = {"event": "run", "t": 1000.0, "version": 1, "run_id": "r", "name": "digits", "started": 1000.0}
    return event | {"pace": "adaptive", "combine": "gradients", "backend": "gloo", "workers": machines} | more


def step(
    number: int,
    shares: Sequence[int] = SHARES,
    *,
    speeds: Sequence[float] = SPEEDS,
    workers: Sequence[int] | None = None,
    position: int | None = None,
    other_s: float = 0.01,
    **more: Any,
) -> dict[str, Any]:
    """Return a step's event on machines of these samples/s; its samples begin at ``position`` in the epoch's order."""
    seconds = [share / speed for share, speed in zip(shares, speeds)]
    begin, ranges = number * sum(shares) if position is None else position, []
    for share in shares:
        ranges.append([[begin, begin + share]] if share else [])
        begin += share
    record = {
        "step": number, "epoch": 0, "generation": 0, "workers": list(workers or range(len(shares))),
        "planned": list(shares), "samples": list(shares), "seconds": seconds, "wall_s": max(seconds) + other_s,
        "round_s": other_s / 2, "weight": float(sum(shares)), "loss": 2.0 / (1 + number), "ranges": ranges,
        "forecast_s": [1.1 * s for s in seconds], "micro_batches": [4] * len(shares),
    }  # fmt: skip
    event = {"event": "step"} | record | more
    return event | {"t": more.get("t", 1001.0 + (number + 1) * event["wall_s"])}


def record(number: int, shares: Sequence[int] = SHARES, **more: Any) -> StepRecord:
    return StepRecord.from_json(step(number, shares, **more))


def calm_run(steps: int = 40) -> list[dict[str, Any]]:
    return [
        run_event(),
        *(step(k) for k in range(steps)),
        {"event": "end", "t": 2000.0, "reason": "finished", "text": ""},
    ]


def run_with_a_death(before: int = 30, after: int = 30) -> list[dict[str, Any]]:
    """Return a run in which worker 2 is killed after ``before`` steps; the other three share its work."""
    survivors = [
        step(
            before + k, (114, 114, 28), speeds=(500.0, 500.0, 125.0), workers=(0, 1, 3), position=before * 256 + k * 256
        )
        for k in range(after)
    ]
    note = {"event": "note", "t": 1010.0, "level": "warning", "text": "worker 2 was killed by signal 9 (SIGKILL)"}
    end = {"event": "end", "t": 2000.0, "reason": "finished", "text": ""}
    return [run_event(), *(step(k) for k in range(before)), note, *survivors, end]


def run_with_deadlines(steps: int = 30) -> list[dict[str, Any]]:
    """Return a run in which worker 3 is stuck when every third round closes; its samples are dealt again."""
    events = [run_event(pace="joint")]
    for k in range(steps):
        stuck, ended = k % 3 == 1, k % 3 == 2
        events.append(
            step(
                k,
                deadline_s=0.2,
                samples=[93, 93, 47, 0 if stuck else 23],
                seconds=[0.186, 0.186, 0.188, 0.0 if stuck else 0.12],
                unfinished_s=[0.0, 0.0, 0.0, 0.2 if stuck else 0.0],
                late_s=[0.0, 0.0, 0.0, 0.06 if ended else 0.0],
                wall_s=0.21,
                round_s=0.005,
                t=1001.0 + 0.21 * (k + 1),
                ranges=[],
            )
        )
    return [*events, {"event": "end", "t": 2000.0, "reason": "finished", "text": ""}]


def write(folder: Path, events: Iterable[dict[str, Any]], *, tail: str = "") -> Path:
    """Write the events and ``tail`` as a run's log, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return folder
