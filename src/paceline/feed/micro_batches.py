"""Micro-batches, and how a worker's share is cut into them: as few as fit in memory, full ones first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.feed.ranges import Ranges
from paceline.records import Range

Piece = tuple[tuple[Range, ...], NDArray[np.int64]]
"""Positions of the epoch's order, and the dataset indices there."""


class MicroBatch(NamedTuple):
    """Samples that go through the model at once."""

    batch: Any
    samples: int
    epoch: int
    position: int
    """Position of the first sample in the epoch's order: the key of the micro-batch's random numbers."""
    last: bool
    """Whether no more micro-batches come in this step."""
    given: int = 0
    """Samples in a batch that a batch sampler gave, which counts as one; 0 where the micro-batch counts its samples."""
    own: int | None = None
    """Samples of this process, in a worker of several; None: all.

    0 where the batch is only there to go through the model beside the others'.
    """

    @property
    def rows(self) -> int:
        """Return the samples in the micro-batch, however it counts; in a worker of several processes, this one's."""
        return (self.given or self.samples) if self.own is None else self.own


def holds_one(batch: Any) -> bool:
    """Return whether the tensors of a batch are of one sample, as far as their first dimension shows.

    >>> holds_one({"x": torch.zeros(1, 3), "length": 7}), holds_one([torch.zeros(1, 3), torch.zeros(8)])
    (True, False)
    """
    if isinstance(batch, torch.Tensor):
        return not batch.dim() or len(batch) == 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return all(map(holds_one, parts))


def pieces_of(ranges: Iterable[Range], largest: int) -> list[tuple[Range, ...]]:
    """Cut a share into as few micro-batches as fit ``largest``; all are full but the last two, which differ by one.

    So what loader processes prepare for the next step, before its share is known, is mostly right, and most
    micro-batches have the same shape. A last micro-batch of a single sample would cost nearly as much as a full one,
    and batch norm cannot train on it.

    >>> from paceline.feed.ranges import total
    >>> [total(piece) for piece in pieces_of([(0, 13)], 4)]
    [4, 4, 3, 2]
    """
    rest = Ranges(ranges)
    count = -(-rest.total // largest)
    first = [rest.take_front(largest) for _ in range(count - 2)]
    return first + [rest.take_front(-(-rest.total // left)) for left in range(min(count, 2), 0, -1)]


def own_rows(piece: Piece, shard: int, shards: int) -> tuple[Piece, int | None]:
    """Return the part of a micro-batch that one of a worker's processes takes, and how many of its rows count.

    The parts are as equal as can be. A process whose part is empty takes the first row, which does not count, because
    all processes go through the model together. The count is None where there is one process only.

    >>> [own_rows((((3, 8),), np.arange(5)), shard, 2)[0][0] for shard in (0, 1)]
    [((3, 5),), ((5, 8),)]
    >>> own_rows((((3, 4),), np.arange(1)), 0, 2)
    ((((3, 4),), array([0])), 0)
    """
    if shards == 1:
        return piece, None
    ranges, indices = piece
    start, end = (len(indices) * at // shards for at in (shard, shard + 1))
    if start == end:
        return (Ranges(ranges).take_front(1), indices[:1]), 0
    rest = Ranges(ranges)
    rest.take_front(start)
    return (rest.take_front(end - start), indices[start:end]), end - start


def front_of(batch: Any, *, samples: int, keep: int) -> Any:
    """Return the first ``keep`` of a batch's samples if every tensor has one row per sample, else None.

    >>> front_of([torch.arange(4), torch.zeros(4, 2)], samples=4, keep=3)[0]
    tensor([0, 1, 2])
    """
    if isinstance(batch, torch.Tensor):
        return batch[:keep] if batch.dim() and len(batch) == samples else None
    if type(batch) is dict:
        parts = {name: front_of(part, samples=samples, keep=keep) for name, part in batch.items()}
        return None if any(part is None for part in parts.values()) else parts
    if type(batch) in (list, tuple):
        fronts = [front_of(part, samples=samples, keep=keep) for part in batch]
        return None if any(part is None for part in fronts) else type(batch)(fronts)
    return None
