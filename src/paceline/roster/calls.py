"""The position of each worker in the program, from its heartbeats: calls that can never meet, and who is waited for.

Every collective call is numbered in one sequence, the same on every worker. Two workers that wait in the same call
under unlike names wait for ever; so does one that waits in a call which another has passed by. The roster looks for
that in an elastic fleet, the workers themselves (`paceline.transport.heartbeat`) in one of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import SAME_CALLS, CallMismatch, FleetError, WorkerLost
from paceline.roster.state import Facts

CALLS, BACKGROUND, GROUP = "calls", "rounds", "group"
"""The lanes: sequences of collective calls, each the same on every worker.

Those of the user's thread, in which alone workers can be unlike; rounds that another thread runs in the background; and
the sums of a group of workers (`paceline.transport.fixed.Subgroup`).
"""
STEADY = 2
"""Beats in a row that must say the same before it counts: two beats are never of the same moment."""
REMIND_S = (5.0, 15.0, 30.0)
"""When a waiting worker is told for whom, and then once per minute."""
ERRORS: dict[str, type[FleetError]] = {"lost": WorkerLost, "mismatch": CallMismatch, "fleet": FleetError}
"""The error that each worker raises, by the kind of a failure that was published."""


def reminder_due_s(reminded: int) -> float:
    """Return the seconds of waiting after which the next reminder is due, after ``reminded`` earlier ones.

    >>> [reminder_due_s(reminded) for reminded in range(5)]
    [5.0, 15.0, 30.0, 90.0, 150.0]
    """
    return REMIND_S[reminded] if reminded < len(REMIND_S) else REMIND_S[-1] + 60.0 * (reminded - len(REMIND_S) + 1)


class Spot(NamedTuple):
    """A worker's position in one sequence of calls."""

    call: int
    """Number of the call it is in or, when not waiting, was in last."""
    label: str
    waiting: bool


@dataclass(frozen=True)
class Beat:
    """What a worker last said of itself."""

    generation: int = 0
    """0 in a fleet of fixed size."""
    doing: str = "starting"
    begun: int = 0
    """Steps that the user's thread has begun."""
    spots: Mapping[str, Spot] = field(default_factory=dict)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Beat:
        spots = {str(lane): Spot(int(at[0]), str(at[1]), bool(at[2])) for lane, at in said["spots"].items()}
        return cls(int(said["generation"]), str(said["doing"]), int(said["begun"]), spots)

    def waits(self) -> dict[str, Spot]:
        return {lane: spot for lane, spot in self.spots.items() if spot.waiting}


@dataclass
class Heard:
    """A worker's last beat, and how long its waits have been the same."""

    beat: Beat = field(default_factory=Beat)
    steady: int = 0
    since: float = 0.0
    """Seconds, on the roster's clock, when the present waits were first heard of."""
    reminded: int = 0

    def note(self, beat: Beat, now: float) -> None:
        same = beat.waits() == self.beat.waits() and beat.generation == self.beat.generation
        self.steady = self.steady + 1 if same else 1
        if not same:
            self.since, self.reminded = now, 0
        self.beat = beat

    def reminder_is_due(self, now: float) -> bool:
        """Return whether this worker has waited long enough for a reminder of whom it waits for."""
        return bool(self.beat.waits()) and now - self.since > reminder_due_s(self.reminded)


class Mismatch(NamedTuple):
    """Members of one generation whose calls can never meet."""

    labels: Mapping[int, str]
    """What each of them called."""
    courses: Mapping[int, str]
    """Equal for those that can meet."""

    def strangers(self, since: Mapping[int, int]) -> list[int]:
        """Return those whose calls are not the fleet's (`strangers`)."""
        return strangers(self.courses, since)


def strangers(courses: Mapping[int, Any], since: Mapping[int, int]) -> list[int]:
    """Return the workers that came after the first of these and differ from these, who do not differ themselves.

    Empty where nobody can tell who is right. ``courses``: what should be equal; ``since``: the generation that each
    worker was in first.

    >>> courses = {0: "a round", 1: "a round", 2: "fleet.save()"}
    >>> strangers(courses, {0: 1, 1: 1, 2: 5}), strangers(courses, {0: 1, 1: 1, 2: 1})
    ([2], [])
    """
    first = min(since[id] for id in courses)
    known = {course for id, course in courses.items() if since[id] == first}
    return [id for id, course in courses.items() if course not in known] if len(known) == 1 else []


