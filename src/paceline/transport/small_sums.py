"""Small sums by way of the leader: two messages a worker instead of a ring's many.

Gloo's ring has every worker send some ``4 (n - 1)`` messages, each after the one before it, which for a few kilobytes
is all waiting: 5 ms for 4 workers on two cores, where this takes 0.6. Every worker sends its tensor to the leader; it
adds them up in the order of ranks and sends the sum back, so everybody has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.transport.network import ENGINE_TIMEOUT

MOST_BYTES = 2 << 20
"""What the leader may receive for one sum; beyond it the ring, in which every worker sends alike, is quicker."""
FIRST_TAG = 1 << 30


def is_small(tensor: torch.Tensor, size: int) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() * (size - 1) <= MOST_BYTES


class StarSum:
    """One sum under way; ``number`` counts the fleet's star sums from 0, the same on every worker.

    Nobody waits for a send: on a connection that breaks at that moment Gloo may forget to wake whoever does. That a
    part has arrived shows in the sum that comes back; that the sum has, in the next round. Until then this object must
    be kept (`Outbox`), for a send that is freed is cancelled.
    """

    def __init__(self, group: Any, tensor: torch.Tensor, *, rank: int, size: int, number: int) -> None:
        self._group, self._tensor, self._leads, self._size = group, tensor, rank == 0, size
        self._tag = FIRST_TAG + number % FIRST_TAG
        self._theirs: list[torch.Tensor] = []
        self.works: list[Any] = []
        """What this worker receives."""
        self._sent: list[Any] = []
        if self._leads:
            self._theirs = [torch.empty_like(tensor) for _ in range(size - 1)]
            self.works = [self._do(group.recv, part, other) for other, part in enumerate(self._theirs, start=1)]
        else:
            self._sent = [self._do(group.send, tensor, 0)]

    def _do(self, act: Callable[..., Any], tensor: torch.Tensor, other: int) -> Any:
        return act([tensor], other, self._tag)

    def wait(self) -> None:
        if not self._leads:
            self.works = [self._do(self._group.recv, self._tensor, 0)]
        for work in self.works:
            work.wait(ENGINE_TIMEOUT)
        if self._leads:
            for part in self._theirs:
                self._tensor.add_(part)
            total = self._tensor.clone()  # the caller goes on with its own while this is on its way
            self._sent = [self._do(self._group.send, total, other) for other in range(1, self._size)]


class Outbox:
    """Star sums whose sends may still be on their way: those of this round and of the one before."""

    def __init__(self) -> None:
        self._now: list[StarSum] = []
        self._before: list[StarSum] = []

    def keep(self, star: StarSum) -> StarSum:
        self._now.append(star)
        return star

    def round_is_over(self) -> None:
        """Everybody has come to this round, and so has all that was sent before it."""
        if self._now:  # a round without sums shows nothing of who has come
            self._before, self._now = self._now, []

    def empty(self) -> list[StarSum]:
        """Give them up."""
        given_up, self._before, self._now = self._before + self._now, [], []
        return given_up
