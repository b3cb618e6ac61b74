"""How many whole shares a step should wait for.

A step that closes with the c-th arrival does c shares in ``x_(c) + T_o`` seconds, with x_(c) the c-th smallest time and
T_o the round's own cost (communication and update). Waiting for everybody is c = n.

>>> best_count(np.array([[1.0, 1.0, 1.0, 9.0]]))
3
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.pace.forecast import Floats


def rates(ordered: Floats, *, overhead_s: float = 0.0) -> Floats:
    """Return shares per second when closing with the c-th arrival, ``c / (x_(c) + T_o)``; rows are sorted times."""
    return np.arange(1, ordered.shape[-1] + 1) / (ordered + overhead_s)


def best_count(samples: Floats, *, overhead_s: float = 0.0) -> int:
    """Return ``argmax_c mean_s c / (x^s_(c) + T_o)`` over joint samples, one per row; the larger count among equals.

    ``E[c / x]``, the expectation of the rate that P3 maximises (the mean outside is reconstructed), and not
    ``c / E[x]``: a forecast of one row, as Elfving's, makes them the same, and docs/research.md says where they differ.
    """
    gain = rates(np.sort(samples, axis=1), overhead_s=overhead_s).mean(axis=0)
    return best_count_of(gain)


def clairvoyant_counts(ordered: Floats, *, overhead_s: float = 0.0) -> NDArray[np.int64]:
    """Return the best count of each step by its true times; rows are sorted times."""
    gain = rates(ordered, overhead_s=overhead_s)
    return np.asarray(ordered.shape[1] - np.argmax(gain[:, ::-1], axis=1), dtype=np.int64)


def static_count(fraction: float, workers: int) -> int:
    """Return the nearest whole number of workers to a fraction of them, at least one."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a static cut-off waits for a fraction of the workers, above 0 and at most 1, not {fraction}")
    return max(1, round(fraction * workers))


def best_static_count(ordered: Floats, *, overhead_s: float = 0.0) -> int:
    """Return the one count that would have done most over all steps, ``argmax_c sum c / sum (x_(c) + T_o)``."""
    return best_count_of(np.arange(1, ordered.shape[1] + 1) * len(ordered) / (ordered + overhead_s).sum(axis=0))


def best_count_of(throughput: Floats) -> int:
    """Return the count with the highest throughput; the larger one among equals."""
    return len(throughput) - int(np.argmax(throughput[::-1]))
