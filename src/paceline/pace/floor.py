"""The floor of a round with a deadline: with too few samples counted, those at work get more of both, time and samples.

A step whose count is thin moves the parameters as far as a whole one, by a gradient that is mostly noise. Waiting for
the floor costs little, for nobody stands idle: who is not stuck goes on. Runs and the simulator use the same function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paceline.pace.shares import proportional

SLACK = 1.1
"""The time given over the time that is missing: a micro-batch is begun only if it fits with a margin of a tenth."""
SHORTEST = 0.05
"""No extension is shorter than this part of the step so far."""
SPARE = 1.25
"""Dealt over what is missing: the speeds of the workers at work may change."""


class More(NamedTuple):
    """What a thin step gets."""

    shares: tuple[int, ...]
    """Each worker's share of the whole step, never less than before."""
    seconds: float
    """Seconds by which its deadline is moved."""
    recall: bool = False
    """The free workers have nothing left: what stuck ones were dealt is to be dealt again instead."""


def least_samples(part: float, batch: int) -> int:
    """Return the fewest samples a step of this batch may count.

    >>> least_samples(0.7, 128), least_samples(0.0, 128)
    (90, 0)
    """
    return math.ceil(part * batch - 1e-9)


def more(
    counts: ArrayLike,
    shares: ArrayLike,
    *,
    free: ArrayLike,
    busy: ArrayLike,
    least: int,
    so_far_s: float,
    room: int,
    unit: int = 1,
    smallest: int = 1,
    patience: float = 1.0,
) -> More | None:
    """Return what a step gets that has counted less than ``least`` at its deadline, ``so_far_s`` after its start.

    None when it may close, because enough is counted or because nobody can bring more.

    ``free``: workers that have nothing to do and would take more; ``busy``: those inside a micro-batch, who may be
    stuck. The rest have left. ``room``: samples that nobody was dealt yet. Nobody is dealt more in other than multiples
    of ``unit``, or given fewer than ``smallest``. The free ones do what is missing at their speed of this step. Where
    nobody is free the step waits for the busy ones, each time twice as long.

    >>> more((50, 0), (60, 60), free=(True, False), busy=(False, True), least=70, so_far_s=1.0, room=100).shares
    (75, 60)
    """
    done, dealt = np.asarray(counts, dtype=np.int64), np.asarray(shares, dtype=np.int64)
    missing = least - int(done.sum())
    able = np.asarray(free, dtype=bool) & ((dealt > done) | (room >= max(unit, smallest)))
    if missing <= 0 or not (able.any() or np.asarray(busy, dtype=bool).any()):
        return None
    if not able.any():
        return More(tuple(dealt.tolist()), so_far_s, recall=bool(np.any(free)))
    speed = np.where(able, np.maximum(done, 1), 0) / so_far_s
    missing_s = missing / float(speed.sum())
    seconds = patience * max(SLACK * missing_s, SHORTEST * so_far_s)
    wanted = np.where(able, done + np.maximum(np.ceil(SPARE * missing_s * speed), smallest), 0).astype(np.int64)
    added = -(-np.maximum(wanted - dealt, 0) // unit) * unit
    if added.sum() > room:
        added = proportional(added.astype(np.float64), room // unit * unit, unit=unit)
    added[dealt + added - done < smallest] = 0
    if not (able & (dealt + added > done)).any():  # too little for all of them
        added[int(np.argmax(speed))] = room // unit * unit
    return More(tuple((dealt + added).tolist()), seconds)
