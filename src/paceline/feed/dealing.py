"""The interface between the loop and a worker's data (`Dealing`), and the choice of the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.feed.feed import Feed, Order
from paceline.feed.micro_batches import MicroBatch
from paceline.feed.sample_dealing import BatchDealing, SampleDealing
from paceline.feed.source import Source
from paceline.feed.stream_dealing import StreamDealing
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

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        """End the step; return the positions that each worker counted.

        Args:
            done: samples that each worker did.
            ended: whether every worker's stream has ended.
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
