"""One membership of the fleet: what the roster publishes, and what its members form a group from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import FleetError

Facts = Mapping[str, Any]
"""What a worker says of itself: host, pid, device, name, emulated."""


class RunOver(FleetError):
    """The run has ended: there is no further generation to wait for."""


@dataclass(frozen=True)
class Gone:
    """Why somebody is no longer in."""

    id: int
    text: str


@dataclass(frozen=True)
class Generation:
    """One membership. While it lasts its members never change, and its rounds need all of them.

    A process that died and came back under its name, between two generations, stands in `left` and in `joined`: the
    id is the same, what the old process held is not.
    """

    number: int
    """Counted up by the roster; never given twice."""
    workers: tuple[int, ...]
    """Ids in rank order: those that hold the training's state in their old order, then newcomers by id."""
    fresh: tuple[int, ...]
    """Those among them that have no state and take a peer's. All of them: the training starts anew."""
    joined: tuple[int, ...]
    """Processes in this one and not in the one before."""
    left: tuple[Gone, ...]
    """Processes in the one before and not in this one."""
    facts: Mapping[int, Facts]
    store: tuple[str, int]
    """Host and port of the torch TCPStore that serves this generation."""
    orderly: bool
    """Every member came from a step boundary, or is fresh."""
    wanting: int
    """How many more workers the minimum needs."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "left": [[gone.id, gone.text] for gone in self.left]}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Generation:
        return cls(
            number=int(said["number"]),
            workers=tuple(int(id) for id in said["workers"]),
            fresh=tuple(int(id) for id in said["fresh"]),
            joined=tuple(int(id) for id in said["joined"]),
            left=tuple(Gone(int(id), str(text)) for id, text in said["left"]),
            facts={int(id): dict(facts) for id, facts in said["facts"].items()},
            store=(str(said["store"][0]), int(said["store"][1])),
            orderly=bool(said["orderly"]),
            wanting=int(said["wanting"]),
        )
