"""How good a forecast was, cut-offs included: the continuous ranked probability score up to the cut-off.

>>> crps(np.array([[2.0, 3.0]]), Seen.whole([1.0, 3.0])).tolist()  # one draw: the plain error
[1.0, 0.0]
"""

from __future__ import annotations

import numpy as np

from paceline.pace.forecast.base import Floats, Seen


def crps(draws: Floats, seen: Seen) -> Floats:
    """Each worker's score in seconds, the smaller the better; ``draws`` are joint samples, a row each.

        E|min(X, t) - min(x, t)| - E|min(X, t) - min(X', t)| / 2

    with X, X' independent draws, x what happened and t the step's cut-off. Nothing beyond t was seen, so nothing
    beyond t is judged: a worker cut off scores 0 for a forecast that had it beyond t for certain.
    """
    ordered = np.sort(np.minimum(draws, _cutoffs(seen)), axis=0)
    error = np.abs(ordered - seen.seconds).mean(axis=0)
    rows = len(ordered)
    if rows == 1:
        return np.asarray(error)
    rank = 2.0 * np.arange(1, rows + 1) - rows - 1
    return np.asarray(error - rank @ ordered / (rows * (rows - 1)))


def _cutoffs(seen: Seen) -> Floats:
    """What each is judged up to: who was late by its own bound, others by the step's one cut-off if it had one."""
    everybody = float(np.max(seen.seconds, where=seen.late, initial=0.0))
    in_time = float(np.max(seen.seconds, where=~seen.late, initial=0.0))
    return np.where(seen.late, seen.seconds, everybody if everybody >= in_time and seen.late.any() else np.inf)


def score(draws: Floats, seen: Seen) -> float:
    """The fleet's mean score over the mean time seen: no unit, so steps of any length weigh the same."""
    return float(crps(draws, seen).mean() / seen.seconds.mean())
