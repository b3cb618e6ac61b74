"""P4's data overlap: a common part of the dataset goes to every worker, the rest to one each.

With N samples, k workers and the part r, the common subset O has ``round(r N)`` samples and is the same in every epoch;
a worker's own samples are O and its k-th of the rest, ``|D_i| = r N + (1 - r) N / k``. In every epoch each sample of O
then counts k times and every other sample once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.feed.keys import key


def overlapped(
    length: int, *, workers: int, part: float, seed: int
) -> tuple[Callable[[int], NDArray[np.int64]], tuple[int, ...]]:
    """An ``order`` for the feed, the workers' parts one behind the other, and how long each part is.

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
