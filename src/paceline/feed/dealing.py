"""Dealing: how a worker's share of a step comes to it from its data, by one interface to the loop (`Dealing`).

From a dataset with a length a share is taken from the feed, cut into micro-batches, and loaded a little ahead: in
samples (`SampleDealing`) or in a batch sampler's batches (`BatchDealing`). From a stream a worker draws the samples of
its share until the stream ends (`StreamDealing`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.feed.custom_orders import Batches
from paceline.feed.feed import Feed, Order
from paceline.feed.micro_batches import MicroBatch, Piece, front_of, own_rows, pieces_of
from paceline.feed.ranges import Ranges, total
from paceline.feed.source import Source
from paceline.pace.shares import proportional
from paceline.records import Range, StepRecord

if TYPE_CHECKING:
    from paceline.records import LoopSettings


class Dealing(Protocol):
    """Source of a worker's micro-batches, step by step."""

    micro_batch: int
    smallest: int
    ended: bool
    """Whether this worker's stream has no more samples; always False for datasets with a length."""

    unit: str
    """Unit in which shares are counted: "samples" or "batches"."""

    @property
    def epoch(self) -> int: ...

    @property
    def at_once(self) -> int:
        """Return how many samples go through the model at once: at most, or on average for a batch sampler."""

    def in_samples(self, record: StepRecord) -> StepRecord:
        """Return a step's record with all counts in samples, as scripts and logs see them.

        The record is that of the step under way, before its commit or just after it.
        """

    @property
    def length(self) -> int | None:
        """Return the samples of an epoch; None when that is unknown."""

    @property
    def next_length(self) -> int | None:
        """Return the samples of the next epoch; None when that is still unknown."""

    @property
    def remaining(self) -> int | None:
        """Return the samples that the fleet has left in this epoch; None when that is unknown."""

    @property
    def progress(self) -> float:
        """Return the part of this epoch that is done, in [0, 1]."""

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return fingerprints of these samples of the dataset.

        Call it on the script's thread and before the first micro-batch.
        """

    def order_digest(self) -> str | None:
        """Return a digest of the open epoch's custom order; None when there is none."""

    def drawn(self) -> NDArray[np.int64]:
        """Return the dataset indices of the open epoch's custom order; empty when there is none."""

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Begin a step with these shares; return the shares that were dealt."""

    def begin_share(self, share: int, *, done: int = 0) -> None:
        """Begin to work on this worker's share of the step that was dealt last.

        Args:
            share: samples; 0 where the worker sits out or is late.
            done: samples at the front of its queue that are done already, and that no commit has counted yet.
        """

    def take(self, largest: int | None = None) -> MicroBatch | None:
        """Return the next micro-batch of this worker's share, or None when the share is done.

        Args:
            largest: samples for which there is time left; the micro-batch is cut to that size where it can be cut.
        """

    @property
    def left(self) -> int:
        """Return the samples of this worker's share that were not taken yet."""

    def resize(self, size: int) -> None:
        """Set the size of micro-batches, and cut the rest of the share anew."""

    def shrink(self, size: int, *, again: bool) -> bool:
        """Limit micro-batches to ``size`` samples from here on; return False where that is impossible.

        Args:
            size: samples at most.
            again: also return the last taken micro-batch to the share.
        """

    def commit(self, done: Sequence[int], ended: Sequence[bool] = ()) -> tuple[tuple[Range, ...], ...]:
        """End the step; return the positions that each worker counted.

        Args:
            done: samples that each worker did.
            ended: whether each worker's stream has ended; empty where it is not known.
        """

    def open(self, epoch: int) -> None: ...

    def renew(self) -> None:
        """Hand the dataset to the loader processes again: the script has changed it."""

    def close(self) -> None: ...

    def members_changed(self, old_ranks: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """Continue with other members; the pieces left of this worker's share stay.

        Args:
            old_ranks: the old rank of each new rank; None for a newcomer.
            rank: this worker's new rank.
            ahead: samples that each worker's loader prefers to hold.
        """

    def give_back(self, ranges: Sequence[Range]) -> None:
        """Deal these positions again: a commit has counted them, and the work on them is lost."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        """Adopt a peer's ``state_dict`` unchanged, with its queues, which are those of the new members."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


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
    part: tuple[int, int] = (0, 1),
) -> Dealing:
    """Return the dealing for this kind of data.

    Args:
        source: loads the samples.
        settings: those of the loop.
        order: the custom order, if there is one.
        seed: seed of the shuffle.
        rank: this worker's rank.
        size: workers in the fleet.
        ahead: samples that each worker's loader prefers to hold.
        identity: this worker's permanent number; None uses its rank.
        epoch: the first epoch.
        part: (index, count) of this process among those of its worker.
    """
    if source.length is None:
        if part[1] > 1:
            raise ValueError(
                f"{source.name} is an IterableDataset, and a worker of several processes deals rows of a dataset with "
                "a length to them: give one with __len__ and __getitem__"
            )
        if order is not None:
            raise ValueError("order= needs a dataset with a length: an iterable dataset has its own order")
        own = rank if identity is None else identity
        return StreamDealing(source, identity=own, micro_batch=settings.micro_batch, rank=rank, size=size, epoch=epoch)
    feed = Feed(
        source.length,
        workers=size,
        seed=seed,
        shuffle=settings.shuffle,
        order=order,
        multiple_of=settings.dealt_in,
        epoch=epoch,
    )
    if feed.batches is not None and settings.global_batch > feed.length:
        raise ValueError(
            f"global_batch={settings.global_batch} counts batches where a batch_sampler gives them, and this one gives "
            f"{feed.length} per epoch: write how many of them make a step, over the whole fleet"
        )
    kind = SampleDealing if feed.batches is None else BatchDealing
    return kind(feed, source, rank=rank, micro_batch=settings.micro_batch, ahead=ahead, part=part)


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

    def commit(self, done: Sequence[int], ended: Sequence[bool] = ()) -> tuple[tuple[Range, ...], ...]:
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


