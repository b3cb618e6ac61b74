"""The generations of an elastic fleet: their events in a log, which step records they void, and sentences about them.

A generation is one membership of an elastic fleet. Its event gives the step from which it holds, who joined and who
left, and why. A leader may die after it wrote a step that the others could not keep, or wake up and write it late; and
it may die before it wrote that its generation began. So a record stands by three rules, whatever the order of the
lines: it is void when a later generation begins at its step or before; a generation without an event began at the first
step among its records; and of two records of one step and generation the first counts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.log import sanitise
from paceline.observe.words.numbers import capital, duration
from paceline.records import StepRecord

Timed = tuple[StepRecord, float]
"""A record, and the Unix seconds at which it was logged (NaN: not known)."""
MOST_LISTED = 6
"""Changes listed one by one; of more, the first ones, and a count of the others."""


@dataclass(frozen=True)
class Departure:
    """A worker that is no longer there, and why: ``was killed by signal 9 (SIGKILL)``."""

    worker: int
    text: str

    @property
    def short(self) -> str:
        """Return the reason for a narrow column.

        >>> Departure(1, "was killed by signal 9 (SIGKILL)").short, Departure(1, "left (SIGTERM)").short
        ('left: killed by signal 9', 'left: SIGTERM')
        """
        if own := re.fullmatch(r"left \((.+)\)", self.text):
            return f"left: {own[1]}"
        why = re.sub(r"\s*\(.*\)$", "", self.text).removeprefix("was ").removeprefix("is gone: ").strip()
        return f"left: {why}" if why and why != "left" else "left"


@dataclass(frozen=True)
class GenerationEvent:
    """One ``generation`` event."""

    number: int
    step: int
    """The first step of this membership."""
    workers: tuple[int, ...]
    joined: tuple[int, ...] = ()
    left: tuple[Departure, ...] = ()
    t: float = math.nan
    """Unix seconds."""
    machines: tuple[Mapping[str, Any], ...] = ()
    """Entries of the workers that joined, as they described themselves."""
    wanting: int = 0
    """The number of workers that the minimum lacks: those who are left finish their step, and wait."""


def parse_generation(event: Mapping[str, Any]) -> GenerationEvent | None:
    """Return the change in a ``generation`` event; None when it lacks a necessary field."""
    number, step = (sanitise.count_or(event.get(name), -1) for name in ("number", "step"))
    workers = event.get("workers")
    if event.get("event") != "generation" or number < 0 or step < 0:
        return None
    if not isinstance(workers, (list, tuple)) or not all(map(_is_count, workers)):
        return None
    joined, left = _entries(event.get("joined")), _entries(event.get("left"))
    return GenerationEvent(
        number=number,
        step=step,
        workers=tuple(workers),
        joined=tuple(entry["id"] for entry in joined),
        left=tuple(Departure(entry["id"], str(entry.get("text") or "left")) for entry in left),
        t=sanitise.timestamp(event.get("t")),
        machines=tuple(joined),
        wanting=sanitise.count_or(event.get("wanting"), 0),
    )


def _entries(value: Any) -> list[Mapping[str, Any]]:
    listed = value if isinstance(value, (list, tuple)) else ()
    return [entry for entry in listed if isinstance(entry, Mapping) and _is_count(entry.get("id"))]


def _is_count(value: Any) -> bool:
    return sanitise.count_or(value, -1) >= 0


def changes(events: Iterable[Mapping[str, Any]]) -> list[GenerationEvent]:
    """Return the changes of membership among a log's events, in order; the first generation is none."""
    found = [change for event in events if (change := parse_generation(event)) is not None]
    return [change for change in found if change.number > 1 and (change.joined or change.left)]


class RecordFilter:
    """The rules by which records stand, applied as generations come in."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        """First step of every generation, by number."""
        self._announced: set[int] = set()
        """Numbers of generations whose event was read: its step is exact."""
        self.number = 0
        """Number of the newest generation; 0 before the first."""

    def begin_generation(self, change: GenerationEvent, steps: MutableSequence[Timed]) -> list[Timed]:
        """Begin a generation: remove the records that it voids from ``steps`` and return them."""
        self._announced.add(change.number)
        return self._begin(change.number, change.step, steps)

    def take_note(self, record: StepRecord, steps: MutableSequence[Timed]) -> list[Timed]:
        """Take note of a record that stands: remove the records that it voids from ``steps`` and return them.

        There are such records only when its generation has no event.
        """
        number = record.generation
        if number in self._announced or self._starts.get(number, record.step + 1) <= record.step:
            return []
        return self._begin(number, record.step, steps)

    def _begin(self, number: int, step: int, steps: MutableSequence[Timed]) -> list[Timed]:
        self._starts[number], self.number = step, max(self.number, number)
        voided: list[Timed] = []
        kept: list[Timed] = []
        while steps and steps[-1][0].step >= step:
            newest = steps.pop()
            (voided if newest[0].generation < number else kept).append(newest)
        steps.extend(reversed(kept))
        return voided

    def is_late(self, record: StepRecord) -> bool:
        """Return whether the record is of an earlier generation than the newest."""
        return record.generation < self.number

    def is_void(self, record: StepRecord) -> bool:
        """Return whether a later generation began at the record's step or before."""
        late, starts = self.is_late(record), self._starts.items()
        return late and any(number > record.generation and step <= record.step for number, step in starts)

    def stands(self, record: StepRecord, steps: Sequence[Timed]) -> bool:
        """Return whether the record counts after these steps: a late one does where it fills a gap."""
        newest = steps[-1][0].step if steps else -1
        return not self.is_late(record) or (record.step > newest and not self.is_void(record))


