"""The feed: a small state machine, equal on every worker, that deals each sample exactly once.

An epoch is an order of *positions* ``0 .. length - 1``. They start in the **pool**; `Feed.deal` claims them for
workers' **queues**; `Feed.consume` ends them. A position is always in exactly one of these three. What a cut-off left
undone stays at the head of its queue, what a lost worker held goes back to the pool, and when the pool is empty the
tails of the longest queues are dealt again, so that all workers finish the epoch together.

Every method is a deterministic function of the calls so far, in whole numbers: workers that make the same calls hold
equal feeds and need not communicate about data at all.

>>> feed = Feed(10, workers=2, shuffle=False)
>>> feed.deal([3, 1]), feed.queue(0), feed.queue(1)
((3, 1), ((0, 3),), ((3, 4),))
>>> feed.consume([2, 1]), feed.remaining
((((0, 2),), ((3, 4),)), 7)
>>> feed.deal([3, 6])  # the epoch has only seven left: both are cut in proportion
(2, 5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.feed.custom_orders import Batches
from paceline.feed.randomness import MAX_LENGTH, KeyedPermutation, key
from paceline.feed.ranges import Ranges, positions, total
from paceline.records import Range

Order = Callable[[int], Sequence[int] | NDArray[np.int64] | Batches]
"""Function from an epoch to the dataset indices to train on, in order, or batches of them.

