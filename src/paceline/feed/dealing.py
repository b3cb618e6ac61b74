"""A worker's samples, step by step: its share of the feed, cut into micro-batches and loaded a little ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.feed import Batches, Feed, Order, Ranges, Source, total
from paceline.records import Range, StepRecord
from paceline.settings import LoopSettings

Piece = tuple[tuple[Range, ...], NDArray[np.int64]]
"""Positions of the epoch's order, and the dataset indices there."""


class MicroBatch(NamedTuple):
    """Samples to be worked on at once."""

    batch: Any
    samples: int
    epoch: int
    position: int
    """Of its first sample in the epoch's order: the key of its random numbers."""
    last: bool
    """Nothing more comes in this step."""
    given: int = 0
    """Samples in it where it counts as one, because it was given whole; 0: it counts its samples."""

    @property
    def rows(self) -> int:
        """The samples in it."""
        return self.given or self.samples


class Dealing(Protocol):
    """Where a worker's micro-batches come from."""

    micro_batch: int
    smallest: int
    ended: bool
    """This worker's stream has no more samples (datasets with a length: always False)."""

    unit: str
    """What a share counts."""

    @property
    def epoch(self) -> int: ...

    @property
    def at_once(self) -> int:
        """Samples that go through the model at once, at most or on average."""

    def told(self, record: StepRecord) -> StepRecord:
        """The record of the step under way, before its commit or just after it, for those outside: in samples."""

    @property
    def length(self) -> int | None:
        """Samples of an epoch; None when nobody can know."""

    @property
    def next_length(self) -> int | None:
        """Samples of the next epoch; None when nobody can know yet."""

    @property
    def remaining(self) -> int | None:
        """Samples the fleet has left in this epoch; None when nobody can know."""

    @property
    def progress(self) -> float:
        """The part of this epoch that is done, in [0, 1]."""

    def order_digest(self) -> str | None:
        """Of the open epoch's custom order; None when there is none."""

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Begin a step with these shares; returns the shares really dealt."""

    def take_up(self, share: int, *, done: int = 0) -> None:
        """This worker begins to work on its share of the step that was dealt last; 0: it has none, or came too late.
        ``done``: of what was dealt to it, it has done so many before, which no commit has counted yet."""

    def take(self, largest: int | None = None) -> MicroBatch | None:
        """The next micro-batch of this worker's share, or None when the share is done. ``largest``: the time left
        allows no more samples; fewer come where the batch can be cut."""

    @property
    def left(self) -> int:
        """Samples of this worker's share that were not taken yet."""

    def shrink(self, size: int, *, again: bool) -> bool:
        """Micro-batches of ``size`` at most from here on; ``again``: the one last taken comes back. False: cannot."""

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        """The step is over: each worker did so many; ``ended``: every worker's stream has ended."""

    def open(self, epoch: int) -> None: ...

    def renew(self) -> None:
        """The script has changed the dataset: loader processes get it as it is now."""

    def close(self) -> None: ...

    def reform(self, kept: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """The members changed: the new rank r was rank ``kept[r]``, or is new where that is None. This worker has
        ``rank`` now; ``ahead`` is what each worker's loader likes to hold. What it has in hand of its share stays."""

    def give_back(self, ranges: Sequence[Range]) -> None:
        """What was made of these positions, which a commit has counted, is lost: they are dealt again."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        """A newcomer goes on from a peer's ``state_dict`` as it is, claims included: the peer has reformed already."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def even_pieces(ranges: Iterable[Range], largest: int) -> list[tuple[Range, ...]]:
    """Cut a share into as few micro-batches as fit ``largest``, of sizes that differ by one at most.

    A last micro-batch of a single sample would cost nearly as much as a whole one, and batch norm cannot train on it.

    >>> [total(piece) for piece in even_pieces([(0, 13)], 4)]
    [4, 3, 3, 3]
    """
    rest = Ranges(ranges)
    count = -(-rest.total // largest)
    return [rest.take_front(-(-rest.total // left)) for left in range(count, 0, -1)]


def front_of(batch: Any, *, samples: int, keep: int) -> Any:
    """The first ``keep`` of a batch's samples where every tensor in it has one row a sample; else None.

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


class FromFeed:
    """Micro-batches of a dataset with a length: every sample of the epoch once."""

    ended = False
    unit = "samples"

    def __init__(self, feed: Feed, source: Source, *, rank: int, micro_batch: int, ahead: Sequence[int]) -> None:
        self.micro_batch = micro_batch
        self.smallest = 1
        """A micro-batch that is cut, and what is left of it, have at least so many samples."""
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

    def told(self, record: StepRecord) -> StepRecord:
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

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        # Room to load ahead along the queue: what the loader likes to hold, and the next share behind this one.
        ahead = [more + share if more else 0 for more, share in zip(self._ahead, samples, strict=True)]
        return self._feed.deal(samples, ahead=ahead)

    def take_up(self, share: int, *, done: int = 0) -> None:
        queue = Ranges(self._feed.queue(self._rank))
        queue.take_front(done)
        self._pieces_epoch = self._feed.epoch
        if (
            share and self._loaded_epoch != self._feed.epoch
        ):  # on the script's thread, when it has seen the last one end
            self._loaded_epoch = self._feed.epoch
            self._source.new_epoch(self._feed.epoch)
        self._pieces = deque(self._cut(queue.take_front(share)))
        if self._source.ahead and share:
            self._expect(queue, share)

    def _expect(self, queue: Ranges, share: int) -> None:
        """Load this step's pieces and, supposing that the share stays as it is, the next ones'."""
        pieces = list(self._pieces)
        while share and queue.total and len(pieces) < len(self._pieces) + self._source.ahead:
            pieces += self._cut(queue.take_front(share))
        self._source.expect(self._feed.epoch, pieces)

    def _cut(self, ranges: Sequence[Range]) -> list[Piece]:
        """Micro-batches with their dataset indices, all looked up in one call."""
        return self._in_pieces(ranges, self._feed.indices(ranges)) if ranges else []

    def _in_pieces(self, ranges: Sequence[Range], indices: NDArray[np.int64]) -> list[Piece]:
        pieces = even_pieces(ranges, self.micro_batch)
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
        batch = self._source.take(self._pieces_epoch, *piece)
        if keep < samples and self._source.ahead:  # it was loaded whole by another process, and is cut here
            shorter = front_of(batch, samples=samples, keep=keep)
            if shorter is not None:
                batch, piece = shorter, self._cut_front(piece, keep)
        self._taken = piece
        ranges, indices = piece
        return MicroBatch(batch, len(indices), self._pieces_epoch, ranges[0][0], last=not self._pieces)

    def _largest_cut(self, samples: int, largest: int) -> int:
        """How many of a piece's samples to take so that neither part is too small; all where there is no such cut."""
        keep = min(largest, samples - self.smallest)
        return samples if largest >= samples or keep < self.smallest else keep

    def _cut_front(self, piece: Piece, keep: int) -> Piece:
        """The first ``keep`` samples of a piece; the others come next."""
        rest, indices = Ranges(piece[0]), piece[1]
        front = rest.take_front(keep)
        self._pieces.appendleft((rest.ranges, indices[keep:]))
        return front, indices[:keep]

    @property
    def left(self) -> int:
        return sum(len(indices) for _, indices in self._pieces)

    def shrink(self, size: int, *, again: bool) -> bool:
        if size < 1:
            return False
        self.micro_batch = min(self.micro_batch, size)
        undone = ([self._taken] if again else []) + list(self._pieces)
        if undone:
            ranges = [part for ranges, _ in undone for part in ranges]
            self._pieces = deque(self._in_pieces(ranges, np.concatenate([indices for _, indices in undone])))
        return True

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        return self._feed.consume(done)

    def open(self, epoch: int) -> None:
        self._feed.open(epoch)

    def renew(self) -> None:
        self._source.renew()

    def close(self) -> None:
        self._source.close()

    def reform(self, kept: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        self._feed.reform(kept)
        self._place(rank, ahead)

    def give_back(self, ranges: Sequence[Range]) -> None:
        self._feed.give_back(ranges)

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        self._feed.load_state_dict(state, workers=len(state["queues"]))
        self._place(rank, ahead)
        self._pieces.clear()

    def _place(self, rank: int, ahead: Sequence[int]) -> None:
        assert 0 <= rank < self._feed.workers == len(ahead), (rank, self._feed.workers, ahead)
        self._rank, self._ahead = rank, ahead

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feed.load_state_dict(state, workers=self._feed.workers)


class FromBatches(FromFeed):
    """Micro-batches that a batch sampler gives: a share is a number of batches, and each is dealt and counted whole."""

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
        """A piece's positions are those of its samples: their noise is keyed by them."""
        return list(self.batches.each(ranges))

    def take(self, largest: int | None = None) -> MicroBatch | None:
        if not self._pieces:
            return None
        ranges, indices = self._pieces.popleft()
        batch = self._source.take(self._pieces_epoch, ranges, indices)
        return MicroBatch(batch, 1, self._pieces_epoch, ranges[0][0], last=not self._pieces, given=len(indices))

    @property
    def left(self) -> int:
        return len(self._pieces)

    def shrink(self, size: int, *, again: bool) -> bool:
        return False

    def told(self, record: StepRecord) -> StepRecord:
        """Before the commit a step's batches are the heads of the queues; after it, what was left undone is."""
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


class FromStream:
    """Micro-batches of an iterable dataset: each worker draws from its own stream, and the epoch ends with the last.

    Exactly-once is not promised here: nobody knows what the streams hold. ``identity`` keys the noise of this worker's
    micro-batches; unlike a rank, nobody else ever has it.

    A stream that the source divides is divided when a pass begins, among those who are there. Who enters later has no
    part in that pass, and what a lost worker had not read of its part is not read in it: never is a sample read twice.
    """

    length = None
    next_length = None
    unit = "samples"

    def __init__(
        self, source: Source, *, identity: int, micro_batch: int, rank: int = 0, size: int = 1, epoch: int = 0
    ) -> None:
        self.micro_batch, self.smallest = micro_batch, 1
        self.epoch = epoch
        self.ended = False
        self._part = (rank, size)
        """Of the next pass."""
        self._pass: tuple[int, tuple[int, int]] | None = (epoch, self._part)
        """Opened and not begun: it begins with its first sample, when the script has seen the last one end."""
        self._source, self._identity = source, identity
        self._share = self._drawn = 0
        self._all_ended = False

    @property
    def at_once(self) -> int:
        return self.micro_batch

    def told(self, record: StepRecord) -> StepRecord:
        return record

    @property
    def remaining(self) -> int | None:
        return 0 if self._all_ended else None

    @property
    def progress(self) -> float:
        return float(self._all_ended)

    def order_digest(self) -> None:
        return None

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Nobody sits out where the stream is divided: its part would not be read by anybody else."""
        fewest = self.smallest if self._source.split else 0
        return tuple(max(share, fewest) for share in samples)

    def take_up(self, share: int, *, done: int = 0) -> None:
        self._share = share

    def take(self, largest: int | None = None) -> MicroBatch | None:
        size = min(self.micro_batch, self._share)
        if size and self._pass is not None and not self.ended:
            self._source.restart(*self._pass)
            self._pass = None
        drawn = None if self.ended or not size else self._source.draw(size)
        if drawn is None:
            self.ended = self.ended or size > 0
            return None
        batch, samples = drawn
        position, self._drawn = self._drawn, self._drawn + samples
        self._share -= samples
        return MicroBatch(batch, samples, self.epoch, (self._identity << 40) + position, last=False)  # no shared noise

    @property
    def left(self) -> int:
        return 0 if self.ended else self._share

    def shrink(self, size: int, *, again: bool) -> bool:
        if size < 1 or again:  # a stream cannot give its samples again
            return False
        self.micro_batch = min(self.micro_batch, size)
        return True

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        self._all_ended = ended
        return ()

    def open(self, epoch: int) -> None:
        self.epoch, self.ended, self._all_ended, self._drawn = epoch, False, False, 0
        self._pass = (epoch, self._part)

    def renew(self) -> None:
        self._source.renew()

    def close(self) -> None:
        self._source.close()

    def reform(self, kept: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """A stream is its worker's own, whatever the others do, until the next pass."""
        self._part = (rank, len(kept))

    def give_back(self, ranges: Sequence[Range]) -> None:
        """A stream has no positions."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        self._part = (rank, len(ahead))
        self.load_state_dict(state)
        self.ended = self._source.split  # the pass under way was divided before this worker came

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.open(state["epoch"])


def make_dealing(
    source: Source,
    settings: LoopSettings,
    *,
    order: Order | None,
    seed: int,
    rank: int,
    size: int,
    ahead: Sequence[int],
    identity: int | None = None,
    epoch: int = 0,
) -> Dealing:
    """The dealing for this kind of data. ``ahead``: samples that each worker's loader likes to hold; ``identity``: this
    worker's number for good (None: its rank); ``epoch``: the first."""
    if source.length is None:
        if order is not None:
            raise ValueError("order= needs a dataset with a length: an iterable dataset has its own order")
        own = rank if identity is None else identity
        return FromStream(source, identity=own, micro_batch=settings.micro_batch, rank=rank, size=size, epoch=epoch)
    feed = Feed(
        source.length,
        workers=size,
        seed=seed,
        shuffle=settings.shuffle,
        order=order,
        multiple_of=settings.global_batch if settings.drop_last else 1,
        epoch=epoch,
    )
    if feed.batches is not None and settings.global_batch > feed.length:
        raise ValueError(
            f"global_batch={settings.global_batch} counts batches where a batch_sampler gives them, and this one gives "
            f"{feed.length} an epoch: write how many of them make a step, over the whole fleet"
        )
    kind = FromFeed if feed.batches is None else FromBatches
    return kind(feed, source, rank=rank, micro_batch=settings.micro_batch, ahead=ahead)
