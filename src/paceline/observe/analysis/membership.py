"""Who comes and goes: the ``generation`` events of a log, and which step records they void.

A generation is one membership of an elastic fleet. Its event says from which step on it holds, who joined and who
left, and why. A leader may die after it wrote a step that the others could not keep, or wake up and write it late; and
it may die before it wrote that its generation began. So a record stands by three rules, whatever the order of the
lines: it is void when a later generation begins at its step or before; a generation without an event began at the first
step that a record of it is about; and of two records of one step and generation the first counts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.log import sanitise
from paceline.records import StepRecord

Timed = tuple[StepRecord, float]
"""A record, and unix seconds at which it was logged (NaN: not known)."""


@dataclass(frozen=True)
class Departure:
    """Somebody who is no longer there, and why: ``was killed by signal 9 (SIGKILL)``."""

    worker: int
    text: str

    @property
    def short(self) -> str:
        """For a narrow place.

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
    """What those who joined said of themselves."""


def parse_generation(event: Mapping[str, Any]) -> GenerationEvent | None:
    """The change in a ``generation`` event; None when it lacks what makes it one."""
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
    )


def _entries(value: Any) -> list[Mapping[str, Any]]:
    listed = value if isinstance(value, (list, tuple)) else ()
    return [entry for entry in listed if isinstance(entry, Mapping) and _is_count(entry.get("id"))]


def _is_count(value: Any) -> bool:
    return sanitise.count_or(value, -1) >= 0


def changes(events: Iterable[Mapping[str, Any]]) -> list[GenerationEvent]:
    """Those of a log's events that tell of a change, in order. The first generation changes nothing."""
    found = [change for event in events if (change := parse_generation(event)) is not None]
    return [change for change in found if change.number > 1 and (change.joined or change.left)]


class RecordFilter:
    """Rules by which records stand, as generations come in."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        """First step of every generation, by number."""
        self._announced: set[int] = set()
        """Numbers of generations whose event was read: its step is exact."""
        self.number = 0
        """The newest generation; 0: none is known."""

    def begin_generation(self, change: GenerationEvent, steps: MutableSequence[Timed]) -> list[Timed]:
        """A generation begins: take the records that it voids out of ``steps``; they are returned."""
        self._announced.add(change.number)
        return self._begin(change.number, change.step, steps)

    def take_note(self, record: StepRecord, steps: MutableSequence[Timed]) -> list[Timed]:
        """Of a record that stands: where its generation has no event, take the records that it voids out of ``steps``;
        they are returned."""
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
        """Whether it is of an earlier generation than the newest."""
        return record.generation < self.number

    def is_void(self, record: StepRecord) -> bool:
        """Whether a later generation began at its step or before."""
        late, starts = self.is_late(record), self._starts.items()
        return late and any(number > record.generation and step <= record.step for number, step in starts)

    def stands(self, record: StepRecord, steps: Sequence[Timed]) -> bool:
        """Whether it counts behind these steps: a late one does where it fills a gap."""
        newest = steps[-1][0].step if steps else -1
        return not self.is_late(record) or (record.step > newest and not self.is_void(record))


def insert_late(steps: list[Timed], new: Timed) -> None:
    """Put a late record where it belongs; the one that is there already stays."""
    place = len(steps)
    while place and steps[place - 1][0].step > new[0].step:
        place -= 1
    if not place or steps[place - 1][0].step != new[0].step:
        steps.insert(place, new)


def pause_s(change: GenerationEvent, records: Sequence[StepRecord], times: Sequence[float]) -> float:
    """Seconds from the last step that was logged before the change to the first one after; NaN when not known."""
    after = bisect_left(records, change.number, key=lambda record: record.generation)
    gap = times[after] - times[after - 1] if 0 < after < min(len(records), len(times)) else math.nan
    return gap if gap >= 0 else math.nan