It returns the same on every worker and on every call.
"""

_VERSION = 1


class Feed:
    """Dealer of the positions of one epoch after another to ``workers`` workers."""

    def __init__(
        self,
        length: int,
        *,
        workers: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        multiple_of: int = 1,
        epoch: int = 0,
    ) -> None:
        """Open the first epoch.

        Args:
            length: samples in the dataset.
            workers: workers that positions are dealt to.
            seed: seed of the shuffle; every epoch has its own order.
            shuffle: whether epochs are shuffled.
            order: custom order of dataset indices for each epoch, instead of the shuffle. An index may occur any
                number of times; each *draw* counts once.
            multiple_of: the end of an epoch beyond a multiple of this many positions is not dealt (drop_last).
            epoch: the epoch that is open at first.
        """
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"the dataset's length must be between 1 and 2**40, got {length}")
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1 (1: deal every sample), got {multiple_of}")
        self._dataset_length = length
        self.seed = seed
        self._shuffle = shuffle
        self._order = order
        self._multiple_of = multiple_of
        self._drawn: tuple[int, NDArray[np.int64]] | None = None
        self._drawn_digest = ""
        self.batches: Batches | None = None
        """Batches of the open epoch where the order gives batches: a position is then that of a batch, not of a sample.
        """
        self._queues = _empty_queues(workers)
        self.open(epoch)

    @property
    def workers(self) -> int:
        return len(self._queues)

    @property
    def ordered(self) -> bool:
        """Return whether the order is custom, so that epochs may differ in length."""
        return self._order is not None

    @property
    def unit(self) -> str:
        """Return the unit that is dealt: "samples" or "batches"."""
        return "samples" if self.batches is None else "batches"

    @property
    def remaining(self) -> int:
        """Return the number of positions of the open epoch that are not consumed yet."""
        return self._remaining

    @property
    def consumed(self) -> int:
        return self.length - self.remaining

    def open(self, epoch: int) -> None:
        """Start an epoch from its beginning; nothing is claimed."""
        self.epoch = epoch
        self._draws = self._look_up(epoch)
        self.length = self._draws - self._draws % self._multiple_of
        if self.length == 0:
            raise ValueError(
                f"epoch {epoch} has nothing to deal: drop_last cuts its {self._draws} {self.unit} to a multiple of "
                f"{self._multiple_of}; turn drop_last off or use a smaller global batch"
            )
        self._pool, self._remaining = Ranges([(0, self.length)]), self.length
        self._queues = _empty_queues(self.workers)

    def deal(self, shares: Sequence[int], *, ahead: Sequence[int] | int = 0) -> tuple[int, ...]:
        """Fill worker i's queue with ``shares[i]`` positions; return the shares that were dealt.

        They are smaller than asked for, in proportion, when the epoch has less left. Beyond its share each queue gets
        the shares of further steps while the pool lasts, so that loading can run ahead along the queue: as many steps
        as all workers together need to hold ``ahead`` samples each. These are claimed step by step, so that with steady
        shares a step has the same samples however far ahead they are loaded.

        >>> feed = Feed(100, workers=2, shuffle=False)
        >>> feed.deal([6, 2], ahead=8), feed.queue(0), feed.queue(1)
        ((6, 2), ((0, 6), (8, 14), (16, 22)), ((6, 8), (14, 16), (22, 24)))
        """
        dealt = _fit(self._per_worker(shares, "shares"), self.remaining)
        extra = self._per_worker([ahead] * self.workers if isinstance(ahead, int) else ahead, "ahead")
        for queue, share in zip(self._queues, dealt):
            self._claim(queue, share - queue.total)
        self._level(dealt)
        for steps in range(2, 2 + -(-sum(extra) // max(1, sum(dealt)))):
            for queue, share in zip(self._queues, dealt):
                self._claim(queue, min(share, steps * share - queue.total))
        return tuple(dealt)

    def queue(self, worker: int) -> tuple[Range, ...]:
        """Return what the worker has claimed, in the order in which it will be consumed."""
        return self._queue_of(worker).ranges

    def consume(self, counts: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
        """Remove the first ``counts[i]`` positions of each queue, which are done; return them."""
        done = self._per_worker(counts, "counts")
        for worker, (queue, count) in enumerate(zip(self._queues, done)):
            if count > queue.total:
                raise ValueError(f"worker {worker} cannot have done {count} samples: it was dealt {queue.total}")
        self._remaining -= sum(done)
        return tuple(queue.take_front(count) for queue, count in zip(self._queues, done))

    def release(self, worker: int) -> None:
        """Put what a worker that left had claimed and not consumed back into the pool."""
        queue = self._queue_of(worker)
        self._pool.put_back(queue.take_front(queue.total))

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Continue with other members: the new rank r was rank ``old_ranks[r]``, or is new where that is None.

        A worker that stays keeps its queue unchanged, so this may happen in the middle of a step: what it has done is
        still the head of its queue. A newcomer's queue is empty, and what lost workers had claimed goes back to the
        pool.

        >>> feed = Feed(10, workers=2, shuffle=False)
        >>> dealt = feed.deal([3, 2])
        >>> feed.members_changed([1, None])
        >>> feed.queue(0), feed.queue(1), feed.deal([2, 4]), feed.queue(1)
        (((3, 5),), (), (2, 4), ((0, 3), (5, 6)))
        """
        stays = {old for old in old_ranks if old is not None}
        if not old_ranks or len(stays) + list(old_ranks).count(None) != len(old_ranks):
            raise ValueError(f"a new fleet has at least one worker and nobody in it twice, not {list(old_ranks)}")
        queues = [Ranges() if old is None else self._queue_of(old) for old in old_ranks]
        gone = [queue for old, queue in enumerate(self._queues) if old not in stays]
        self._pool.put_back(part for queue in gone for part in queue.ranges)
        self._queues = queues

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Put consumed positions back into the pool: the work on them is lost."""
        given = list(ranges)
        self._pool.put_back(given)
        self._remaining += total(given)

    def indices(self, ranges: Sequence[Range]) -> NDArray[np.int64]:
        """Return the dataset indices at these positions of the open epoch."""
        if any(start < 0 or stop > self._draws for start, stop in ranges):
            raise ValueError(f"positions {list(ranges)} lie outside epoch {self.epoch}, which has {self._draws}")
        if self.batches is not None:
            ranges = self.batches.flat(ranges)
        if self._drawn is not None:
            return self._drawn[1][positions(ranges)]
        if not self._shuffle:
            return positions(ranges)
        parts = [self._permutation.part(start, stop) for start, stop in ranges]
        return np.concatenate(parts) if parts else positions(())

    def order_digest(self) -> str | None:
        """Return a digest of the open epoch's custom order; None when there is none."""
        return None if self._drawn is None else self._drawn_digest

    @property
    def drawn(self) -> NDArray[np.int64]:
        """Return the dataset indices of the open epoch's custom order; empty when there is none."""
        return np.empty(0, dtype=np.int64) if self._drawn is None else self._drawn[1]

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON types: a few ranges, whatever the length of the epoch."""
        return {
            "version": _VERSION,
            "dataset_length": self._dataset_length,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "order": self._order is not None,
            "order_digest": self.order_digest(),
            "epoch": self.epoch,
            "draws": self._draws,
            "length": self.length,
            "pool": _lists(self._pool),
            "queues": [_lists(queue) for queue in self._queues],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, workers: int | None = None) -> None:
        """Continue from a saved state, including its seed.

        In a fleet of another size than the one that saved (``workers``; None: this feed's), all claims go back to the
        pool and are dealt anew.
        """
        self._check_state(state)
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._draws = self._look_up(self.epoch)
        if self._draws != state["draws"]:
            raise ValueError(
                f"order({self.epoch}) now gives {self._draws} {self.unit} and gave {state['draws']} when the state was "
                "saved: it must give the same order for the same epoch"
            )
        if state.get("order_digest") not in (None, self.order_digest()):
            raise ValueError(
                f"order({self.epoch}), or the DataLoader's sampler, now gives another order than when the state was "
                "saved: it must give the same order for the same epoch, so seed it by the epoch alone"
            )
        self.length = state["length"]
        queues = [Ranges(_tuples(saved)) for saved in state["queues"]]
        self._pool = Ranges(_tuples(state["pool"]))
        self._queues = _empty_queues(self.workers if workers is None else workers)
        if len(queues) == self.workers:
            self._queues = queues
        else:
            self._pool.put_back(part for queue in queues for part in queue.ranges)
        self._remaining = self._pool.total + sum(queue.total for queue in self._queues)

    def _claim(self, queue: Ranges, count: int) -> None:
        queue.append(self._pool.take_front(count))

    def _level(self, shares: Sequence[int]) -> None:
        """Fill shares that the pool could not fill from the tails of the queues with most beyond their own share."""
        short = [worker for worker, share in enumerate(shares) if self._queues[worker].total < share]
        if not short:
            return
        spare = [(share - queue.total, worker) for worker, (queue, share) in enumerate(zip(self._queues, shares))]
        spare = [entry for entry in spare if entry[0] < 0]
        heapify(spare)
        for worker in short:
            while (missing := shares[worker] - self._queues[worker].total) > 0:
                surplus, donor = heappop(spare)
                self._queues[worker].append(self._queues[donor].take_back(min(missing, -surplus)))
                if missing < -surplus:
                    heappush(spare, (surplus + missing, donor))

    def _look_up(self, epoch: int) -> int:
        """Prepare the epoch's order; return its number of draws."""
        if self._order is None:
            if self._shuffle:
                self._permutation = KeyedPermutation(self._dataset_length, key(self.seed, epoch))
            return self._dataset_length
        if self._drawn is None or self._drawn[0] != epoch:
            drawn = self._order(epoch)
            self.batches = drawn if isinstance(drawn, Batches) else None
            indices = drawn.indices if isinstance(drawn, Batches) else drawn
            self._drawn = (epoch, _checked_order(indices, epoch, self._dataset_length))
            digest = blake2b(self._drawn[1].tobytes(), digest_size=16).hexdigest()
            self._drawn_digest = digest if self.batches is None else self.batches.digest()
        return len(self._drawn[1] if self.batches is None else self.batches)

    def _queue_of(self, worker: int) -> Ranges:
        if not 0 <= worker < self.workers:
            raise ValueError(f"there is no worker {worker} in a fleet of {self.workers}")
        return self._queues[worker]

    def _per_worker(self, values: Sequence[int], name: str) -> list[int]:
        if len(values) != self.workers:
            raise ValueError(f"{name} needs one number for each of {self.workers} workers, got {len(values)}")
        numbers = [as_int(value) for value in values]
        if min(numbers) < 0:
            raise ValueError(f"{name} must not be negative, got {numbers}")
        return numbers

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _VERSION:
            raise ValueError(f"this is not a feed's state of version {_VERSION}: version={state.get('version')!r}")
        own = {"dataset_length": self._dataset_length, "shuffle": self._shuffle, "order": self._order is not None}
        for name, value in own.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved state belongs to other data: {name} was {state[name]} and is {value} now; "
                    "resume with the same dataset and order, or start a new run"
                )
        parts = sorted(part for ranges in (state["pool"], *state["queues"]) for part in _tuples(ranges))
        edges = [0, *(edge for part in parts for edge in part), state["length"], state["draws"]]
        if any(start >= stop for start, stop in parts) or edges != sorted(edges):
            raise ValueError("the saved state is damaged: its ranges overlap or lie outside the epoch")


