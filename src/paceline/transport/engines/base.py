"""The contract of an engine, which sums and sends the tensors of one group, and of the works that it starts.

A `paceline.transport.group.Group` knows nothing else of what carries its sums. An engine's ranks are places in the
order of its group's topology, and not the ranks that the training sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

LOOK_S = 0.5
"""Seconds between two looks at whether a work that is waited for can still end."""
CLOSED = "the group is not formed, or closed"

Look = Callable[[], None]
"""Raises when what is waited for can never end."""


class Carrier(Protocol):
    """What sends several works in one message."""

    def exchange(self, works: Sequence[Any]) -> None:
        """Send these off together."""


class EngineWork(Protocol):
    """One operation under way."""

    def wait(self, look: Look) -> None:
        """Return when the operation is done; raise RuntimeError when the engine failed.

        ``look`` is called about every `LOOK_S` seconds; when it raises, the wait ends with its error.
        """

    def abandon(self) -> bool:
        """Give the operation up: nobody waits for it any more. False: it may still write into its tensor."""

    @property
    def carrier(self) -> Carrier | None:
        """What may send this work in one message with others; None once it is under way."""
        return None


class Engine(Protocol):
    """Connects the workers of one group. A failed operation may have written anything into its tensor."""

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        """Start to overwrite ``tensor`` with the sum of all workers' tensors, the same bits everywhere."""

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> EngineWork:
        """Start to exchange rows: row i of ``sent`` becomes this worker's row in worker i's ``got``."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> EngineWork:
        """Start to overwrite ``tensor`` with that of rank ``root``."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EngineWork:
        """Start to send ``tensor``, which must not change until the work is done."""

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> EngineWork:
        """Start to receive; messages with one source and tag arrive in the order in which they were sent."""

    def abort(self) -> None:
        """Break off what is under way: it fails within milliseconds."""

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        """Return where the network does not pass: ranks, their address, and the seconds since an answer came."""

    def lost(self) -> bool:
        """Whether a connection to another worker is broken, so that no operation of the whole group can end."""

    def detach(self) -> list[Any]:
        """Give up the engine: nothing starts in it any more, though `abort` still works.

        Returns what holds its resources; they are freed, perhaps slowly, when the last reference is gone.
        """
