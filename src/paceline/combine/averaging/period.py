"""A period: what the workers of one group may do between two rounds of parameters, and what they have done of it.

A group makes its local steps together, a worker without a group by itself. How many samples every member has done is a
matter of counting steps, so nobody in a group has to ask whether another one has something left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.pace.shares import proportional

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    """This worker's place in its group."""
    done: list[int] = field(default_factory=list)
    """Samples that each member has done."""
    steps: int = 0
    micro_batches: int = 0
    weight: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    """Of this worker's own work in its local steps."""
    wall_s: float = 0.0
    """Of the local steps, waiting for the others of the group included."""
    slowest_s: float = 0.0
    contraction: float = 0.0
    over: bool = False
    """The group's first member said that its time is up."""
    added: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done = self.done or [0] * len(self.windows)

    @property
    def samples(self) -> int:
        return self.done[self.member]

    def parts(self) -> tuple[int, ...]:
        """What each member does in the next local step; nothing but zeros when nothing is left.

        >>> Period(began=0.0, shares=(4, 3), windows=(4, 3), batches=(3, 1), member=0, done=[3, 1]).parts()
        (1, 1)
        """
        rooms = (window - done for window, done in zip(self.windows, self.done, strict=True))
        return tuple(min(batch, room) for batch, room in zip(self.batches, rooms, strict=True))

    @property
    def exhausted(self) -> bool:
        return not any(self.parts())

    def count(self, parts: Sequence[int]) -> None:
        """One more local step."""
        self.steps += 1
        self.done = [done + part for done, part in zip(self.done, parts, strict=True)]

    def members_changed(self, kept: Sequence[int | None]) -> None:
        """Some were lost: by new rank, ``kept`` says who the others were. This worker's own part stays as it is."""
        self.shares = tuple(0 if old is None else self.shares[old] for old in kept)

    def followed(self, now: float) -> Period:
        """The period after this one while its round is under way: with what is left of what was dealt."""
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


def followed(figures: Floats, kept: Sequence[int | None]) -> Floats:
    """A figure of each worker (0: not known) among other members: a newcomer is supposed to be like the others.

    >>> followed(np.array([1.0, 4.0, 0.0, 8.0]), (3, 1, 2, None)).tolist()
    [8.0, 4.0, 0.0, 6.0]
    """
    stayed = np.array([0.0 if old is None else figures[old] for old in kept])
    known = stayed[stayed > 0]
    return np.where([old is None for old in kept], known.mean() if known.size else 0.0, stayed)


def above(floors: Ints, wanted: Ints, remaining: int | None) -> Ints:
    """Shares of at least ``floors`` and otherwise as wanted, cut in proportion where the epoch has less left.

    What a worker was dealt and may be working on right now is its floor: nobody else can be dealt it.

    >>> above(np.array([3, 0]), np.array([5, 4]), 6).tolist()
    [4, 2]
    """
    more = np.maximum(wanted - floors, 0)
    room = int(more.sum()) if remaining is None else remaining - int(floors.sum())
    assert room >= 0, "more was dealt than there is"
    return floors + (more if more.sum() <= room else proportional(more, room, maximum=more.tolist()))
