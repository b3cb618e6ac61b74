"""Orders of an epoch other than the feed's own shuffle: samplers, batch samplers, and P4's overlapping parts.

The dataset indices that a sampler draws are an epoch's, and each draw counts once. All workers must draw the same, and
a resumed epoch the same again. So before each epoch's draw every generator that the sampler can draw from is seeded by
(seed, epoch): the three global ones, and those it holds. Other state that it carries from one epoch to the next cannot
be drawn again; the difference shows when workers or a checkpoint compare their orders.

The batches of a batch sampler are dealt undivided, each as one micro-batch: the feed then deals positions of *batches*.
A batch's samples lie behind one another in the epoch's order of samples, so that every sample still has a position of
its own, which keys its random numbers.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from operator import index as as_int
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.feed.randomness import generators_kept, key, seed_generators
from paceline.feed.ranges import positions
from paceline.records import Range

_SAMPLER = 0x73616D706C6572
"""Constant that keeps the keys of samplers apart from those of samples."""


Drawn = TypeVar("Drawn")


class DrawnOrder(Generic[Drawn]):
    """``order(epoch)`` of a sampler or batch sampler over a dataset with ``length`` samples."""

    def __init__(self, sampler: Any, *, length: int, seed: int) -> None:
        self._sampler, self._length, self._seed = sampler, length, seed
        self.name = type(sampler).__name__
        self._most = 100 * length + 10_000
        """Indices per epoch after which a sampler is taken for endless."""
        self._after: bytes | None = None
        """Digest of the sampler's state after the last draw."""

    def __call__(self, epoch: int) -> Drawn:
        drawn = self._draw(epoch)
        self._after = state_of(self._sampler)
        return drawn

    def for_evaluation(self, epoch: int) -> Drawn:
        """Return the order for an evaluation, drawn by a copy: a training may be in the middle of another epoch."""
        return type(self)(copy(self._sampler), length=self._length, seed=self._seed)(epoch)

    def _draw(self, epoch: int) -> Drawn:
        self._set_epoch(epoch)
        epoch_key = key(self._seed, epoch, _SAMPLER)
        with generators_kept():
            seed_generators(epoch_key)
            for number, generator in enumerate(own_generators(self._sampler)):
                reseed(generator, key(epoch_key, number))
            return self._read(iter(self._sampler))

    def _set_epoch(self, epoch: int) -> None:
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)

    def _read(self, drawn: Iterator[Any]) -> Drawn:
        raise NotImplementedError

    def _no_end(self) -> ValueError:
        return ValueError(
            f"{self.name} gave {self._most} indices of {self._length} samples and no end: an epoch needs one "
            "(num_samples, or order=fn(epoch))"
        )

    def check_unchanged(self, epoch: int) -> None:
        """Raise ValueError when the script has changed the sampler after this epoch's order was drawn."""
        if self._after is not None and state_of(self._sampler) != self._after:
            raise ValueError(
                f"{self.name} was changed after it had drawn the order of epoch {epoch}, which "
                "happens when the epoch before ends: pass order=fn(epoch), or call fleet.steps anew for every epoch"
            )


class SamplerOrder(DrawnOrder[NDArray[np.int64]]):
    """``order(epoch)`` of a sampler, which gives dataset indices one by one."""

    def _read(self, drawn: Iterator[Any]) -> NDArray[np.int64]:
        indices: Sequence[Any] = list(islice(drawn, self._most + 1))
        if len(indices) > self._most:
            raise self._no_end()
        try:
            return np.fromiter(map(as_int, indices), dtype=np.int64, count=len(indices))
        except (TypeError, ValueError):
            raise ValueError(f"{self.name} must give dataset indices one by one, and gave {indices[0]!r}") from None


