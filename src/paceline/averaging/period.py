"""A period: what the workers of one group may do between two rounds of parameters, and what they have done of it.

What is dealt for a period, and who takes how much of it, is the same on every worker: it follows from the last round's
facts. A group makes its local steps together, a worker without a group by itself. How many samples every member has
done is a matter of counting steps, so nobody in a group has to ask whether another one has something left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import concurrency
from paceline.averaging.merge import MergeSettings
from paceline.pace.shares import by_the_clock, proportional
from paceline.records import Plan
from paceline.step.context import LoopContext

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AHEAD = 2
"""Periods' worth of samples dealt at once when rounds run beside local steps: one, and one for while its round runs."""


@dataclass
class Period:
    """What this worker and its group have done since the last round was begun."""

    began: float
    shares: tuple[int, ...]
    """Samples dealt to each worker of the fleet."""
    windows: tuple[int, ...]
    """Samples that each member of this worker's group may do."""
    batches: tuple[int, ...]
    """Samples of each member in one local step."""
    member: int
    """This worker's position in its group."""
    done: list[int] = field(default_factory=list)
    """Samples that each member has done."""
    steps: int = 0
    micro_batches: int = 0
    weight: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    """Seconds of this worker's own work in its local steps."""
    wall_s: float = 0.0
    """Seconds of the local steps, waiting for the others of the group included."""
    slowest_s: float = 0.0
    contraction: float = 0.0
    over: bool = False
    """The group's first member reported that its time is up."""
    added: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done = self.done or [0] * len(self.windows)

    @property
    def samples(self) -> int:
        return self.done[self.member]

    def parts(self) -> tuple[int, ...]:
        """Return what each member does in the next local step; nothing but zeros when nothing is left.

        >>> Period(began=0.0, shares=(4, 3), windows=(4, 3), batches=(3, 1), member=0, done=[3, 1]).parts()
        (1, 1)
        """
        rooms = (window - done for window, done in zip(self.windows, self.done, strict=True))
        return tuple(min(batch, room) for batch, room in zip(self.batches, rooms, strict=True))

    @property
    def exhausted(self) -> bool:
        return not any(self.parts())

    def count(self, parts: Sequence[int]) -> None:
        """Count one more local step."""
        self.steps += 1
        self.done = [done + part for done, part in zip(self.done, parts, strict=True)]

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Follow a loss of members: ``old_ranks`` has that of each new rank; this worker's part stays."""
        self.shares = tuple(0 if old is None else self.shares[old] for old in old_ranks)

    def followed(self, now: float) -> Period:
        """Return the period after this one while its round is under way: with what is left of what was dealt."""
        left = tuple(window - done for window, done in zip(self.windows, self.done, strict=True))
        return Period(began=now, shares=self.shares, windows=left, batches=self.batches, member=self.member)


@dataclass(frozen=True)
class Unaveraged:
    """What a worker has done since parameters were last averaged."""

    steps: int = 0
    samples: int = 0
    contraction: float = 0.0

    def __add__(self, period: Period) -> Unaveraged:
        return Unaveraged(
            self.steps + period.steps, self.samples + period.samples, self.contraction + period.contraction
        )


NOTHING = Unaveraged()


class GroupPosition(NamedTuple):
    """A worker's position among the groups."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks that step together; a worker without a group is one by itself."""
    members: tuple[int, ...]
    """The ranks of this worker's group."""
    member: int
    """Which of them it is."""


def group_position(settings: MergeSettings, *, rank: int, size: int) -> GroupPosition:
    """Return where the worker of this rank stands."""
    asked = settings.groups
    groups = tuple((one,) for one in range(size)) if asked is None else tuple(tuple(group) for group in asked)
    members = next(group for group in groups if rank in group)
    return GroupPosition(groups, members, members.index(rank))