def mismatch(heard: Mapping[int, Heard]) -> Mismatch | None:
    """Return members of one generation whose calls can never meet; None when all is well."""
    spots = {id: one.beat.spots[CALLS] for id, one in heard.items() if CALLS in one.beat.spots}
    begun = {id: one.beat.begun for id, one in heard.items()}
    steady = {id: spot for id, spot in spots.items() if spot.waiting and heard[id].steady >= STEADY}
    looked_at = set()
    for id, spot in steady.items():
        if (where := (spot, begun[id])) in looked_at:  # in a large fleet nearly all are where others are, too
            continue
        looked_at.add(where)
        if unlike := unlike_labels(id, steady):
            return Mismatch(unlike, unlike)
        if unlike := passed_by(id, spots, begun):
            return Mismatch(unlike, {other: unlike[id] if other == id else "" for other in unlike})
    return None


def unlike_labels(id: int, spots: Mapping[int, Spot]) -> dict[int, str]:
    """Return the labels of all who wait in worker ``id``'s call, when they differ; else nothing."""
    labels = {other: spot.label for other, spot in spots.items() if spot.waiting and spot.call == spots[id].call}
    return labels if len(set(labels.values())) > 1 else {}


def passed_by(id: int, spots: Mapping[int, Spot], begun: Mapping[int, int]) -> dict[int, str]:
    """Return worker ``id``'s label and those who have begun a later step without its call, if there are any."""
    at = spots[id]
    gone = [other for other, spot in spots.items() if spot.call < at.call and begun[other] > begun[id]]
    return {id: at.label, **{other: f"step {begun[other] - 1} without it" for other in gone}} if gone else {}


def waited_for(id: int, heard: Mapping[int, Heard]) -> tuple[str, str]:
    """Return the call in which this member waits, and the members that are not in it yet with what they do."""
    lane, at = min(heard[id].beat.waits().items())
    behind = [
        f"worker {other} ({one.beat.doing})"
        for other, one in heard.items()
        if other != id and (lane not in one.beat.spots or one.beat.spots[lane].call < at.call)
    ]
    return at.label, ", ".join(behind)


def without_answer(found: Iterable[tuple[Sequence[int], str, float]], names: Sequence[str]) -> str:
    """Name those whom the network does not reach.

    ``found``: positions in ``names``, their address, and the seconds since an answer.

    >>> without_answer([([1], "10.0.0.3", 6.2)], ["worker 0", "worker 3"])
    'the network to worker 3 at 10.0.0.3, which has acknowledged nothing for 6 s'
    """
    said = [
        f"{' or '.join(names[one] for one in those)} at {address}, which has acknowledged nothing for {silent_s:.0f} s"
        for those, address, silent_s in found
    ]
    return f"the network to {'; to '.join(said)}" if said else ""


def name_workers(facts: Mapping[int, Facts]) -> dict[int, str]:
    """Return each worker's name in sentences: with its device, and its host when there are several.

    >>> name_workers({0: {"device": "cpu", "host": "a"}, 3: {"device": "cuda:0", "host": "a"}})
    {0: 'worker 0 (cpu)', 3: 'worker 3 (cuda:0)'}
    """
    alone = len({said.get("host") for said in facts.values()}) == 1
    names = {}
    for id, said in facts.items():
        device = str(said.get("device") or said.get("name") or "?")
        names[id] = f"worker {id} ({device})" if alone else f"worker {id} ({said.get('host')}, {device})"
    return names


def sentence(labels: Mapping[int, str], names: Mapping[int, str]) -> str:
    """Return a sentence: these workers are in unlike calls, with what each called."""
    callers: dict[str, list[int]] = {}
    for id in sorted(labels):
        callers.setdefault(labels[id], []).append(id)
    said = [f"{listed(ids, names)} called {label}" for label, ids in callers.items()]
    return f"{', but '.join(said)}: {SAME_CALLS}"


def listed(ids: Sequence[int], names: Mapping[int, str]) -> str:
    """Return workers as a list in words.

    >>> listed([1, 2, 3], {}), listed([1], {1: "worker 1 (cpu)"}), listed([1], {})
    ('workers 1, 2 and 3', 'worker 1 (cpu)', 'worker 1')
    """
    if len(ids) == 1:
        return names.get(ids[0], f"worker {ids[0]}")
    return "workers " + ", ".join(str(id) for id in ids[:-1]) + f" and {ids[-1]}"
