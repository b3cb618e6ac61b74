"""From one membership to the next, as the training hears of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.roster import Generation, Gone


@dataclass(frozen=True)
class MembershipChange:
    """From the membership that the training knows so far to the next."""

    kept: tuple[int | None, ...]
    """By new rank: the rank that worker had; None: it is new, or enters once more."""
    joined: tuple[int, ...]
    left: tuple[Gone, ...]
    """Who was not there and is now, and the other way round, with why."""
    facts: tuple[Any, ...]
    """What each member's training said of itself, by new rank."""
    generation: Generation


class MembershipListener(Protocol):
    """The training, as far as it must know who is there."""

    def facts(self) -> Any:
        """What the others should know of this worker's part (JSON)."""

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        """Other members are there from now on; ``show`` makes the transport's rank, size and workers say so. Must
        depend on nothing but what all of them know."""

    def give_state(self) -> torch.Tensor:
        """The whole state at this step boundary, for a newcomer, as bytes."""

    def take_over(self, data: torch.Tensor, change: MembershipChange) -> bool:
        """Take over a peer's state. False: its loop is one that this worker's script has yet to come to."""


def change_to(
    now: Generation,
    *,
    workers: Sequence[int],
    renewed: Collection[int],
    gone: Mapping[int, Gone],
    facts: Sequence[Any],
) -> MembershipChange:
    """From ``workers``, by rank (below 0: nobody), to a generation. ``renewed``: who came, or came once more, since;
    ``gone``: who left since, and why."""
    old = {worker: rank for rank, worker in enumerate(workers)}
    kept = tuple(None if worker in renewed else old.get(worker) for worker in now.workers)
    joined = tuple(worker for worker, before in zip(now.workers, kept, strict=True) if before is None)
    staying = {workers[rank] for rank in kept if rank is not None}
    left = tuple(gone.get(one) or Gone(one, "left") for one in workers if one >= 0 and one not in staying)
    return MembershipChange(kept, joined, left, tuple(facts), now)
