"""Some workers of a fleet with sums of their own: what a group of `paceline.Averaging` combines its gradients over.

A group's sums run on an engine of its own, beside the whole fleet's, and are counted apart, for unlike groups make
unlike numbers of them. Who is waited for is watched by the fleet's `Heartbeat`, and named like everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.roster.calls import GROUP
from paceline.transport.base import Collective, Keeps, Pending, made
from paceline.transport.group import Group, let_go
from paceline.transport.heartbeat import Heartbeat


class Subgroup(Collective):
    """The members of one group."""

    def __init__(
        self, ranks: Sequence[int], group: Group, *, heartbeat: Heartbeat, pending: Callable[..., Pending]
    ) -> None:
        """``group``: the members, connected, in the order of ``ranks``. ``pending`` starts an engine's work and watches
        over it."""
        self.group, self._heartbeat, self._pending = group, heartbeat, pending
        self.rank, self.size = group.rank, group.size
        heartbeat.group = tuple(ranks)

    @contextmanager
    def round(self, label: str, *, aside: bool = False, keeps: Keeps = ()) -> Iterator[list[torch.Tensor]]:
        self._heartbeat.enter(label, lane=GROUP)
        try:
            yield made(keeps)
            self.group.round_is_over()
        finally:
            self._heartbeat.leave(lane=GROUP)

    def sum(self, tensor: torch.Tensor) -> Pending:
        return self._pending(lambda _: self.group.start_sum(tensor))

    def gather(self, label: str, value: Any) -> list[Any]:
        """Two sums: how long everybody's JSON is, and the JSON, each in a row of its own."""
        said = torch.frombuffer(
            bytearray(json.dumps(value() if callable(value) else value).encode()), dtype=torch.uint8
        )
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(said)
        with self.round(label):
            self.sum(lengths).wait()
            rows = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
            rows[self.rank, : len(said)] = said
            self.sum(rows).wait()
        sizes = lengths.tolist()
        return [json.loads(bytes(row[:size])) for row, size in zip(rows.tolist(), sizes, strict=True)]

    def close(self, *, failure: BaseException | None = None) -> None:
        """Let go of the engine; the fleet's transport closes its connections."""
        let_go(self.group.detach())
        self.group.gpus = None
