"""Dealing from a batch sampler: a share is a number of the batches that the script's sampler gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.feed.batches import Batches
from paceline.feed.micro_batches import MicroBatch, Piece, own_rows
from paceline.feed.ranges import Ranges, total
from paceline.feed.sample_dealing import SampleDealing
from paceline.records import Range, StepRecord


class BatchDealing(SampleDealing):
    """Micro-batches that a batch sampler gives: each batch is dealt whole, and counts as one."""

    unit = "batches"

    @property
    def batches(self) -> Batches:
        """Of the open epoch."""
        assert self._feed.batches is not None
        return self._feed.batches

    @property
    def at_once(self) -> int:
        return self.batches.mean

    def _cut(self, ranges: Sequence[Range]) -> list[Piece]:
        """A piece's positions are those of its samples, which key the samples' random numbers."""
        return list(self.batches.each(ranges))

    def take(self, largest: int | None = None) -> MicroBatch | None:
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        mine, own = own_rows(piece, *self._part)
        batch = self._source.take(self._pieces_epoch, *mine)
        first, given = mine[0][0][0], len(piece[1])
        return MicroBatch(batch, 1, self._pieces_epoch, first, last=not self._pieces, given=given, own=own)

    @property
    def left(self) -> int:
        return len(self._pieces)

    def shrink(self, size: int, *, again: bool) -> bool:
        return False

    def told(self, record: StepRecord) -> StepRecord:
        """Before the commit the step's batches stand first in the queues; after it, those that were left undone do."""
        done = record.ranges or self._heads(record.samples)
        undone = [planned - counted for planned, counted in zip(record.planned, record.samples, strict=True)]
        dealt = self._heads(undone if record.ranges else record.planned)
        samples = self._in_samples(done)
        before = samples if record.ranges else (0,) * len(samples)
        planned = tuple(a + b for a, b in zip(before, self._in_samples(dealt), strict=True))
        ranges = tuple(self.batches.flat(mine) for mine in record.ranges)
        return replace(record, samples=samples, planned=planned, ranges=ranges)

    def _heads(self, counts: Sequence[int]) -> list[tuple[Range, ...]]:
        """The first so many batches of each queue."""
        return [Ranges(self._feed.queue(rank)).take_front(max(0, count)) for rank, count in enumerate(counts)]

    def _in_samples(self, parts: Iterable[Sequence[Range]]) -> tuple[int, ...]:
        return tuple(total(self.batches.flat(part)) for part in parts)