class StreamDealing:
    """Micro-batches of an iterable dataset: each worker draws from its own stream, and the epoch ends with the last.

    Exactly-once is not promised here: the content of the streams is unknown. ``identity`` keys the random numbers of
    this worker's micro-batches; unlike a rank, no other worker ever has the same.

    A stream that the source divides is divided when a pass begins, among the members of that moment. A worker that
    enters later has no part in that pass, and what a lost worker had not read of its part is not read in it: no sample
    is read twice. What the pace gives to a worker whose stream has ended is dealt to the others, so that steps stay as
    large as they were.
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
        """Pair (rank, size) with which the next pass is divided."""
        self._pass: tuple[int, tuple[int, int]] | None = (epoch, self._part)
        """Pass that is open and not begun; it begins with its first sample, when the script has seen the last pass end.
        """
        self._source, self._identity = source, identity
        self._share = self._drawn = 0
        self._all_ended = False
        self._over = [False] * size
        """Whether the stream of each worker has ended; all workers hold the same."""
        self._dealt = (0,) * size

    @property
    def at_once(self) -> int:
        return self.micro_batch

    def in_samples(self, record: StepRecord) -> StepRecord:
        return record

    @property
    def remaining(self) -> int | None:
        return 0 if self._all_ended else None

    @property
    def progress(self) -> float:
        return float(self._all_ended)

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        return self._source.look(indices)

    def order_digest(self) -> None:
        return None

    def drawn(self) -> NDArray[np.int64]:
        return np.empty(0, dtype=np.int64)

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the shares: all that was asked for, of the workers whose streams go on.

        Where the stream is divided each of these has a share, since no other would read its part.
        """
        fewest = self.smallest if self._source.split else 0
        if not any(self._over) or all(self._over):
            self._dealt = tuple(max(share, fewest) for share in samples)
            return self._dealt
        goes_on = ~np.array(self._over)
        weights = np.where(goes_on, samples, 0)
        total = max(sum(samples), fewest * int(goes_on.sum()))
        shares = proportional(weights if weights.any() else goes_on, total, minimum=fewest * goes_on)
        self._dealt = tuple(shares.tolist())
        return self._dealt

    def begin_share(self, share: int, *, done: int = 0) -> None:
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
        key = (self._identity << 40) + position  # keys random numbers that no other worker draws
        return MicroBatch(batch, samples, self.epoch, key, last=False)

    @property
    def left(self) -> int:
        return 0 if self.ended else self._share

    def resize(self, size: int) -> None:
        self.micro_batch = size

    def shrink(self, size: int, *, again: bool) -> bool:
        if size < 1 or again:  # a stream cannot give its samples again
            return False
        self.micro_batch = min(self.micro_batch, size)
        return True

    def commit(self, done: Sequence[int], ended: Sequence[bool] = ()) -> tuple[tuple[Range, ...], ...]:
        self._all_ended = bool(ended) and all(ended)
        for worker, (share, over) in enumerate(zip(self._dealt, ended, strict=False)):
            self._over[worker] |= over and share > 0  # one without a share has not drawn
        return ()

    def open(self, epoch: int) -> None:
        self.epoch, self.ended, self._all_ended, self._drawn = epoch, False, False, 0
        self._pass = (epoch, self._part)
        self._over = [False] * self._part[1]

    def renew(self) -> None:
        self._source.renew()

    def close(self) -> None:
        self._source.close()

    def members_changed(self, old_ranks: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """Divide the next pass among the new members; until then each worker keeps its stream."""
        self._part = (rank, len(old_ranks))
        newcomer = self._source.split  # has no part in this pass
        self._over = [newcomer if old is None else self._over[old] for old in old_ranks]
        self._dealt = tuple(0 if old is None else self._dealt[old] for old in old_ranks)

    def give_back(self, ranges: Sequence[Range]) -> None:
        """Do nothing: a stream has no positions."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        self._part = (rank, len(ahead))
        self.load_state_dict(state)
        self.ended = self._source.split  # the pass under way was divided before this worker came
        self._over, self._dealt = list(state["over"]), tuple(state["dealt"])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "over": list(self._over), "dealt": list(self._dealt)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.open(state["epoch"])
