"""What the workers of peers.py noted, and what follows from it. Seconds are CLOCK_MONOTONIC's, one clock for all."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 6
"""Steps before speed is measured, or half of them where there are fewer than twelve: libraries warm up, and Paceline's
first shares are equal."""


@dataclass(frozen=True)
class Note:
    """One line of a worker's file."""

    at: float
    slot: int
    pid: int
    kind: str
    """``begin``, ``commit``, ``accuracy``, ``killed`` or ``restored``."""
    step: int = -1
    epoch: int = -1
    index: tuple[int, ...] = ()
    accuracy: float = 0.0


def read(folder: Path) -> list[Note]:
    """All notes so far in the order of time; a line that is still being written is left for later."""
    found = []
    for path in folder.glob("*.*"):
        slot, pid = map(int, path.name.split("."))
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                values: dict[str, Any] = json.loads(line)
                values["index"] = tuple(values.get("index", ()))
                found.append(Note(slot=slot, pid=pid, **values))
    return sorted(found, key=lambda note: note.at)


def commits(notes: Iterable[Note]) -> list[Note]:
    """The commits that last: a restored checkpoint undoes those of its step and later that came before it."""
    kept: list[Note] = []
    for note in notes:
        if note.kind == "restored":
            kept = [one for one in kept if one.step < note.step]
        elif note.kind == "commit":
            kept.append(note)
    return kept


def ends(notes: Iterable[Note], *, before: float) -> dict[int, float]:
    """By step, in order, when its last worker had committed it; without the last step, which may not be whole."""
    found: dict[int, float] = {}
    for note in notes:
        if note.kind == "commit" and note.at < before:
            found[note.step] = note.at
    return dict(sorted(found.items())[:-1])


def samples_per_s(notes: Sequence[Note], *, before: float = float("inf")) -> float | None:
    """Samples over seconds, everything included, of the steps after warm-up that ended ``before`` then."""
    done = ends(notes, before=before)
    if len(done) < 4:
        return None
    first, last = list(done)[warm_up(len(done)) - 1], list(done)[-1]
    counted = [note for note in notes if note.kind == "commit" and note.at < before and first < note.step <= last]
    return sum(len(note.index) for note in counted) / (done[last] - done[first])


def warm_up(steps: int) -> int:
    return min(WARM_UP, steps // 2)


def step_s(notes: Sequence[Note], *, before: float = float("inf")) -> float:
    """The usual time of a step: the median after warm-up."""
    done = list(ends(notes, before=before).values())
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(done[warm_up(len(done)) - 1 :]))


def seconds_to(accuracy: float, notes: Sequence[Note]) -> float | None:
    """From the moment at which all were ready until the test accuracy was first so high."""
    began = {note.slot: note.at for note in reversed(notes) if note.kind == "begin"}
    reached = [note.at for note in notes if note.kind == "accuracy" and note.accuracy >= accuracy]
    return reached[0] - max(began.values()) if reached and began else None


def seconds_lost(notes: Sequence[Note], *, killed_at: float) -> float | None:
    """From the kill until the training is further than it would ever have been by then, less what its steps take.

    With m the last step that anybody had committed, step m + 1 was under way, so the first that shows is m + 2; a kill
    comes in the middle of a step, so one and a half usual steps are no loss. Work done again counts as lost.
    """
    last = max(note.step for note in notes if note.kind == "commit" and note.at <= killed_at)
    later = [note.at for note in notes if note.kind == "commit" and note.at > killed_at and note.step >= last + 2]
    return max(0.0, later[0] - killed_at - 1.5 * step_s(notes, before=killed_at)) if later else None


def audit(notes: Sequence[Note], *, samples: int, epochs: Iterable[int]) -> tuple[int, int]:
    """How many samples of these epochs are in no update, and how often one is in an update once too often."""
    counts: Mapping[int, Counter[int]] = {epoch: Counter() for epoch in epochs}
    for note in commits(notes):
        if note.epoch in counts:
            counts[note.epoch].update(note.index)
    lost = sum(samples - len(seen) for seen in counts.values())
    return lost, sum(count - 1 for seen in counts.values() for count in seen.values())
