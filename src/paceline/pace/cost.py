"""What a worker is believed to cost: ``seconds = fixed + per_sample * samples``, learned from the records.

The belief (a, b) of each worker is followed by a Kalman filter, all workers at once:

- the first measurement scales the whole prior (a single time cannot tell a from b), and so does the second (the first
  step is often slowed by warming up);
- later ones are weighed by how much they can tell: moves of the share teach the ratio a/b, a share that stands still
  teaches the speed alone, so the fit cannot degenerate once shares settle (the prior's covariance is the ridge);
- the speed may wander, which is the exponential forgetting: a noisy worker is averaged over more steps than a calm one;
- a time far off the expectation is a change of speed, not noise: a and b are scaled to it at once. A first step slowed
  by compilation or a one-off stall is undone the same way by the next normal time, which a worker always gets: none
  is left out on the word of a single measurement.

While a worker looks for the size of its micro-batches, and when it has found another one, its newest time stands for
all before: those were of other sizes.

A worker that sat out or left teaches nothing and keeps its belief. One never measured is taken for the median of the
others, and is never left out unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.ledger import Ledger
from paceline.pace.shares import clipped
from paceline.records import StepRecord

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

PRIOR_FIXED = 0.05
"""Part of the first measured time taken for fixed cost while no other worker is known."""
PRIOR_SPREAD = 0.5
"""Standard deviation of that part: it may as well be nearly everything (a GPU) or nothing."""
PRIOR_NOISE = 0.1
"""Relative noise of a worker's times until its own is known; never believed to be below `LEAST_NOISE`."""
LEAST_NOISE = 0.01
NOISE_RATE = 0.1
"""Least weight of the newest residual in the running noise; more while there are few."""
YOUNG = 4
"""Measurements from which a belief still moves; plans follow it without a dead-band."""
WANDER = 0.01
"""Relative random walk of a worker's speed in one step."""
REGROW = 0.002
"""Random walk of the part of the time that is fixed cost, in one step, until it is as uncertain as at first."""
MOST_FIXED = 0.98
"""Fixed cost never explains more than this part of a measured time: more samples always cost something."""
NOISY = 0.12
NOISY_FIXED = 0.5
"""The most that fixed cost explains for a worker whose times scatter by more than `NOISY`: it may be chance there, and
a plan that believed it would deal far too much."""
TELLING_MOVE = 0.05
"""Log of a share's change between two measurements that can tell fixed cost from speed. Smaller moves cannot: a worker
that drifts faster is dealt a little more, its time stays as it was, and that looks like fixed cost."""
JUMP_LOG = 0.3
JUMP_SIGMAS = 3.0
"""A change of speed: the log of measured over expected is beyond ``max(JUMP_LOG, JUMP_SIGMAS * noise)``."""
PAIR_LOG = 0.04
PAIR_SIGMAS = 2.0
"""A change of speed too: twice running on the same side beyond ``max(PAIR_LOG, PAIR_SIGMAS * noise)``."""
SECONDS_RANGE = (1e-9, 1e9)


@dataclass(frozen=True)
class Belief:
    """Costs of some workers, frozen: what a plan is made from."""

    workers: tuple[int, ...]
    fixed_s: Floats
    per_sample_s: Floats
    known: Mask
    """Whether a worker was ever measured; one that was not stands at the median of the others."""
    most: Floats
    """The largest part of a step's samples that the worker should be dealt: twice what it was last seen to do, once it
    is known; beyond that the belief would be a guess."""
    doubtful: Mask
    """Whether it rests on one measurement, the first, or one that said the worker had become much slower; or, where the
    worker has just joined, on the others' alone."""

    def seconds(self, samples: NDArray[Any]) -> Floats:
        """Return ``a + b * n``, and 0 for a worker without samples."""
        return np.where(samples > 0, self.fixed_s + self.per_sample_s * samples, 0.0)