class PeriodDealer:
    """Deals periods to the workers of a fleet."""

    def __init__(self, loop: LoopContext, settings: MergeSettings, *, overlaps: bool, lengths: Sequence[int]) -> None:
        """Deal to the workers of this loop.

        ``lengths``: how much of an epoch each worker claims when it opens; empty: it is dealt as it goes.
        """
        self._loop, self._settings, self._overlaps, self._lengths = loop, settings, overlaps, tuple(lengths)
        size = loop.transport.size
        self.position: GroupPosition = group_position(settings, rank=loop.transport.rank, size=size)
        self.plan: Plan | None = None
        self.together = np.zeros(size)
        """What each worker waits to do together with the others, as a number, by rank; 0: nothing."""
        self._speeds = np.zeros(size)
        """Samples per second of each worker's own work in the last period it worked in."""
        self._rates = np.zeros(size)
        """Samples per second with waiting for the others of the group included."""

    def open(self, round_number: int) -> Period:
        """Deal a period."""
        feed = self._loop.dealing
        if not self.by_arrival:
            self.plan = self.plan or self._agree_on_plan(round_number)
        if self._lengths and feed.remaining == feed.length:
            feed.deal(self._lengths)  # an epoch opens: everybody claims its own part and the common one
        nothing, member = (0,) * len(self.position.members), self.position.member
        period = Period(began=concurrency.perf_counter(), shares=(), windows=nothing, batches=nothing, member=member)
        self.deal(period, None)
        return period

    def _agree_on_plan(self, round_number: int) -> Plan:
        """Return the leader's plan where none came with the last round: before the first, or for other members."""
        transport, training = self._loop.transport, self._loop.training

        def mine() -> dict[str, Any] | None:
            return training.plan_for(round_number).to_json() if transport.rank == 0 else None

        return Plan.from_json(transport.gather(f"the plan after {round_number} rounds", mine)[0])

    def deal(self, period: Period, floors: Ints | None) -> None:
        """Deal to all, ``floors`` at least, and let the period go on with what this worker's group was dealt."""
        wanted, batches = self._wanted()
        wanted = np.where(self._waiting(), 0, wanted)
        if floors is not None:
            wanted = above(np.where(self._waiting(), 0, floors), wanted, self._loop.dealing.remaining)
        period.shares = self._loop.dealing.deal(tuple(wanted.tolist()))
        period.windows = tuple(period.shares[member] for member in self.position.members)
        period.batches = tuple(int(batches[member]) for member in self.position.members)

    def _waiting(self) -> NDArray[np.bool_]:
        """Return who waits for the others to come to the same call.

        What is left of an epoch must not lie with them: those that are waited for may need it to get there.
        """
        waiting = self.together > 0
        return waiting & (not waiting.all() and not self._lengths)

    def _wanted(self) -> tuple[Ints, Ints]:
        """Return the samples to deal to each worker, and its samples of one local step."""
        size = self._loop.transport.size
        equal = max(1, self._loop.settings.global_batch // size)
        if self.period_s is not None:
            shares, batches = by_the_clock(
                self.position.groups, batch=equal, speeds=self._speeds, rates=self._rates, period_s=self.period_s
            )
        else:
            # With a common part everybody has as much, and is to finish it at the same time; by arrival nobody waits.
            alike = bool(self._lengths) or self.by_arrival
            batches = np.full(size, equal) if alike else np.maximum(1, self._planned())
            shares = batches * self.steps_per_round
        return shares * (AHEAD if self._overlaps else 1), batches

    def _planned(self) -> Ints:
        assert self.plan is not None
        return np.asarray(self.plan.samples)

    @property
    def by_arrival(self) -> bool:
        """Whether workers meet the centre one by one."""
        return self._settings.by_arrival(self._loop.transport.size)

    @property
    def period_s(self) -> float | None:
        """Seconds of a period; None: it is counted in steps."""
        return self._settings.period_s

    @property
    def steps_per_round(self) -> int:
        """Local steps of a period that is counted in steps."""
        return self._settings.steps_per_round

    def note_speeds(self, samples: Ints, *, seconds: NDArray[np.float64], walls: NDArray[np.float64]) -> None:
        """Learn from a round what each worker had done, and in which time."""
        self._speeds = np.where(seconds > 0, samples / np.maximum(seconds, 1e-9), self._speeds)
        self._rates = np.where(walls > 0, samples / np.maximum(walls, 1e-9), self._rates)

    # -- state -------------------------------------------------------------------------------------------------------

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Follow a change of members: by new rank, ``old_ranks`` holds each member's old one."""
        self.find_position()
        self._speeds, self._rates = followed(self._speeds, old_ranks), followed(self._rates, old_ranks)
        self.plan = None

    def find_position(self) -> None:
        """Find the position among the present members, of whom none is known to wait."""
        transport = self._loop.transport
        self.position = group_position(self._settings, rank=transport.rank, size=transport.size)
        self.together = np.zeros(transport.size)

    def state_dict(self) -> dict[str, Any]:
        return {"speeds": self._speeds.tolist(), "rates": self._rates.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["speeds"]) == self._loop.transport.size:
            self._speeds = np.array(state["speeds"])
            self._rates = np.array(state.get("rates", state["speeds"]))


def followed(figures: Floats, old_ranks: Sequence[int | None]) -> Floats:
    """Return a figure of each worker (0: not known) among other members; a newcomer is taken to be like the others.

    >>> followed(np.array([1.0, 4.0, 0.0, 8.0]), (3, 1, 2, None)).tolist()
    [8.0, 4.0, 0.0, 6.0]
    """
    stayed = np.array([0.0 if old is None else figures[old] for old in old_ranks])
    known = stayed[stayed > 0]
    return np.where([old is None for old in old_ranks], known.mean() if known.size else 0.0, stayed)


def above(floors: Ints, wanted: Ints, remaining: int | None) -> Ints:
    """Return shares of at least ``floors`` and otherwise as wanted, cut in proportion where the epoch has less left.

    What a worker was dealt and may be working on right now is its floor: nobody else can be dealt it.

    >>> above(np.array([3, 0]), np.array([5, 4]), 6).tolist()
    [4, 2]
    """
    more = np.maximum(wanted - floors, 0)
    room = int(more.sum()) if remaining is None else remaining - int(floors.sum())
    assert room >= 0, "more was dealt than there is"
    return floors + (more if more.sum() <= room else proportional(more, room, maximum=more.tolist()))
