"""A made-up elastic run of 4 workers in which workers die and join.

Worker 1 is killed at step 20, worker 4 joins at step 60, and the leader dies at step 80, which it had logged and the
others had not, in the middle of its next line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_runs import run_event, step

SPEEDS = {0: 500.0, 1: 500.0, 2: 250.0, 3: 125.0, 4: 500.0}
SHARES = {0: 93, 1: 93, 2: 47, 3: 23, 4: 93}
KILLED = "was killed by signal 9 (SIGKILL)"
FIRST, SECOND, THIRD, FOURTH = (0, 1, 2, 3), (0, 2, 3), (0, 2, 3, 4), (2, 3, 4)
STEPS, KILL, JOIN, LEADER_DIES = 100, 20, 60, 80
EVERY_S, PAUSE_S = 0.2, 0.5
"""Seconds of a step, and of the pause before a step with new members after a death."""


def generation(
    number: int, at: int, workers: Sequence[int], *, joined: Sequence[int] = (), left: Sequence[int] = (), t: float
) -> dict[str, Any]:
    came = [{"id": w, "name": f"here/{w}", "device": "cpu", "host": "here", "pid": w, "emulated": None} for w in joined]
    gone = [{"id": w, "text": KILLED} for w in left]
    return {"event": "generation", "t": t, "number": number, "step": at, "workers": list(workers), "joined": came,
            "left": gone}  # fmt: skip


def member_step(number: int, members: Sequence[int], generation: int, position: int, t: float) -> dict[str, Any]:
    shares, speeds = [SHARES[w] for w in members], [SPEEDS[w] for w in members]
    made = step(number, shares, speeds=speeds, workers=members, position=position, generation=generation)
    return made | {"t": t}


def before_the_leaders_death() -> list[dict[str, Any]]:
    """Return what the first leader wrote; the last line is a step that nobody kept."""
    machines = [{"rank": r, "id": r, "name": f"here/{r}", "device": "cpu", "emulated": None} for r in FIRST]
    run = run_event(transport="elastic", workers=machines, version=2)
    loop = {"event": "steps", "t": 1000.0, "steps": STEPS, "epochs": 1, "first_step": 0, "global_batch": 256}
    return [run, loop | {"dealt": _position(STEPS)}, *_events(0, LEADER_DIES + 1)]


def after_it(steps: int = STEPS) -> list[dict[str, Any]]:
    """Return what the next leader wrote."""
    t = _time(LEADER_DIES - 1) + 0.3
    first = generation(4, LEADER_DIES, FOURTH, left=(0,), t=t)
    again = [member_step(k, FOURTH, 4, _position(k), _time(k) + PAUSE_S) for k in range(LEADER_DIES, steps)]
    end = {"event": "end", "t": _time(steps) + 1.0, "reason": "finished", "text": ""}
    return [first, *again, *([end] if steps == STEPS else [])]


def write_elastic(folder: Path, *, steps: int = STEPS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torn = json.dumps(member_step(81, THIRD, 3, 0, 0.0))[:70]
    lines = [*map(json.dumps, before_the_leaders_death()), torn, *map(json.dumps, after_it(steps))]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _events(start: int, stop: int) -> Iterator[dict[str, Any]]:
    for k in range(start, stop):
        if k == KILL:
            yield generation(2, k, SECOND, left=(1,), t=_time(k - 1) + 0.1)
        if k == JOIN:
            yield generation(3, k, THIRD, joined=(4,), t=_time(k - 1) + 0.1)
        number = 1 if k < KILL else 2 if k < JOIN else 3
        yield member_step(k, _members(k, leader=True), number, _position(k), _time(k))


def _members(k: int, *, leader: bool = False) -> tuple[int, ...]:
    if k >= LEADER_DIES and not leader:
        return FOURTH
    return FIRST if k < KILL else SECOND if k < JOIN else THIRD


def _position(k: int) -> int:
    """Return the position in the epoch's order at which step k begins."""
    return sum(SHARES[w] for before in range(k) for w in _members(before))


def _time(k: int) -> float:
    return 1001.0 + EVERY_S * (k + 1) + (PAUSE_S if k >= KILL else 0.0)