def _fit(shares: list[int], remaining: int) -> list[int]:
    """Cut shares in proportion to what is left, which is used up exactly (largest remainder, lower ranks first)."""
    asked = sum(shares)
    if asked <= remaining:
        return shares
    cut = [share * remaining // asked for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda worker: (-(shares[worker] * remaining % asked), worker))
    for worker in by_remainder[: remaining - sum(cut)]:
        cut[worker] += 1
    return cut


def _checked_order(drawn: Iterable[int], epoch: int, length: int) -> NDArray[np.int64]:
    order = np.asarray(drawn if hasattr(drawn, "__array__") else list(drawn))
    if order.ndim != 1 or order.size == 0 or order.dtype.kind not in "iu":
        raise ValueError(
            f"order({epoch}) must give a sequence of dataset indices, at least one; "
            f"got an array of shape {order.shape} and type {order.dtype}"
        )
    if order.min() < 0 or order.max() >= length:
        wrong = int(order[(order < 0) | (order >= length)][0])
        raise ValueError(f"order({epoch}) gave the index {wrong}, but the dataset has the indices 0 to {length - 1}")
    return order.astype(np.int64)


def _empty_queues(workers: int) -> list[Ranges]:
    if workers < 1:
        raise ValueError(f"a feed needs at least one worker, got {workers}")
    return [Ranges() for _ in range(workers)]


def _lists(ranges: Ranges) -> list[list[int]]:
    return [list(part) for part in ranges.ranges]


def _tuples(ranges: Iterable[Sequence[int]]) -> list[Range]:
    return [(part[0], part[1]) for part in ranges]
