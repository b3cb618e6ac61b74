"""Some workers of a fleet with sums of their own: what a group of `paceline.Averaging` combines its gradients over.

A group's sums run on an engine of its own, beside the whole fleet's, and are counted apart, for unlike groups make
unlike numbers of them. Who is waited for is watched by the fleet's `Presence`, and named like everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.transport.base import Pending, Transport
from paceline.transport.heartbeat import GROUP, Presence
from paceline.transport.nccl import NcclGroup
from paceline.transport.small_sums import Outbox, StarSum, is_small


class Subgroup:
    """The transport of one group: sums and facts go to its members; everything else is the fleet's."""

    name = "subgroup"
    solitary = False
    elastic = False

    def __init__(
        self,
        fleet: Transport,
        ranks: Sequence[int],
        engine: Any,
        *,
        gpus: NcclGroup | None = None,
        alike: bool,
        presence: Presence,
        pending: Callable[..., Pending],
    ) -> None:
        """``engine``: the members' process group, in the order of ``ranks``; ``gpus``: the same for what lies on GPUs,
        where all have one. ``alike``: all hold their tensors on one kind of device. ``pending`` starts an engine's work
        and watches over it."""
        self._alike = alike
        self._fleet, self._engine, self._presence, self._pending = fleet, engine, presence, pending
        self.gpus = gpus
        self.backend, self.generation = fleet.backend, fleet.generation
        self.rank, self.size = list(ranks).index(fleet.rank), len(ranks)
        self.workers = tuple(fleet.workers[rank] for rank in ranks)
        self.calls = 0
        self._stars = 0
        self._outbox = Outbox()
        presence.group = tuple(ranks)

    @contextmanager
    def round(self, label: str, *, aside: bool = False, keeps: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        self._presence.enter(label, lane=GROUP)
        try:
            yield
            self._outbox.round_is_over()
        finally:
            self._presence.leave(lane=GROUP)

    def sum(self, tensor: torch.Tensor) -> Pending:
        if self.gpus is not None and tensor.is_cuda:
            return self._pending(self.gpus.sum, tensor)
        if self._alike and is_small(tensor, self.size):
            self._stars += 1
            return self._pending(self._star_sum, tensor)
        return self._pending(self._engine.allreduce, [tensor])

    def _star_sum(self, tensor: torch.Tensor) -> StarSum:
        return self._outbox.keep(StarSum(self._engine, tensor, rank=self.rank, size=self.size, number=self._stars))

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
        self._outbox.empty()
        self._engine = self.gpus = None

    # -- the fleet's ---------------------------------------------------------------------------------------------------

    def slot(self, name: str) -> int:
        return self._fleet.slot(name)

    def slot_name(self, slot: int) -> str:
        return self._fleet.slot_name(slot)

    def doing(self, what: str, *, begun: int | None = None) -> None:
        self._fleet.doing(what, begun=begun)

    def signal(self, name: str) -> None:
        self._fleet.signal(name)

    def tally(self, name: str) -> int:
        return self._fleet.tally(name)

    def heard(self, name: str) -> bool:
        return self._fleet.heard(name)

    def forget(self, name: str) -> None:
        self._fleet.forget(name)

    # -- not a group's business ----------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("parameters are handed out by the whole fleet's leader")

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        raise AssertionError("a group only sums")

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        raise AssertionError("a group only sums")
