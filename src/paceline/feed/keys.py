"""Random numbers as a function: mix a few whole numbers into one key, the same on every machine.

Nothing is drawn from a stream, so nothing depends on who asks, or on what was asked before. The mixing function is
the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input changes about half of the output.

>>> key(0, 1, 2) == key(0, 1, 2), key(0, 1, 2) == key(0, 2, 1)
(True, False)
>>> keys(0, 1, np.array([2, 3])).tolist() == [key(0, 1, 2), key(0, 1, 3)]
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*words: int) -> int:
    """Mix whole numbers (seed, epoch, position, ...) into one of 63 bits; their order matters."""
    return begun(*words) >> 1


def begun(*words: int, state: int = 0) -> int:
    """A key that more words may follow (`continued`): for those that begin alike."""
    for word in words:
        state = _mix((state + GOLDEN & MASK) ^ (word & MASK))
    return state


def continued(state: int, *words: int) -> int:
    """The key of what has `begun` and of these words.

    >>> continued(begun(3, 1), 4) == key(3, 1, 4)
    True
    """
    return begun(*words, state=state) >> 1


def keys(seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`key(seed, epoch, position)` of many positions at once."""
    prefix = _mix((_mix(GOLDEN ^ (seed & MASK)) + GOLDEN & MASK) ^ (epoch & MASK))
    words = positions.astype(np.uint64) ^ np.uint64(prefix + GOLDEN & MASK)
    return (mix(words) >> np.uint64(1)).astype(np.int64)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words one by one; a bijection. A new array."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST & MASK
    word = (word ^ word >> 27) * _SECOND & MASK
    return word ^ word >> 31