def measurements(record: StepRecord) -> tuple[Mask, Floats, Floats]:
    """Return who was measured in this step, its samples and its seconds; both 1 where nothing was."""
    count = len(record.workers)
    n = np.fromiter(record.samples, dtype=np.float64, count=count)
    t = np.fromiter(record.seconds, dtype=np.float64, count=count)
    measured: Mask = (n > 0) & (t > 0) & np.isfinite(t)
    return measured, np.where(measured, n, 1.0), clipped(np.where(measured, t, 1.0), *SECONDS_RANGE)


def resized(sizes: tuple[int, ...], measured: Mask, last: Floats) -> Mask:
    """Return whose micro-batches, of those measured, have another size than before: their earlier times say little.

    ``sizes``: a record's `micro_size`, 0 while a worker looks for one; ``last``: those before, which become these.
    """
    if len(sizes) != len(measured):
        return np.zeros(len(measured), dtype=np.bool_)
    now = np.fromiter(sizes, dtype=np.float64, count=len(measured))
    changed: Mask = measured & ((now == 0) | (now != last))
    put(last, measured, now)
    return changed


class Costs:
    """The belief about every worker, by stable identity."""

    def __init__(self) -> None:
        self._ledger = Ledger(
            a=0.0,
            b=0.0,
            aa=0.0,
            ab=0.0,
            bb=0.0,
            noise=PRIOR_NOISE**2,
            last=0.0,
            jumped=0.0,
            measured=0.0,
            share=1.0,
            part=1.0,
            size=0.0,
        )
        self._believed: Belief | None = None
        """The belief about the workers of the last record, once it was asked for."""

    def observe(self, record: StepRecord) -> Mask:
        """Learn from one step; says of which workers the belief moved (a young belief, or a change of speed).

        Workers without samples or without a usable time (0, NaN, infinite: not measured) are passed over.
        """
        book, self._believed = self._ledger, None
        book.arrange(record.workers)
        measured, n, t = measurements(record)
        self._forget(resized(record.micro_size, measured, book["size"]))
        first: Mask = measured & (book["measured"] == 0)
        if first.any():
            self._begin(first, n, t)
        jumped = self._follow(measured & ~first, n, t)
        book["measured"][:] += measured
        put(book["share"], measured, n)
        put(book["part"], measured, n / max(1, sum(record.samples)))
        young: Mask = measured & (book["measured"] <= YOUNG)
        return young | jumped

    def belief(self, workers: tuple[int, ...] | None = None) -> Belief:
        """Return the belief about ``workers`` (those of the last record by default), in their order."""
        if workers is not None and workers != self._ledger.present:
            return self._belief(workers)
        if self._believed is None:
            self._believed = self._belief(self._ledger.present)
        return self._believed

    def _belief(self, workers: tuple[int, ...]) -> Belief:
        names = ("a", "b", "measured", "jumped", "part")
        a, b, measured, jumped, part = (self._ledger.look_up(name, workers) for name in names)
        known, doubtful = measured > 0, (measured == 1) | (jumped > 0)
        if not known.all():
            a, b = (np.where(known, value, guess) for value, guess in zip((a, b), self._prior()))
        if workers != self._ledger.present:
            part = part / np.clip(part[known].sum(), 1e-9, 1.0)  # what the others did is theirs to do now
            doubtful = doubtful | (~self._ledger.met(workers) & bool(self._ledger.present))
        most = np.where(measured > YOUNG, np.maximum(2 * part, 1 / len(workers)), 1.0)
        return Belief(workers, a, b, known, most=most, doubtful=doubtful)

    def misses(self, workers: tuple[int, ...]) -> bool:
        """Return whether somebody who was once there is not among these."""
        return self._ledger.misses(workers)

    def forecast_s(self, workers: tuple[int, ...], samples: NDArray[Any]) -> tuple[float, ...] | None:
        """Return the seconds each worker should take; NaN for one never measured, None when nobody was."""
        belief = self.belief(workers)
        if not belief.known.any():
            return None
        return tuple(np.where(belief.known | (samples == 0), belief.seconds(samples), np.nan).tolist())

    def state_dict(self) -> dict[str, Any]:
        return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state)
        self._believed = None

    def _prior(self) -> tuple[float, float]:
        """Return the costs of a worker never measured: the median of those present, else of those that left."""
        for column in (self._ledger.__getitem__, self._ledger.everybody):
            known = column("measured") > 0
            if known.any():
                return float(median(column("a")[known])), float(median(column("b")[known]))
        return 0.0, 1.0

    def _begin(self, first: Mask, n: Floats, t: Floats) -> None:
        """Take first measurements: scale the prior to meet the time; the ratio a/b stays open."""
        book, (a, b) = self._ledger, self._prior()
        fixed = a / (a + b * n) if (book["measured"] > 0).any() else np.full_like(t, PRIOR_FIXED)
        fixed = clipped(fixed, 0.0, MOST_FIXED)
        put(book["a"], first, fixed * t)
        put(book["b"], first, (1 - fixed) * t / n)
        for name in ("aa", "ab", "bb"):
            put(book[name], first, 0.0 * t)
        self._loosen(first, n, t, speed=PRIOR_NOISE**2, ratio=PRIOR_SPREAD**2)

    def _forget(self, who: Mask) -> None:
        """Let the next measurement of these workers be a first one."""
        if not who.any():
            return
        for name, value in (("measured", 0.0), ("last", 0.0), ("jumped", 0.0), ("noise", PRIOR_NOISE**2)):
            self._ledger[name][who] = value

    def _loosen(self, who: Mask, n: Floats, t: Floats, *, speed: Floats | float, ratio: Floats | float) -> None:
        """Add relative variance ``speed`` along (a, b) and ``ratio`` along (t, -t/n), which leaves a + b*n as it is."""
        a, b = self._ledger["a"], self._ledger["b"]
        put(self._ledger["aa"], who, self._ledger["aa"] + speed * a * a + ratio * t * t)
        put(self._ledger["ab"], who, self._ledger["ab"] + speed * a * b - ratio * t * t / n)
        put(self._ledger["bb"], who, self._ledger["bb"] + speed * b * b + ratio * (t / n) ** 2)

    def _follow(self, who: Mask, n: Floats, t: Floats) -> Mask:
        """Make one step of the filter for workers measured before, or a jump where the time cannot be noise."""
        book = self._ledger
        a, b, noise = book["a"], book["b"], book["noise"]
        expected = np.where(who, a + b * n, t)
        learned = book["aa"] < (PRIOR_SPREAD * expected) ** 2
        self._loosen(who, n, expected, speed=WANDER**2, ratio=np.where(learned, REGROW**2, 0.0))
        ga, gb = book["aa"] + n * book["ab"], book["ab"] + n * book["bb"]
        doubt = np.maximum(ga + n * gb, 0.0)
        surprise, limit = np.log(t / expected), np.maximum(JUMP_LOG, JUMP_SIGMAS * np.sqrt(noise))
        beyond = (np.abs(surprise) > limit) | self._again(surprise)
        # What the open ratio a/b could explain is left to the filter, unless the last jump is being undone.
        unexplained = (np.abs(t - expected) > JUMP_SIGMAS * np.sqrt(doubt)) | (book["jumped"] * surprise < 0)
        # The first step may have been slowed by anything: the second time says how fast, not what part was fixed cost.
        second = book["measured"] == 1
        jump: Mask = who & (second | (beyond & unexplained))
        put(book["last"], who, np.where(jump, 0.0, surprise))
        put(book["jumped"], who, np.where(jump & beyond, np.sign(surprise), 0.0))
        scatter = noise * expected**2
        telling: Mask = np.abs(np.log(n / book["share"])) > TELLING_MOVE
        self._correct(who & ~jump & telling, n, t, t - expected, ga, gb, doubt + scatter)
        self._scale(who & ~jump & ~telling, doubt / (doubt + scatter) * (t / expected - 1), ga, gb, doubt + scatter)
        self._rescale(jump, n, t, t / expected)
        # Surprise that the belief's own doubt explains is not the worker's noise; a jump counts as far as the limit.
        seen = np.minimum(np.abs(surprise), limit) ** 2 * scatter / (doubt + scatter)
        rate = np.maximum(NOISE_RATE, 1 / (book["measured"] + 2))
        put(noise, who & ~second, np.maximum(noise + rate * (seen - noise), LEAST_NOISE**2))
        return jump

    def _again(self, surprise: Floats) -> Mask:
        """Return whether this surprise and the last one point the same way, both beyond what noise does."""
        last = self._ledger["last"]
        both = np.where(surprise * last > 0, np.minimum(np.abs(surprise), np.abs(last)), 0.0)
        return both > np.maximum(PAIR_LOG, PAIR_SIGMAS * np.sqrt(self._ledger["noise"]))

    def _correct(self, who: Mask, n: Floats, t: Floats, error: Floats, ga: Floats, gb: Floats, spread: Floats) -> None:
        """Correct the costs with gains ``ga / spread`` and ``gb / spread``, kept where costs make sense."""
        if not who.any():
            return
        book = self._ledger
        a, b = book["a"] + ga / spread * error, book["b"] + gb / spread * error
        expected = np.maximum(a + b * n, np.minimum(t, t - error) / 2)
        a = clipped(a, 0.0, np.where(book["noise"] > NOISY**2, NOISY_FIXED, MOST_FIXED) * expected)
        put(book["a"], who, a)
        put(book["b"], who, (expected - a) / n)
        aa, bb = (np.maximum(book[x + x] - g * g / spread, 0.0) for x, g in (("a", ga), ("b", gb)))
        put(book["aa"], who, aa)
        put(book["bb"], who, bb)
        most = np.sqrt(aa * bb)
        put(book["ab"], who, clipped(book["ab"] - ga * gb / spread, -most, most))

    def _scale(self, who: Mask, by: Floats, ga: Floats, gb: Floats, spread: Floats) -> None:
        """Correct the speed alone: a and b grow by the same part."""
        if not who.any():
            return
        book = self._ledger
        for name, gain, other in (("aa", ga, ga), ("ab", ga, gb), ("bb", gb, gb)):
            put(book[name], who, book[name] - gain * other / spread)
        for name in ("a", "b"):
            put(book[name], who, book[name] * (1 + by))

    def _rescale(self, who: Mask, n: Floats, t: Floats, ratio: Floats) -> None:
        """Follow a change of speed: scale a and b alike; the ratio keeps what was learned about it."""
        if not who.any():
            return
        for name in ("a", "b"):
            put(self._ledger[name], who, self._ledger[name] * ratio)
        for name in ("aa", "ab", "bb"):
            put(self._ledger[name], who, self._ledger[name] * ratio**2)
        self._loosen(who, n, t, speed=self._ledger["noise"], ratio=0.0)


def median(values: Floats) -> Floats:
    """Return the median over the last axis, as `numpy.median` does.

    That one's first call imports ``numpy.ma``, which takes longer than many a step: a newcomer, for whom all others
    wait, is mostly what a median is first needed for.

    >>> median(np.array([[4.0, 1.0, 2.0], [5.0, 3.0, 9.0]])).tolist(), float(median(np.array([4.0, 1.0])))
    ([2.0, 5.0], 2.5)
    """
    ordered, size = np.sort(values, axis=-1), values.shape[-1]
    return np.asarray((ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2)


def put(column: Floats, who: Mask, values: Floats | float) -> None:
    np.copyto(column, values, where=who)


def filled(values: Floats) -> Floats:
    """Return the values, the median of the others in gaps (0); 1 where there are no others."""
    known = values > 0
    return np.where(known, values, median(values[known]) if known.any() else 1.0)