@dataclass(frozen=True, eq=False)
class Batches:
    """An epoch's batches in their order.

    >>> batches = Batches.from_lists([[3, 1], [2], [0, 4, 5]])
    >>> len(batches), batches.flat([(0, 2)]), batches.flat([(2, 3)]), batches.mean
    (3, ((0, 3),), ((3, 6),), 2)
    """

    indices: NDArray[np.int64]
    """Indices of the dataset, one batch behind the other."""
    starts: NDArray[np.int64]
    """Offset of each batch's beginning among ``indices``, and at last the offset of the end."""

    @classmethod
    def from_lists(cls, batches: Sequence[Sequence[int]]) -> Batches:
        """Return batches of dataset indices."""
        starts = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(batches), dtype=np.int64, count=int(starts[-1])), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def mean(self) -> int:
        """Return the mean number of samples per batch, rounded down; at least 1."""
        return max(1, len(self.indices) // max(1, len(self)))

    def flat(self, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """Return ranges of batches as ranges of samples."""
        return tuple((int(self.starts[start]), int(self.starts[stop])) for start, stop in ranges)

    def each(self, ranges: Sequence[Range]) -> Iterator[tuple[tuple[Range, ...], NDArray[np.int64]]]:
        """Yield the batches at these positions: the ranges of their samples, and the dataset indices there."""
        for batch in positions(ranges).tolist():
            ((start, stop),) = where = self.flat([(batch, batch + 1)])
            yield where, self.indices[start:stop]

    def digest(self) -> str:
        """Return a digest of the assignment of samples to batches."""
        return blake2b(self.starts.tobytes() + self.indices.tobytes(), digest_size=16).hexdigest()


class BatchOrder(DrawnOrder[Batches]):
    """``order(epoch)`` of a batch sampler; samplers within it get ``set_epoch`` too."""

    def _set_epoch(self, epoch: int) -> None:
        for one in within(self._sampler):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)

    def _read(self, drawn: Iterator[Any]) -> Batches:
        batches, left = [], self._most
        for batch in drawn:
            batches.append(self._checked(batch))  # a copy: the sampler may fill the same list again
            left -= len(batches[-1])
            if left < 0:
                raise self._no_end()
        if not batches:
            raise ValueError(f"{self.name} gave no batches: there is nothing to train on")
        return Batches.from_lists(batches)

    def _checked(self, batch: Any) -> list[int]:
        try:
            indices = [as_int(index) for index in batch]
        except (TypeError, ValueError):
            raise ValueError(f"{self.name} must give lists of dataset indices, and gave {batch!r}") from None
        if not indices:
            raise ValueError(f"{self.name} gave an empty batch, which nothing can be learnt from: leave it out")
        return indices


def once_each(batches: Batches, length: int) -> bool:
    """Return whether the batches hold every sample of the dataset exactly once."""
    return np.array_equal(np.sort(batches.indices), np.arange(length))


def batch_count_note(name: str, batches: Batches, *, global_batch: int, workers: int) -> tuple[str, str]:
    """Return (level, text) that states what ``global_batch`` counts.

    The level is "warning" where the value reads like a number of samples.
    """
    samples = global_batch * batches.mean
    text = (
        f"global_batch={global_batch} counts the batches of {name}: a step is {global_batch} of the {len(batches)} it "
        f"gives now, about {samples} samples"
    )
    meant = global_batch // batches.mean
    if batches.mean == 1 or meant < workers:  # with samples meant, some workers would get no batch
        return "info", text
    return "warning", f"{text}; if you mean {global_batch} samples per step, write global_batch={meant}"


def within(sampler: Any) -> Iterator[Any]:
    """Yield the sampler, and the samplers among its attributes, recursively."""
    todo, seen = [sampler], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [value for value in getattr(one, "__dict__", {}).values() if isinstance(value, Sampler)]


def own_generators(sampler: Any) -> Iterator[Any]:
    """Yield the generators among a sampler's attributes, and those of samplers within it."""
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            yield value
        elif isinstance(value, Sampler):
            yield from own_generators(value)


def reseed(generator: Any, new_key: int) -> None:
    """Start a generator of torch, NumPy or Python from a 63-bit key."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(new_key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(new_key).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(new_key >> 31)
    else:
        generator.seed(new_key)


def state_of(sampler: Any) -> bytes | None:
    """Return a digest of the sampler's attributes, except generators and datasets; None when it cannot be computed."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(getattr(sampler, "__dict__", sampler))  # a list has no attributes: its content counts
        return blake2b(buffer.getbuffer(), digest_size=16).digest()
    except Exception:  # an attribute of the user's may fail in any way
        return None


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> str | None:
        """Return a type's name in place of objects that are large or that change by themselves."""
        kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, torch.utils.data.Dataset)
        return type(thing).__name__ if isinstance(thing, kinds) else None


def overlapped(
    length: int, *, workers: int, part: float, seed: int
) -> tuple[Callable[[int], NDArray[np.int64]], tuple[int, ...]]:
    """Return an ``order`` for the feed, the workers' parts one behind the other, and the length of each part.

    This is P4's data overlap: a common part of the dataset goes to every worker, the rest to one each. With N samples,
    k workers and the part r, the common subset O has ``round(r N)`` samples and is the same in every epoch; a worker's
    own samples are O and its k-th of the rest, ``|D_i| = r N + (1 - r) N / k``. In every epoch each sample of O then
    counts k times and every other sample once.

    >>> order, lengths = overlapped(10, workers=2, part=0.2, seed=0)
    >>> lengths, len(order(0))
    ((6, 6), 12)
    """
    if not 0 <= part < 1:
        raise ValueError(f"the overlap is {part}: the part of the data that all workers share, from 0 to below 1")
    shuffled = np.random.default_rng(key(seed)).permutation(length)
    common, rest = shuffled[: round(part * length)], shuffled[round(part * length) :]
    lengths = tuple(len(common) + len(own) for own in np.array_split(rest, workers))

    def order(epoch: int) -> NDArray[np.int64]:
        dice = np.random.default_rng(key(seed, epoch, 1))
        parts = np.array_split(dice.permutation(rest), workers)
        return np.concatenate([dice.permutation(np.concatenate([common, own])) for own in parts])

    return order, lengths
