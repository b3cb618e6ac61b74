"""Lists of ranges, in which the feed stores a billion positions in a few numbers.

A range is ``(start, stop)``: the positions ``start <= p < stop``. A list of them is in order of consumption.

>>> queue = Ranges([(0, 10), (10, 12), (20, 30)])
>>> queue.take_front(11), queue.take_back(3), queue.ranges, queue.total
(((0, 11),), ((27, 30),), ((11, 12), (20, 27)), 8)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.records import Range


class Ranges:
    """A queue of positions, held as ranges; neighbours are merged, both ends can be taken from."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: deque[Range] = deque()
        self.total = 0
        self.append(ranges)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(self._ranges)

    def append(self, ranges: Iterable[Range]) -> None:
        """Add at the end; merge what continues the last range into it."""
        for start, stop in ranges:
            if stop == start:
                continue
            assert stop > start, (start, stop)
            self.total += stop - start
            if self._ranges and self._ranges[-1][1] == start:
                start = self._ranges.pop()[0]
            self._ranges.append((start, stop))

    def put_back(self, ranges: Iterable[Range]) -> None:
        """Add and sort by position, so that the positions lie in as few ranges as possible."""
        ordered = sorted([*self._ranges, *ranges])
        self._ranges.clear()
        self.total = 0
        self.append(ordered)

    def take_front(self, count: int) -> tuple[Range, ...]:
        """Remove and return the first ``count`` positions (all, when there are fewer)."""
        taken: list[Range] = []
        while count > 0 and self._ranges:
            start, stop = self._ranges.popleft()
            cut = min(stop, start + count)
            if cut < stop:
                self._ranges.appendleft((cut, stop))
            taken.append((start, cut))
            count -= cut - start
            self.total -= cut - start
        return tuple(taken)

    def take_back(self, count: int) -> tuple[Range, ...]:
        """Remove and return the last ``count`` positions (all, when there are fewer), in their order."""
        taken: list[Range] = []
        while count > 0 and self._ranges:
            start, stop = self._ranges.pop()
            cut = max(start, stop - count)
            if cut > start:
                self._ranges.append((start, cut))
            taken.append((cut, stop))
            count -= stop - cut
            self.total -= stop - cut
        return tuple(reversed(taken))


def total(ranges: Iterable[Range]) -> int:
    """Return how many positions the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def positions(ranges: Sequence[Range]) -> NDArray[np.int64]:
    """Return the positions themselves, in order."""
    if not ranges:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


def split(ranges: Iterable[Range], size: int) -> list[tuple[Range, ...]]:
    """Cut a list of ranges into pieces of ``size`` positions, in order; the last may be smaller.

    >>> split([(0, 5), (9, 12)], 3)
    [((0, 3),), ((3, 5), (9, 10)), ((10, 12),)]
    """
    if size < 1:
        raise ValueError(f"pieces need at least one position each, got size={size}")
    rest = Ranges(ranges)
    pieces = []
    while rest.total:
        pieces.append(rest.take_front(size))
    return pieces
