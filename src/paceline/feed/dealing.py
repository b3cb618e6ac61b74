"""Dealing: what the loop asks of a worker's data, step by step (`Dealing`), and which kind serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.feed.batch_dealing import BatchDealing
from paceline.feed.feed import Feed, Order
from paceline.feed.loading import Source
from paceline.feed.micro_batches import MicroBatch
from paceline.feed.sample_dealing import SampleDealing
from paceline.feed.stream_dealing import StreamDealing
from paceline.records import Range, StepRecord

if TYPE_CHECKING:
    from paceline.settings import LoopSettings


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
        """The record of the step under way, before its commit or just after it, with all counts in samples, as scripts
        and logs see them."""

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

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fingerprints of these samples of the dataset, on the script's thread and before the first micro-batch."""

    def order_digest(self) -> str | None:
        """Of the open epoch's custom order; None when there is none."""

    def drawn(self) -> NDArray[np.int64]:
        """The dataset indices of the open epoch's custom order; empty when there is none."""

    def deal(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Begin a step with these shares; returns the shares really dealt."""

    def take_up(self, share: int, *, done: int = 0) -> None:
        """Begin to work on this worker's share of the step that was dealt last; 0: the worker has none, or is late.
        ``done``: so many at the front of its queue are done already, and no commit has counted them yet."""

    def take(self, largest: int | None = None) -> MicroBatch | None:
        """The next micro-batch of this worker's share, or None when the share is done. ``largest``: the time left
        allows no more samples; fewer come where the batch can be cut."""

    @property
    def left(self) -> int:
        """Samples of this worker's share that were not taken yet."""

    def resize(self, size: int) -> None:
        """Micro-batches of ``size`` from here on: what is left of the share is cut anew."""

    def shrink(self, size: int, *, again: bool) -> bool:
        """Micro-batches of ``size`` at most from here on; ``again``: the one last taken comes back. False: cannot."""

    def commit(self, done: Sequence[int], ended: bool) -> tuple[tuple[Range, ...], ...]:
        """The step is over: each worker did so many; ``ended``: every worker's stream has ended."""

    def open(self, epoch: int) -> None: ...

    def renew(self) -> None:
        """The script has changed the dataset: loader processes get it as it is now."""

    def close(self) -> None: ...

    def members_changed(self, kept: Sequence[int | None], *, rank: int, ahead: Sequence[int]) -> None:
        """The members changed: the new rank r was rank ``kept[r]``, or is new where that is None. This worker has
        ``rank`` now; ``ahead`` is what each worker's loader likes to hold. The pieces left of its share stay."""

    def give_back(self, ranges: Sequence[Range]) -> None:
        """A commit has counted these positions, and the work on them is lost: they are dealt again."""

    def take_over(self, state: Mapping[str, Any], *, rank: int, ahead: Sequence[int]) -> None:
        """Take over a peer's ``state_dict`` as it is, queues included: the peer knows the new members already."""

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
    """The dealing for this kind of data. ``ahead``: samples that each worker's loader likes to hold; ``identity``: this
    worker's number for good (None: its rank); ``epoch``: the first; ``part``: which of how many processes of its worker
    this is."""
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
        multiple_of=settings.global_batch if settings.drop_last else 1,
        epoch=epoch,
    )
    if feed.batches is not None and settings.global_batch > feed.length:
        raise ValueError(
            f"global_batch={settings.global_batch} counts batches where a batch_sampler gives them, and this one gives "
            f"{feed.length} an epoch: write how many of them make a step, over the whole fleet"
        )
    kind = SampleDealing if feed.batches is None else BatchDealing
    return kind(feed, source, rank=rank, micro_batch=settings.micro_batch, ahead=ahead, part=part)
