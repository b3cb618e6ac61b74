"""Who left and who joined: as it happens, and as the verdict and the report tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.analysis.membership import Departure, GenerationEvent, pause_s
from paceline.observe.words.numbers import capital, duration
from paceline.records import StepRecord

MOST_TOLD = 6
"""Changes told one by one; of more, the first ones, and how many there were."""


@dataclass(frozen=True)
class Move:
    """One change of the fleet."""

    step: int
    """The first step with the new members."""
    t: float
    left: tuple[Departure, ...]
    joined: tuple[int, ...]
    pause_s: float
    """From the last step logged before to the first one after, that step's own time included; NaN when not known."""

    @property
    def text(self) -> str:
        """``worker 1 was killed by signal 9 (SIGKILL) at step 20; the others went on after 0.3 s``."""
        said = [f"worker {each.worker} {each.text} at step {self.step}" for each in self.left]
        if self.left and math.isfinite(self.pause_s):
            pause = f"{self.pause_s:.1f} s" if self.pause_s < 10 else duration(self.pause_s)
            said.append(f"the others went on after {pause}")
        return "; ".join([*said, *(f"worker {worker} joined at step {self.step}" for worker in self.joined)])

    def to_json(self) -> dict[str, Any]:
        left = [{"worker": each.worker, "text": each.text} for each in self.left]
        pause = self.pause_s if math.isfinite(self.pause_s) else None
        return {"step": self.step, "left": left, "joined": list(self.joined), "pause_s": pause}


def moves(
    changes: Sequence[GenerationEvent], records: Sequence[StepRecord], times: Sequence[float]
) -> tuple[Move, ...]:
    return tuple(Move(c.step, c.t, c.left, c.joined, pause_s(c, records, times)) for c in changes)


def moves_text(moved: Sequence[Move], most: int = MOST_TOLD) -> str:
    """All of it in a line; empty when nobody moved."""
    if not moved:
        return ""
    shown, rest = (moved, []) if len(moved) <= most else (moved[:most], list(moved[most:]))
    said = "; ".join(move.text for move in shown)
    if rest:
        left, joined = (sum(len(getattr(move, what)) for move in rest) for what in ("left", "joined"))
        said += f"; later {_count(left)} left and {_count(joined)} joined"
    return f"{capital(said)}."


def _count(workers: int) -> str:
    return "nobody" if not workers else "1 worker" if workers == 1 else f"{workers:,} workers"


def change_text(change: GenerationEvent) -> str:
    """In a line, as it happens.

    >>> change_text(GenerationEvent(2, 20, (0, 2, 3), left=(Departure(1, "was killed by signal 9 (SIGKILL)"),)))
    'worker 1 was killed by signal 9 (SIGKILL); 3 workers go on from step 20'
    >>> change_text(GenerationEvent(3, 60, (0, 2, 3, 4), joined=(4,)))
    'worker 4 joined at step 60: 4 workers'
    """
    size = f"{len(change.workers)} worker{'' if len(change.workers) == 1 else 's'}"
    gone = [f"worker {each.worker} {each.text}" for each in change.left]
    came = [f"{_named(change.joined)} joined"] if change.joined else []
    if came and not gone:
        return f"{came[0]} at step {change.step}: {size}"
    goes = "goes" if len(change.workers) == 1 else "go"
    return "; ".join([*gone, *came, f"{size} {goes} on from step {change.step}"])


def _named(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return "workers " + ", ".join(map(str, workers[:-1])) + f" and {workers[-1]}"
