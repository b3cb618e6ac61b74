"""How long a worker may be silent before it is given up, learned from the gaps between its own beats.

A worker on a busy machine beats late now and then; one on a quiet machine never does. So nobody tunes a timeout:

    patience = FLOOR_S + 4 x (largest recent gap - BEAT_S), at most CEILING_S

>>> calm, loaded = Patience(), Patience()
>>> for gap in (0.2, 0.21, 0.2):
...     calm.note(gap)
...     loaded.note(gap + 0.5)
>>> round(calm.limit_s, 2), round(loaded.limit_s, 2)
(1.24, 3.24)
"""

from __future__ import annotations

from collections import deque

BEAT_S = 0.2
FLOOR_S = 1.2
CEILING_S = 20.0
EXCESS_WEIGHT = 4.0
REMEMBERED = 300
"""Gaps that are remembered: a minute of them."""


class Patience:
    """What one worker's beats have taught."""

    def __init__(self) -> None:
        self._excesses: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, gap_s: float) -> None:
        """Two beats came so many seconds apart."""
        self._excesses.append(max(0.0, gap_s - BEAT_S))

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the worker is given up."""
        return min(CEILING_S, FLOOR_S + EXCESS_WEIGHT * max(self._excesses, default=0.0))
