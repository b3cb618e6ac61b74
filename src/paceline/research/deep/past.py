"""Times as the deep model sees them: the natural log over the worker's own level.

A worker's level is the median of its log times over the last ``memory`` steps, so a machine that is slow for good and
one that is fast look alike, and a worker that is slow for less than half of the time is measured against its healthy
self. Logs make slow-downs factors, whatever the unit of the times, and a forecast can never be negative. Before a
series begins, its first step is taken to have lasted for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from paceline.pace.forecast import Floats, Mask


def levels(logs: Floats, memory: int) -> Floats:
    """Return the level after every step of a series, from that step and those before it: steps x workers."""
    padded = np.concatenate([np.repeat(logs[:1], memory - 1, axis=0), logs])
    return np.asarray(np.median(sliding_window_view(padded, memory, axis=0), axis=-1))


class Past:
    """The last ``depth`` steps of a fleet as log seconds, with draws where a worker was cut off (``hidden``).

    A worker that is new is taken for a typical one until it was seen in time once, and from then on for one that has
    always been as it was then.
    """

    def __init__(self, workers: int, depth: int) -> None:
        self.rows = np.zeros((depth, workers))
        self.hidden = np.zeros((depth, workers), dtype=np.bool_)
        self.fresh = np.ones(workers, dtype=np.bool_)

    @property
    def workers(self) -> int:
        return self.rows.shape[1]

    def deepen(self, depth: int) -> None:
        """Hold at least ``depth`` steps from now on."""
        if (more := depth - len(self.rows)) > 0:
            self.rows = np.concatenate([np.repeat(self.rows[:1], more, axis=0), self.rows])
            self.hidden = np.concatenate([np.zeros((more, self.workers), dtype=np.bool_), self.hidden])

    def welcome(self, logs: Floats, late: Mask) -> None:
        """Give the new workers among these a past: constant, so that their coming is no shock to the fleet's state."""
        if not self.fresh.any():
            return
        if self.fresh.all():
            self.rows[:] = np.median(logs[~late]) if (~late).any() else np.median(logs)
        told, bound = self.fresh & ~late, self.fresh & late
        self.rows[:, told] = logs[told]
        self.rows[:, bound] = np.maximum(self.rows[:, bound], logs[bound])
        self.fresh &= ~told

    def push(self, row: Floats, late: Mask) -> None:
        self.rows = np.concatenate([self.rows[1:], row[None]])
        self.hidden = np.concatenate([self.hidden[1:], late[None]])

    def rearrange(self, sources: Sequence[int], logs: Floats | None = None) -> None:
        """Follow a change of members: the new column i was column ``sources[i]``, or is a new worker where that is -1.

        What is believed of it stands in ``logs``; without that it is a typical one, and fresh.
        """
        columns = np.asarray(sources, dtype=np.int64)
        new = columns < 0
        rows, hidden, fresh = self.rows[:, columns], self.hidden[:, columns], self.fresh[columns]
        rows[:, new] = np.median(self.rows, axis=1)[:, None] if logs is None else logs[new]
        hidden[:, new], fresh[new] = False, logs is None
        self.rows, self.hidden, self.fresh = rows, hidden, fresh

    def level(self, memory: int) -> Floats:
        """Return each worker's level over the last ``memory`` steps."""
        return np.asarray(np.median(self.rows[-memory:], axis=0))
