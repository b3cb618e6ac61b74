"""Integer shares: of a step, and of a period of local steps by the clock.

`fill` is the split of a step that finishes first, `proportional` the split by given ratios. `by_the_clock` is what is
dealt for a period of some seconds, and `time_is_up` when it is over. The simulator uses them too.

A worker with ``n`` samples takes ``fixed_s + per_sample_s * n`` seconds, and nothing at all with none. `fill` finds the
integers that make the slowest worker as fast as possible: it pours the samples like water into vessels that stand on
steps of height ``fixed_s``, so a worker whose fixed cost is above the water's surface sits out.

>>> fill([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 4.0], 22).tolist()
[8, 8, 4, 2]
>>> fill([0.0, 9.0], [1.0, 1.0], 8).tolist()
[8, 0]
>>> proportional([1.0, 1.0, 2.0], 10).tolist()
[3, 2, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Bound = int | Sequence[int] | Ints


def fill(
    fixed_s: ArrayLike,
    per_sample_s: ArrayLike,
    total: int,
    *,
    unit: int = 1,
    minimum: Bound = 0,
    maximum: Bound | None = None,
) -> Ints:
    """Return integers ``n`` of sum ``total`` and least ``max(fixed_s + per_sample_s * n)`` over workers with n > 0.

    Shares are multiples of ``unit``; ``total % unit`` goes on top of one worker's share, where it hurts least.
    ``minimum`` is a floor for every step, rounded up to whole units; ``maximum`` is never exceeded. Exact: no other
    split within these bounds has a lower maximum. Raises ValueError when there is no split within them.
    """
    a, b = _vector(fixed_s), _vector(per_sample_s)
    if not (np.all(np.isfinite(a)) and np.all(a >= 0) and np.all(np.isfinite(b)) and np.all(b > 0)):
        raise ValueError("costs must be finite: fixed_s at least 0, per_sample_s above 0")
    units, low, high, cap = _in_units(len(a), total, unit, minimum, maximum)
    counts = _fill_units(a, b * unit, units, low, high)
    shares = counts * unit
    if rest := total - units * unit:
        _give(shares, rest, cap, order=a + b * (shares + rest))
    return shares


def proportional(
    weights: ArrayLike,
    total: int,
    *,
    unit: int = 1,
    minimum: Bound = 0,
    maximum: Bound | None = None,
) -> Ints:
    """Return shares in proportion to ``weights``, rounded by largest remainder to the exact sum ``total``.

    Where a bound cuts a worker's quota, the others take over the difference in their own proportion. ``unit``,
    ``minimum`` and ``maximum`` are as in `fill`. A weight of 0 gets the minimum.
    """
    w = _vector(weights)
    if not (np.all(np.isfinite(w)) and np.all(w >= 0) and w.sum() > 0):
        raise ValueError("weights must be finite, at least 0, and not all 0")
    units, low, high, cap = _in_units(len(w), total, unit, minimum, maximum)
    w = np.where(w > 0, np.maximum(w / w.max(), 1e-15), 0.0)
    if low.sum() + (high - low)[w > 0].sum() < units:
        raise ValueError(f"{total} samples do not fit: workers with weight above 0 may take fewer than that")
    least, most = low.astype(np.float64), high.astype(np.float64)
    quota = clipped(level(np.zeros_like(w), w, units, least, most) * w, least, most)
    counts = np.floor(quota + 1e-9).astype(np.int64)
    _round(counts, quota - counts, units, low, high)
    shares = counts * unit
    if rest := total - units * unit:
        _give(shares, rest, cap, order=shares - w * (total / w.sum()) + np.where(w > 0, 0, total))
    return shares


def _vector(values: ArrayLike) -> Floats:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not len(vector):
        raise ValueError("shares need at least one worker, one number each")
    return vector


def _in_units(
    workers: int, total: int, unit: int, minimum: Bound, maximum: Bound | None
) -> tuple[int, Ints, Ints, Ints]:
    """Return the units to deal, everybody's bounds in units, and maximum in samples; ValueError if nothing fits."""
    if total < 0 or unit < 1:
        raise ValueError(f"total must be at least 0 and unit at least 1, not {total} and {unit}")
    units = total // unit
    floor, cap = each(minimum, workers), each(total if maximum is None else maximum, workers)
    low, high = -(-floor // unit), np.minimum(cap // unit, units)
    if np.any(low < 0) or np.any(cap < 0):
        raise ValueError("minimum and maximum must be at least 0")
    if low.sum() > units:
        raise ValueError(f"minimum is too large: it needs {low.sum() * unit} samples (units of {unit}), not {total}")
    if np.any(low > high):
        worker = int(np.argmax(low > high))
        raise ValueError(
            f"worker {worker}: no multiple of {unit} from minimum {floor[worker]} to maximum {cap[worker]}"
        )
    if high.sum() < units:
        raise ValueError(f"maximum is too small: {high.sum() * unit} samples fit (units of {unit}), not {total}")
    return units, low, high, cap


def clipped(values: Floats, low: Floats | float, high: Floats | float) -> Floats:
    """Return the values within bounds, as ``np.clip`` does in several times the time."""
    return np.minimum(np.maximum(values, low), high)


def each(bound: Bound, workers: int) -> Ints:
    """Return a bound in samples for every worker: one number for all, or one for each."""
    values = np.asarray(bound, dtype=np.int64)
    return np.full(workers, values) if values.ndim == 0 else np.broadcast_to(values, (workers,))


def level(start: Floats, rate: Floats, units: float, low: Floats, high: Floats) -> float:
    """Return the level L with ``sum(clip((L - start) * rate, low, high)) = units``: Newton's steps inside a bracket.

    The sum is piece-wise linear in L, so a step that stays on its piece is exact; a few passes do.
    """
    flows = rate > 0
    bottom, top = float(start.min()), float(np.max(start[flows] + high[flows] / rate[flows], initial=0.0))
    guess = float((units + start @ rate) / rate.sum())
    for _ in range(100):
        guess = guess if bottom <= guess <= top else (bottom + top) / 2
        wanted = (guess - start) * rate
        excess = float(clipped(wanted, low, high).sum()) - units
        if abs(excess) <= 1e-9 * max(units, 1) or bottom >= top:
            break
        bottom, top = (guess, top) if excess < 0 else (bottom, guess)
        slope = float(rate @ ((wanted > low) & (wanted < high)))
        guess = guess - excess / slope if slope > 0 else (bottom + top) / 2
    return guess


def _fill_units(start: Floats, each: Floats, units: int, low: Ints, high: Ints) -> Ints:
    """Split ``units`` exactly min-max: a bracket around the level, then the cheapest further units inside it."""
    rate, least, most = 1 / each, low.astype(np.float64), high.astype(np.float64)

    def counts(by: float) -> Ints:
        return clipped((by - start) * rate, least, most).astype(np.int64)

    surface = level(start, rate, units, least, most)
    wet = start < surface
    slope = max(float(rate @ wet), float(rate.min()))
    # Whole units lie half a unit a worker below the surface on average; starting from there keeps the bracket narrow.
    below, above = _bracket(counts, surface + np.count_nonzero(wet) / 2 / slope, units, slope, len(start))
    missing = units - int(below.sum())
    room = above - below
    if missing == 0:
        return below
    if int(room.sum()) > 16 * len(start) + 1024:
        # Floating point cannot tell these units' finishing times apart, so any split of them is as good.
        return below + proportional(room, missing, maximum=room)
    worker = np.repeat(np.arange(len(start)), room)
    nth = np.arange(len(worker)) - np.repeat(np.cumsum(room) - room, room) + 1
    finish = start[worker] + each[worker] * (below[worker] + nth)
    return below + np.bincount(worker[_smallest(finish, missing)], minlength=len(start))


def _bracket(
    counts: Callable[[float], Ints], guess: float, units: int, slope: float, workers: int
) -> tuple[Ints, Ints]:
    """Return counts at a level just below the wanted sum and just above it, at most a few units per worker apart."""
    bottom = top = guess
    below = above = counts(guess)
    step = max(2 * abs(units - int(below.sum())) / slope, abs(guess) * 1e-12, 1e-300)
    while below.sum() > units:
        bottom, step = bottom - step, step * 4
        below = counts(bottom)
    while above.sum() < units:
        top, step = top + step, step * 4
        above = counts(top)
    while above.sum() - below.sum() > 4 * workers and bottom < (middle := (bottom + top) / 2) < top:
        tried = counts(middle)
        if tried.sum() <= units:
            bottom, below = middle, tried
        else:
            top, above = middle, tried
    return below, above


def _smallest(values: Floats, count: int) -> NDArray[np.intp]:
    """Return indices of the ``count`` smallest values; among equals the first ones, on any machine."""
    border = np.partition(values, count - 1)[count - 1]
    less, equal = np.flatnonzero(values < border), np.flatnonzero(values == border)
    return np.concatenate([less, equal[: count - len(less)]])


def _round(counts: Ints, fraction: Floats, units: int, low: Ints, high: Ints) -> None:
    """Round by largest remainder, in place: missing units go where most was cut off, and too many come back."""
    while missing := units - int(counts.sum()):
        step = 1 if missing > 0 else -1
        open_ = np.flatnonzero(counts < high if missing > 0 else counts > low)
        chosen = open_[_smallest(-step * fraction[open_], min(abs(missing), len(open_)))]
        counts[chosen] += step
        fraction[chosen] -= step


def _give(shares: Ints, rest: int, cap: Ints, *, order: Floats) -> None:
    """Put the remainder on top of the share that comes first in ``order`` among those with room for it."""
    order = np.where(shares + rest <= cap, order, np.inf)
    worker = int(np.argmin(order))
    if not np.isfinite(order[worker]):
        raise ValueError(f"maximum is too small: no worker has room for the remainder of {rest} samples")
    shares[worker] += rest


GENEROUS = 1.4
"""Factor by which more is dealt for a period than a worker did in the last one, so that nobody runs out."""
FIRST_STEPS = 4
"""Local steps dealt for the first period by the clock, while nobody's speed is known."""


def by_the_clock(
    groups: Sequence[Sequence[int]], *, batch: int, speeds: Floats, rates: Floats, period_s: float
) -> tuple[Ints, Ints]:
    """Return the samples to deal to each worker for a period of ``period_s`` seconds, and for one local step.

    ``batch`` is one worker's part of the global batch if all had the same; a group's local step has as many times that
    as it has members, divided in proportion to their ``speeds`` (samples per second of their own work; 0: not known).
    ``rates`` are samples per second in local steps, waiting for the group included.

    >>> one, three = np.array([10.0, 10, 10]), np.array([3.0, 1, 2])
    >>> [part.tolist() for part in by_the_clock([[0, 1], [2]], batch=4, speeds=three, rates=one, period_s=2.0)]
    [[42, 14, 28], [6, 2, 4]]
    """
    batches, shares = np.full(len(speeds), batch), np.zeros(len(speeds), dtype=np.int64)
    for group in groups:
        members, together = list(group), batch * len(group)
        if (speeds[members] > 0).all():
            batches[members] = proportional(speeds[members], together, minimum=1)
        shares[members] = steps_dealt(rates[members].sum(), together, period_s) * batches[members]
    return shares, batches


def steps_dealt(rates: ArrayLike, batch: int, period_s: float) -> Ints:
    """Return the local steps of ``batch`` samples to deal for a period.

    ``rates`` are samples per second; 0 where not known.

    >>> steps_dealt([0.0, 0.1, 10.0], 4, 2.0).tolist()
    [4, 1, 7]
    """
    known = np.asarray(rates, dtype=np.float64)
    steps = np.maximum(1, np.ceil(GENEROUS * known * period_s / batch))
    return np.where(known > 0, steps, FIRST_STEPS).astype(np.int64)


@overload
def time_is_up(elapsed_s: float, steps: int, period_s: float) -> bool: ...


@overload
def time_is_up(elapsed_s: Floats, steps: Ints, period_s: float) -> Mask: ...


def time_is_up(elapsed_s: Floats | float, steps: Ints | int, period_s: float) -> Mask | bool:
    """Return whether the round comes now: this local step ends nearer to the period's end than the next would.

    >>> time_is_up(4.0, 4, 4.6), time_is_up(4.0, 4, 4.4)
    (False, True)
    """
    return elapsed_s + elapsed_s / steps / 2 >= period_s
