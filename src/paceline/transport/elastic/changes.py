"""From one membership to the next, as the training follows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.roster import Generation, Gone


@dataclass(frozen=True)
class MembershipChange:
    """The change from the membership that the training has followed so far to the next."""

    old_ranks: tuple[int | None, ...]
    """The earlier rank of each worker, by new rank; None: it is new, or enters once more."""
    joined: tuple[int, ...]
    left: tuple[Gone, ...]
    """Those who have come since, and those who have left, with the reason."""
    facts: tuple[Any, ...]
    """The facts that each member's training reports, by new rank."""
    generation: Generation


class MembershipListener(Protocol):
    """The training, as the transport reports changes of members to it."""

    def facts(self) -> Any:
        """Return the facts of this worker's training for the others (JSON)."""

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        """Follow a change of members; ``show`` changes the transport's rank, size and workers.

        Must depend on nothing but what is the same on all workers.
        """

    def held(self) -> Collection[str]:
        """Return the digests of the parts of a state that a newcomer holds already."""

    def give_state(self, held: Collection[str]) -> Sequence[torch.Tensor]:
        """Return the complete state at this step boundary, for a newcomer, as parts of bytes.

        Their memory is the training's own, which goes on when they were sent. Parts that all who receive it have
        ``held`` may be left out: they are empty.
        """

    def take_over(self, data: list[torch.Tensor], change: MembershipChange) -> bool:
        """Take over a peer's state.

        False: its loop is one that this worker's script has yet to come to, and ``data`` stays good until then.
        """


def change_to(
    now: Generation,
    *,
    workers: Sequence[int],
    renewed: Collection[int],
    gone: Mapping[int, Gone],
    facts: Sequence[Any],
) -> MembershipChange:
    """Return the change from ``workers``, by rank (below 0: nobody), to a generation.

    ``renewed``: who came, or came once more, since; ``gone``: who left since, and why.
    """
    old = {worker: rank for rank, worker in enumerate(workers)}
    old_ranks = tuple(None if worker in renewed else old.get(worker) for worker in now.workers)
    joined = tuple(worker for worker, before in zip(now.workers, old_ranks, strict=True) if before is None)
    staying = {workers[rank] for rank in old_ranks if rank is not None}
    left = tuple(gone.get(one) or Gone(one, "left") for one in workers if one >= 0 and one not in staying)
    return MembershipChange(old_ranks, joined, left, tuple(facts), now)
