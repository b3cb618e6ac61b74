"""A shuffle that is computed, not stored: position in the epoch -> index in the dataset.

The positions are laid out as a grid of ``rows x columns >= length`` cells, both about sqrt(length). A Feistel network
with mixed radix turns the row by a keyed function of the column, then the column by a keyed function of the row, and so
on: each half-round can be undone, so the whole is a bijection of the grid. The few cells beyond ``length`` (about one
in sqrt(length)) are sent round again until they land inside, which keeps it a bijection of ``range(length)``.

Memory is a dozen numbers whatever the length, and any part of the shuffle can be computed on its own.

>>> sorted(KeyedPermutation(10, key=1)(np.arange(10)).tolist())
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from paceline.feed.randomness import key

MAX_LENGTH = 1 << 40
_SMALL, _ROUNDS_SMALL, _ROUNDS = 1 << 12, 16, 8
WINDOW = 1024
"""Positions that are computed at once when fewer are requested: they cost little more than a few."""
_HALF, _MULTIPLIER = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)


class KeyedPermutation:
    """A permutation of ``range(length)`` chosen by ``key``: different keys give different shuffles."""

    def __init__(self, length: int, key: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a shuffle needs a length between 1 and 2**40, got {length}")
        self.length = length
        self._rows, self._columns = _grid(length)
        self._keys = _round_keys(key, rounds=_ROUNDS_SMALL if length < _SMALL else _ROUNDS)
        self._window: tuple[int, NDArray[np.int64]] = 0, np.empty(0, dtype=np.int64)
        """A first position, and the indices from there on that were computed last."""

    def part(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the dataset indices at the positions from ``start`` to below ``stop``; cache those that follow."""
        if stop - start > WINDOW:
            return self(np.arange(start, stop))
        first, known = self._window
        if not first <= start <= stop <= first + len(known):
            first, known = start, self(np.arange(start, min(start + WINDOW, self.length)))
            self._window = first, known
        return known[start - first : stop - first]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset index at each position (both in ``range(length)``)."""
        out = self._scramble(np.asarray(positions).astype(np.uint64))
        outside = np.flatnonzero(out >= self.length)
        while outside.size:
            out[outside] = self._scramble(out[outside])
            outside = outside[out[outside] >= self.length]
        return out.astype(np.int64)

    def _scramble(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Run one pass of the Feistel network over cells of the grid."""
        row, column = np.divmod(cells, np.uint64(self._columns))
        for even, odd in zip(self._keys[::2], self._keys[1::2]):
            row = _turn(row, by=column, size=self._rows, key=even)
            column = _turn(column, by=row, size=self._columns, key=odd)
        return row * np.uint64(self._columns) + column


def _grid(length: int) -> tuple[int, int]:
    """Return rows and columns, not both odd.

    Turning an odd circle is an even permutation, and odd ones are wanted too.
    """
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    return rows, columns + (rows % 2 and columns % 2)


def _round_keys(seed: int, *, rounds: int) -> list[np.uint64]:
    """Return the rounds' keys.

    Short grids need more rounds to reach all permutations evenly: 8 rounds of 3 x 3 miss some, 16 do not.
    """
    return [np.uint64(key(seed, turn)) for turn in range(rounds)]


def _turn(digit: NDArray[np.uint64], *, by: NDArray[np.uint64], size: int, key: np.uint64) -> NDArray[np.uint64]:
    """Return ``digit + hash(by) mod size``.

    The hash is lighter than `mix`: the rounds do the rest, and calls are small.
    """
    amount = by + key
    amount *= _MULTIPLIER
    amount ^= amount >> _HALF
    amount *= _MULTIPLIER
    amount >>= _HALF
    amount += digit
    amount %= np.uint64(size)
    return amount
