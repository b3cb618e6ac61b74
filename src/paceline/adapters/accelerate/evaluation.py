"""An evaluation over a prepared loader: the set in blocks.

All workers go through equally many blocks, each of which is one batch per worker, so that calls such as
``gather_for_metrics`` inside the loop meet. Every sample comes once; workers' parts, in order, are the dataset's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.feed import Source
from paceline.pace.shares import proportional
from paceline.settings import must_agree
from paceline.training.evaluate import AgreedSpeeds, facts_of, length_of

if TYPE_CHECKING:
    from paceline.adapters.accelerate.joined import JoinedFleet


@dataclass(frozen=True)
class EvaluationBatch:
    """This worker's batch of the block that an evaluation is in."""

    rows: int
    """Samples that count; 0 where the set has fewer samples than there are workers."""
    batch_size: int
    alone: bool
    """Whether every worker goes through the complete set by itself."""


class BlockEvaluation:
    """One pass over the data of a ``loader`` from before ``prepare``, without its first ``skip`` batches."""

    def __init__(self, joined: JoinedFleet, loader: Any, *, skip: int, even_batches: bool, split_batches: bool) -> None:
        self._joined, self._skip, self._even, self._split = joined, skip, even_batches, split_batches
        context = joined.context
        self._source = Source(loader, device=context.device, seed=context.seed)

    def begin(self) -> Iterator[tuple[Any, EvaluationBatch, bool]]:
        """Agree with the other workers; return this one's batches, what each is, and whether it is the last."""
        context, source = self._joined.context, self._source
        if source.length is None:
            raise ValueError(
                f"{source.name} is an IterableDataset, whose samples cannot be dealt once each in an evaluation: "
                "give a dataset with a length"
            )
        alone = context.elastic is not None or context.transport.solitary
        rank, parts = (0, self._parts([1])) if alone else (context.transport.rank, self._agree())
        return self._batches(parts, rank, alone)

    def close(self) -> None:
        """End the loader processes."""
        self._source.close()

    def _batches(
        self, parts: Sequence[Sequence[int]], rank: int, alone: bool
    ) -> Iterator[tuple[Any, EvaluationBatch, bool]]:
        for number, (batch, counts) in enumerate(self._own_batches(parts, rank)):
            if number >= self._skip:
                rows = parts[number][rank] if counts else 0
                yield batch, EvaluationBatch(rows, self._source.batch_size or 1, alone), number == len(parts) - 1

    def _agree(self) -> list[list[int]]:
        """Check the data against the other workers'; return the rows of every worker in every block."""
        context, same, source = self._joined.context, self._joined.same_data, self._source
        speeds = AgreedSpeeds(context)
        facts = {
            **facts_of(source),
            "batch_size": source.batch_size,
            "skipped": self._skip,
            "even_batches": self._even,
        }
        label = "an evaluation over a prepared loader"
        with context.meet(label):
            seen = same.look(source.dataset, source.length, source.look)
            answers = must_agree(context.transport, label, facts, also=speeds.own(), each=seen)
            same.check(label, source.name, answers, seen, source.look)
            speeds.take(answers)
        equal = [1] * context.transport.size
        return self._parts(equal if self._even else speeds.of_members()[1])

    def _parts(self, speeds: Sequence[int]) -> list[list[int]]:
        length, size = length_of(self._source), self._source.batch_size or 1
        if self._split:
            size = -(-size // len(speeds))
        if self._source.drop_last:
            length -= length % (size * len(speeds))
        return block_parts(length, size, speeds)

    def _own_batches(self, parts: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[Any, bool]]:
        source, draws, pieces, start = self._source, self._source.once, [], 0
        for block in parts:
            first = start + sum(block[:rank])
            rows = range(first, first + block[rank]) if block[rank] else range(start, start + 1)
            indices = np.arange(rows.start, rows.stop, dtype=np.int64)
            indices = indices if isinstance(draws, int) else draws[rows.start : rows.stop]
            pieces.append((((rows.start, rows.stop),), indices))
            start += sum(block)
        if source.ahead:
            source.expect(0, pieces)
        for block, (piece, indices) in zip(parts, pieces, strict=True):
            yield source.take(0, piece, indices), block[rank] > 0


def block_parts(length: int, batch_size: int, speeds: Sequence[int]) -> list[list[int]]:
    """Return the rows of every worker in every block: the fastest has ``batch_size``, and no row is given twice.

    Every worker has a row in every block, unless there are fewer samples than workers. A last block that is too short
    for that takes from the one before.

    >>> block_parts(11, 2, [1, 1]), block_parts(9, 2, [1, 1]), block_parts(1, 4, [1, 1])
    ([[2, 2], [2, 2], [2, 1]], [[2, 2], [2, 1], [1, 1]], [[1, 0]])
    >>> block_parts(16, 6, [3, 1])
    [[6, 2], [6, 2]]
    """
    workers = len(speeds)
    full = [max(1, batch_size * speed // max(speeds)) for speed in speeds]
    whole, rest = divmod(length, sum(full))
    blocks = [sum(full)] * whole + ([rest] if rest else [])
    if len(blocks) > 1 and blocks[-1] < workers:
        blocks[-2] -= workers - blocks[-1]
        blocks[-1] = workers
    return [full if block == sum(full) else _shared(block, full, workers) for block in blocks]


def _shared(rows: int, full: Sequence[int], workers: int) -> list[int]:
    if rows < workers:
        return [int(worker < rows) for worker in range(workers)]
    least = np.ones(workers, dtype=np.int64)
    shares: list[int] = proportional(np.asarray(full, dtype=float), rows, minimum=least).tolist()
    return shares