def insert_late(steps: list[Timed], new: Timed) -> None:
    """Insert a late record in the order of steps; one that is there already stays."""
    index = len(steps)
    while index and steps[index - 1][0].step > new[0].step:
        index -= 1
    if not index or steps[index - 1][0].step != new[0].step:
        steps.insert(index, new)


def pause_s(change: GenerationEvent, records: Sequence[StepRecord], times: Sequence[float]) -> float:
    """Return the seconds from the last step logged before the change to the first one after; NaN when not known."""
    after = bisect_left(records, change.number, key=lambda record: record.generation)
    gap = times[after] - times[after - 1] if 0 < after < min(len(records), len(times)) else math.nan
    return gap if gap >= 0 else math.nan


@dataclass(frozen=True)
class Move:
    """One change of the fleet."""

    step: int
    """The first step with the new members."""
    t: float
    left: tuple[Departure, ...]
    joined: tuple[int, ...]
    pause_s: float
    """Seconds from the last step logged before to the end of the first one after; NaN when not known."""

    @property
    def text(self) -> str:
        """Return ``worker 1 was killed by signal 9 (SIGKILL) at step 20; the others went on after 0.3 s``."""
        facts = [f"worker {each.worker} {each.text} at step {self.step}" for each in self.left]
        if self.left and math.isfinite(self.pause_s):
            pause = f"{self.pause_s:.1f} s" if self.pause_s < 10 else duration(self.pause_s)
            facts.append(f"the others went on after {pause}")
        return "; ".join([*facts, *(f"worker {worker} joined at step {self.step}" for worker in self.joined)])

    def to_json(self) -> dict[str, Any]:
        left = [{"worker": each.worker, "text": each.text} for each in self.left]
        pause = self.pause_s if math.isfinite(self.pause_s) else None
        return {"step": self.step, "left": left, "joined": list(self.joined), "pause_s": pause}


def moves(
    changes: Sequence[GenerationEvent], records: Sequence[StepRecord], times: Sequence[float]
) -> tuple[Move, ...]:
    return tuple(Move(c.step, c.t, c.left, c.joined, pause_s(c, records, times)) for c in changes)


def moves_text(moved: Sequence[Move], most: int = MOST_LISTED) -> str:
    """Return all changes in a line; empty when there was none."""
    if not moved:
        return ""
    shown, rest = (moved, []) if len(moved) <= most else (moved[:most], list(moved[most:]))
    listed = "; ".join(move.text for move in shown)
    if rest:
        left, joined = (sum(len(getattr(move, what)) for move in rest) for what in ("left", "joined"))
        listed += f"; later {_count(left)} left and {_count(joined)} joined"
    return f"{capital(listed)}."


def _count(workers: int) -> str:
    return "nobody" if not workers else "1 worker" if workers == 1 else f"{workers:,} workers"


def change_text(change: GenerationEvent) -> str:
    """Return a change in a line, as it happens.

    >>> change_text(GenerationEvent(2, 20, (0, 2, 3), left=(Departure(1, "was killed by signal 9 (SIGKILL)"),)))
    'worker 1 was killed by signal 9 (SIGKILL); 3 workers go on from step 20'
    >>> change_text(GenerationEvent(3, 60, (0, 2, 3, 4), joined=(4,)))
    'worker 4 joined at step 60: 4 workers'
    >>> change_text(GenerationEvent(4, 70, (0,), left=(Departure(1, "left"),), wanting=1))
    'worker 1 left; 1 worker finishes step 70, then waits for 1 more'
    """
    size = f"{len(change.workers)} worker{'' if len(change.workers) == 1 else 's'}"
    gone = [f"worker {each.worker} {each.text}" for each in change.left]
    came = [f"{_named(change.joined)} joined"] if change.joined else []
    if came and not gone:
        return f"{came[0]} at step {change.step}: {size}"
    s, es = ("s", "es") if len(change.workers) == 1 else ("", "")
    goes_on = f"go{es} on from step {change.step}"
    if change.wanting:
        goes_on = f"finish{es} step {change.step}, then wait{s} for {change.wanting} more"
    return "; ".join([*gone, *came, f"{size} {goes_on}"])


def _named(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return "workers " + ", ".join(map(str, workers[:-1])) + f" and {workers[-1]}"
