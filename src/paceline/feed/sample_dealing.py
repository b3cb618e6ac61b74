"""Dealing from a dataset with a length, in samples (`SampleDealing`) or in a batch sampler's batches (`BatchDealing`).

A share is taken from the feed, cut into micro-batches, and loaded a little ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.feed.custom_orders import Batches
from paceline.feed.feed import Feed
from paceline.feed.micro_batches import MicroBatch, Piece, front_of, own_rows, pieces_of
from paceline.feed.ranges import Ranges, total
from paceline.feed.source import Source
from paceline.records import Range, StepRecord


class SampleDealing:
    """Micro-batches of a dataset with a length: every sample of the epoch once."""

    ended = False
    unit = "samples"

    def __init__(
        self,
        feed: Feed,
        source: Source,
        *,
        rank: int,
        micro_batch: int,
        ahead: Sequence[int],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Deal from the open epoch of ``feed``.

        ``part`` is (index, count) of this process among those of its worker; each takes its rows of every micro-batch.
        """
        self.micro_batch, self._part = micro_batch, part
        self.smallest = 1
        """Samples that each part has at least where a micro-batch is cut in two."""
        self._feed, self._source, self._rank = feed, source, rank
        self._ahead = ahead
        self._pieces: deque[Piece] = deque()
        self._taken: Piece = ((), np.empty(0, dtype=np.int64))
        self._pieces_epoch = self._loaded_epoch = 0

    @property
    def epoch(self) -> int:
        return self._feed.epoch

    @property
    def at_once(self) -> int:
        return self.micro_batch

    def in_samples(self, record: StepRecord) -> StepRecord:
        return record

    @property
    def length(self) -> int:
        return self._feed.length

    @property
    def next_length(self) -> int | None:
        return None if self._feed.ordered else self._feed.length

    @property
    def remaining(self) -> int:
        return self._feed.remaining

    @property
    def progress(self) -> float:
        return self._feed.consumed / self._feed.length

    def order_digest(self) -> str | None:
        return self._feed.order_digest()

    def drawn(self) -> NDArray[np.int64]:
        return self._feed.drawn

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        # Room to load ahead along the queue: what the loader prefers to hold, and the next share.
        ahead = [more + share if more else 0 for more, share in zip(self._ahead, samples, strict=True)]
        return self._feed.deal(samples, ahead=ahead)

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        self._load_epoch()
        return self._source.look(indices)

    def begin_share(self, share: int, *, done: int = 0) -> None:
        queue = Ranges(self._feed.queue(self._rank))
        queue.take_front(done)
        self._pieces_epoch = self._feed.epoch
        if share:
            self._load_epoch()
        self._pieces = deque(self._cut(queue.take_front(share)))
        if self._source.ahead and share:
            self._expect(queue, share)

    def _load_epoch(self) -> None:
        """Begin an epoch in the source, on the script's thread, which has seen the last epoch end."""
        if self._loaded_epoch != self._feed.epoch:
            self._loaded_epoch = self._feed.epoch
            self._source.new_epoch(self._feed.epoch)

    def _expect(self, queue: Ranges, share: int) -> None:
        """Load this step's pieces and, supposing that the share stays as it is, the next steps' pieces."""
        pieces = list(self._pieces)
        while share and queue.total and len(pieces) < len(self._pieces) + self._source.ahead:
            pieces += self._cut(queue.take_front(share))
        self._source.expect(self._feed.epoch, [own_rows(piece, *self._part)[0] for piece in pieces])

    def _cut(self, ranges: Sequence[Range]) -> list[Piece]:
        """Return micro-batches with their dataset indices, all looked up in one call."""
        return self._in_pieces(ranges, self._feed.indices(ranges)) if ranges else []

    def _in_pieces(self, ranges: Sequence[Range], indices: NDArray[np.int64]) -> list[Piece]:
        pieces = pieces_of(ranges, self.micro_batch)
        ends = np.cumsum([total(piece) for piece in pieces])[:-1]
        return list(zip(pieces, np.split(indices, ends), strict=True)) if pieces else []

    def take(self, largest: int | None = None) -> MicroBatch | None:
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        samples = len(piece[1])
        keep = samples if largest is None else self._largest_cut(samples, largest)
        if keep < samples and not self._source.ahead:
            piece = self._cut_front(piece, keep)
        mine, own = own_rows(piece, *self._part)
        batch = self._source.take(self._pieces_epoch, *mine)
        if keep < samples and self._source.ahead:  # another process loaded the complete batch: cut it here
            shorter = front_of(batch, samples=samples, keep=keep)
            if shorter is not None:
                batch, piece = shorter, self._cut_front(piece, keep)
                mine = piece
        self._taken = piece
        return MicroBatch(batch, len(piece[1]), self._pieces_epoch, mine[0][0][0], last=not self._pieces, own=own)

    def _largest_cut(self, samples: int, largest: int) -> int:
        """Return how many of a piece's samples to take so that neither part is too small; all where that cannot be."""
        keep = min(largest, samples - self.smallest)
        return samples if largest >= samples or keep < self.smallest else keep

    def _cut_front(self, piece: Piece, keep: int) -> Piece:
        """Return the first ``keep`` samples of a piece; the others come next."""
        rest, indices = Ranges(piece[0]), piece[1]
        front = rest.take_front(keep)
        self._pieces.appendleft((rest.ranges, indices[keep:]))
        return front, indices[:keep]

    @property
    def left(self) -> int:
        return sum(len(indices) for _, indices in self._pieces)

    def resize(self, size: int) -> None:
        self.micro_batch, undone = size, list(self._pieces)
        if undone:
            ranges = [part for ranges, _ in undone for part in ranges]
            self._pieces = deque(self._in_pieces(ranges, np.concatenate([indices for _, indices in undone])))
            if self._source.ahead:
                self._source.expect(self._pieces_epoch, [own_rows(piece, *self._part)[0] for piece in self._pieces])

    def shrink(self, size: int, *, again: bool) -> bool:
        if size < 1:
            return False
        if again:
            self._pieces.appendleft(self._taken)
        self.resize(min(self.micro_batch, size))
        return True

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        return self._feed.consume(done)

    def open(self, epoch: int) -> None:
        self._feed.open(epoch)

    def renew(self) -> None:
        self._source.renew()

    def close(self) -> None:
        self._source.close()

    def members_changed(self, old_ranks: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        self._feed.members_changed(old_ranks)
        self._set_rank(rank, ahead)

    def give_back(self, ranges: Sequence[Range]) -> None:
        self._feed.give_back(ranges)

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        self._feed.load_state_dict(state, workers=len(state["queues"]))
        self._set_rank(rank, ahead)
        self._pieces.clear()

    def _set_rank(self, rank: int, ahead: Sequence[int]) -> None:
        assert 0 <= rank < self._feed.workers == len(ahead), (rank, self._feed.workers, ahead)
        self._rank, self._ahead = rank, ahead

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feed.load_state_dict(state, workers=self._feed.workers)


class BatchDealing(SampleDealing):
    """Micro-batches that a batch sampler gives: each batch is dealt undivided, and counts as one."""

    unit = "batches"

    @property
    def batches(self) -> Batches:
        """Return the open epoch's batches."""
        assert self._feed.batches is not None
        return self._feed.batches

    @property
    def at_once(self) -> int:
        return self.batches.mean

    def _cut(self, ranges: Sequence[Range]) -> list[Piece]:
        """Return batches; their positions are those of their samples, which key the samples' random numbers."""
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

    def in_samples(self, record: StepRecord) -> StepRecord:
        """Return the record in samples.

        Before the commit the step's batches stand first in the queues; after it, those that were left undone do.
        """
        done = record.ranges or self._heads(record.samples)
        undone = [planned - counted for planned, counted in zip(record.planned, record.samples, strict=True)]
        dealt = self._heads(undone if record.ranges else record.planned)
        samples = self._in_samples(done)
        before = samples if record.ranges else (0,) * len(samples)
        planned = tuple(a + b for a, b in zip(before, self._in_samples(dealt), strict=True))
        ranges = tuple(self.batches.flat(mine) for mine in record.ranges)
        return replace(record, samples=samples, planned=planned, ranges=ranges)

    def _heads(self, counts: Sequence[int]) -> list[tuple[Range, ...]]:
        """Return the first ``counts[rank]`` batches of each queue."""
        return [Ranges(self._feed.queue(rank)).take_front(max(0, count)) for rank, count in enumerate(counts)]

    def _in_samples(self, parts: Iterable[Sequence[Range]]) -> tuple[int, ...]:
        return tuple(total(self.batches.flat(part)) for part in parts)
