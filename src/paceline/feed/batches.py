"""Batches that a batch sampler gives: each is one micro-batch, dealt whole.

The feed then deals positions of *batches*. A batch's samples lie behind one another in the epoch's order of samples, so
that every sample still has a position of its own, which its noise is keyed by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.feed.ranges import positions
from paceline.feed.samplers import DrawnOrder, within
from paceline.records import Range


@dataclass(frozen=True, eq=False)
class Batches:
    """An epoch's batches in their order.

    >>> batches = Batches.of([[3, 1], [2], [0, 4, 5]])
    >>> len(batches), batches.flat([(0, 2)]), batches.flat([(2, 3)]), batches.mean
    (3, ((0, 3),), ((3, 6),), 2)
    """

    indices: NDArray[np.int64]
    """Of the dataset, one batch behind the other."""
    starts: NDArray[np.int64]
    """Where each batch begins among them, and at last where they end."""

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]]) -> Batches:
        """Of lists of dataset indices."""
        starts = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(batches), dtype=np.int64, count=int(starts[-1])), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def mean(self) -> int:
        """Samples in a batch, on average, rounded down; at least 1."""
        return max(1, len(self.indices) // max(1, len(self)))

    def flat(self, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """Ranges of batches as ranges of samples."""
        return tuple((int(self.starts[start]), int(self.starts[stop])) for start, stop in ranges)

    def each(self, ranges: Sequence[Range]) -> Iterator[tuple[tuple[Range, ...], NDArray[np.int64]]]:
        """The batches at these positions: where their samples lie, and the dataset indices there."""
        for batch in positions(ranges).tolist():
            ((start, stop),) = where = self.flat([(batch, batch + 1)])
            yield where, self.indices[start:stop]

    def digest(self) -> str:
        """Of what is in which batch."""
        return blake2b(self.starts.tobytes() + self.indices.tobytes(), digest_size=16).hexdigest()


class BatchOrder(DrawnOrder[Batches]):
    """``order(epoch)`` of a batch sampler: drawn as samplers are, and samplers within it hear of the epoch too."""

    def _tell(self, epoch: int) -> None:
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
        return Batches.of(batches)

    def _checked(self, batch: Any) -> list[int]:
        try:
            indices = [as_int(index) for index in batch]
        except (TypeError, ValueError):
            raise ValueError(f"{self.name} must give lists of dataset indices, and gave {batch!r}") from None
        if not indices:
            raise ValueError(f"{self.name} gave an empty batch, which nothing can be learnt from: leave it out")
        return indices


def once_each(batches: Batches, length: int) -> bool:
    """Whether they hold every sample of the dataset exactly once."""
    return np.array_equal(np.sort(batches.indices), np.arange(length))


def unit_said(name: str, batches: Batches, *, global_batch: int, workers: int) -> tuple[str, str]:
    """(level, text): what ``global_batch`` counts here; a warning where it reads as a number of samples, too."""
    samples = global_batch * batches.mean
    text = (
        f"global_batch={global_batch} counts the batches of {name}: a step is {global_batch} of the {len(batches)} it "
        f"gives now, about {samples} samples"
    )
    meant = global_batch // batches.mean
    if batches.mean == 1 or meant < workers:  # so few samples would not give everybody a batch
        return "info", text
    return "warning", f"{text}; if you mean {global_batch} samples a step, write global_batch={meant}"
