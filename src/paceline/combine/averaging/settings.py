"""The settings of the two averages: `Averaging` (P2) and `ElasticAverage` (P4).

They are plain frozen dataclasses. What can be judged by itself is checked when they are made, what depends on the
fleet in ``check(workers)``.

>>> Averaging(period_s=2).weights
'samples'
>>> ElasticAverage(tau=4).alpha_for(8)
0.1125
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.combine.averaging import elastic_weights as elastic
from paceline.combine.averaging.elastic_weights import Exchange, Memory, Reading
from paceline.combine.averaging.outer import Outer
from paceline.combine.averaging.weights import RULES, LocalWork, Mixture

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PERIOD_S = 2.0
"""Seconds between rounds when nothing is said."""
MOMENTUM = ("keep", "fade", "reset")
EXCHANGES = ("round", "arrival")


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Local steps, and now and then a round that averages the workers' updates since the last one.

    >>> Averaging(every_steps=16, weights="wp", outer=Outer()).every_steps
    16
    """

    every: Literal["end"] | None = None
    """``"end"``: parameters are averaged once, when all epochs of the loop are over. Rounds then only count and deal
    samples, ``every_steps`` or ``period_s`` apart. None: every round averages."""
    every_steps: int | None = None
    """Local steps between rounds: everybody does as many, and the fast wait for the slow."""
    period_s: float | None = None
    """Seconds between rounds: a fast worker does more local steps, and nobody waits. 2 when neither is given."""
    weights: str = "samples"
    """``wp`` (P2, reconstructed), ``uniform``, ``samples``, ``normalised`` (FedNova), ``mse``: averaging/weights.py."""
    weight_decay: float | None = None
    """lambda for ``wp`` and ``mse``, where it is part of the loss (SGD alone); None: the optimiser's own."""
    outer: Outer | None = None
    """An optimiser on the averaged update; None: the average itself."""
    groups: Sequence[Sequence[int]] | None = None
    """Ranks in groups, as ``[[0, 1], [2, 3]]``: gradients are combined at every step inside a group, updates are
    averaged between groups (P2's first combined form). None: everybody by itself."""
    overlap: bool = False
    """Local work goes on while a round is under way; its update lands between two local steps, once it is over."""

    name: ClassVar[str] = "average"
    """As in ``combine=`` and the log."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.period_s is not None:
            raise ValueError("every_steps and period_s exclude each other: rounds come by steps or by the clock")
        if self.every_steps is None and self.period_s is None:
            object.__setattr__(self, "period_s", PERIOD_S)
        _whole("every_steps", self.every_steps, "local steps between rounds")
        if self.period_s is not None and not 0 < self.period_s < math.inf:
            raise ValueError(f"period_s is {self.period_s}: seconds between rounds, above 0")
        if self.every not in (None, "end"):
            raise ValueError(
                f'every is {self.every!r}: "end" averages once, when the loop is over; for rounds on the way give '
                "every_steps (local steps) or period_s (seconds)"
            )
        _one_of("weights", self.weights, tuple(RULES))
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"weight_decay is {self.weight_decay}: a finite number from 0, or None for the optimiser's"
            )
        if self.outer is not None and not isinstance(self.outer, Outer):
            raise ValueError(f"outer is {self.outer!r}: give paceline.Outer(lr=0.7, momentum=0.9) or None")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is {self.overlap!r}: True lets local work go on during rounds, False does not")
        if self.once and self.overlap:
            raise ValueError('every="end" averages when no local work is left, so nothing overlaps: leave overlap out')
        if self.groups is not None:
            object.__setattr__(self, "groups", _groups(self.groups))

    @property
    def once(self) -> bool:
        """Whether parameters are averaged only when the loop is over."""
        return self.every == "end"

    def check(self, workers: int) -> None:
        """Raise ValueError when the groups do not fit so many workers."""
        if self.groups is None:
            return
        ranks = sorted(rank for group in self.groups for rank in group)
        if ranks != list(range(workers)):
            raise ValueError(
                f"groups {list(map(list, self.groups))} must hold each rank from 0 to {workers - 1} exactly once"
            )

    def check_elastic(self) -> None:
        """Raise ValueError for what cannot be had where workers come and go."""
        parts = {"groups": self.groups is not None, "overlap": self.overlap, "every": self.once}
        asked = [name for name, on in parts.items() if on]
        if asked:
            raise ValueError(
                f"Averaging({asked[0]}=...) needs a fleet of fixed size, and workers come and go in this one: leave "
                f"{' and '.join(asked)} out, or start it with paceline run -n WORKERS"
            )

    def mix(self, work: LocalWork) -> Mixture:
        """The round's weights from what each worker (or group) did."""
        return RULES[self.weights](work)


@dataclass(frozen=True, kw_only=True)
class ElasticAverage:
    """Every worker is tied to a replicated centre by a spring, and pulled at every ``tau`` local steps.

    EASGD or EAMSGD is a matter of the local optimiser: SGD without momentum, or with Nesterov's.
    """

    tau: int = 1
    """Local steps between exchanges."""
    exchange: Literal["round", "arrival"] = "round"
    """When a worker meets the centre: in a ``round`` of all workers, for which the fast wait; or upon its ``arrival``,
    when its own tau steps are done: nobody waits, and the centre meets the workers one by one."""
    alpha: float | None = None
    """Strength of an ordinary exchange; None: 0.9 / workers."""
    weights: str = "dynamic"
    """``fixed`` (EASGD), ``dynamic`` (P4), ``missed``, ``clipped`` or ``known``; averaging/elastic_weights.py."""
    momentum: Literal["keep", "fade", "reset"] = "fade"
    """A worker's optimiser momentum after an exchange: kept as it is; faded by how much harder than usual it was
    pulled (gone after a full pull); or reset after any harder pull. Second moments are always kept."""
    reading: Reading = "growth"
    """Of ``dynamic``: whose score counts, a worker that drifted away or one that is being pulled back."""
    thresholds: tuple[float, float] = elastic.THRESHOLDS
    """Of ``dynamic``: scores at which the weights start to change and have changed fully. A low of 0 is one reading of
    P4; it stalls early training, in which every distance grows."""
    coefficients: tuple[float, ...] = elastic.COEFFICIENTS
    """Of ``dynamic``: weights of the last changes of log-distance, the newest first and heaviest."""
    warm_up: int = elastic.WARM_UP
    """Of ``dynamic``: a worker's first exchanges are ordinary ones."""
    power: float = 1.0
    """Of ``missed``: how fast a worker that missed rounds loses its say."""
    radius: float | None = None
    """Of ``clipped``: the farthest a worker may stand from the centre and count in full; None: twice the median."""
    overlap: float = 0.0
    """P4's r: this part of the data is dealt to every worker, the rest to one each."""

    name: ClassVar[str] = "elastic-average"
    """As in ``combine=`` and the log."""

    def __post_init__(self) -> None:
        _whole("tau", self.tau, "local steps between exchanges")
        _one_of("exchange", self.exchange, EXCHANGES)
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}: above 0, at most 1, and at most 2 / (1 + workers) to be stable")
        _one_of("weights", self.weights, elastic.RULES)
        _one_of("momentum", self.momentum, MOMENTUM)
        _one_of("reading", self.reading, elastic.READINGS)
        self._check_dynamic()
        if not 0 < self.power < math.inf:
            raise ValueError(f"power is {self.power}: above 0; 1 gives a worker that missed one round half its say")
        if self.radius is not None and not 0 < self.radius < math.inf:
            raise ValueError(f"radius is {self.radius}: a distance in parameter space, above 0, or None")
        if self.exchange == "arrival" and self.weights == "clipped" and self.radius is None:
            raise ValueError("exchange='arrival' shows one distance at a time, which has no median: give radius=")
        if not 0 <= self.overlap < 1:
            raise ValueError(
                f"overlap is {self.overlap}: the part of the data that all workers share, from 0 to below 1"
            )

    def _check_dynamic(self) -> None:
        if len(self.thresholds) != 2 or not 0 <= self.thresholds[0] < self.thresholds[1] < math.inf:
            raise ValueError(f"thresholds are {self.thresholds}: two scores, 0 <= low < high, such as (0.3, 0.8)")
        falling = all(newer >= older for newer, older in zip(self.coefficients, self.coefficients[1:]))
        if not self.coefficients or not falling or not 0 < self.coefficients[-1] <= self.coefficients[0] < math.inf:
            raise ValueError(f"coefficients are {self.coefficients}: numbers above 0, the newest first and heaviest")
        if not isinstance(self.warm_up, int) or self.warm_up < 0:
            raise ValueError(f"warm_up is {self.warm_up}: a whole number of exchanges from 0")

    def alpha_for(self, workers: int) -> float:
        """Strength of an ordinary exchange among so many workers."""
        return 0.9 / workers if self.alpha is None else self.alpha

    def check(self, workers: int, *, step_curvature: float = 0.0) -> None:
        """Raise ValueError, with the bound, when alpha is not stable for so many workers.

        ``step_curvature`` is the learning rate times the loss's largest curvature, where the user knows it.
        """
        elastic.check_alpha(self.alpha_for(workers), workers, step_curvature=step_curvature)

    def check_elastic(self) -> None:
        """Raise ValueError for what cannot be had where workers come and go."""
        if self.exchange == "arrival":
            raise ValueError(
                "ElasticAverage(exchange='arrival') needs a fleet of fixed size, and workers come and go in this one: "
                "leave exchange out, or start it with paceline run -n WORKERS"
            )
        if self.overlap:
            raise ValueError(
                "ElasticAverage(overlap=...) divides the data among a fixed number of workers, and they come and go "
                "in this fleet: leave overlap out, or start it with paceline run -n WORKERS"
            )

    def settling_alpha(self, workers: int) -> float:
        """`alpha_for` or, once more workers have come than it is stable for, the usual 0.9 / workers.

        >>> ElasticAverage(alpha=0.4).settling_alpha(4), ElasticAverage(alpha=0.4).settling_alpha(9)
        (0.4, 0.1)
        """
        alpha = self.alpha_for(workers)
        return alpha if alpha <= elastic.largest_alpha(workers) else 0.9 / workers

    def memory(self, workers: int) -> Memory:
        """What the rule remembers of so many workers, nothing yet."""
        return Memory(workers, lags=len(self.coefficients))

    def weigh(
        self, memory: Memory, distances: ArrayLike, present: ArrayLike, expected: ArrayLike | None = None
    ) -> Exchange:
        """One round: note the distances in ``memory`` and say how hard to pull and push. Absent workers get zeros.
        ``expected``: whose turn it was; everybody's when left out."""
        there = np.asarray(present, dtype=bool)
        alpha = self.settling_alpha(len(there))
        before = memory.arrive(distances, there, expected)
        exchange = self._rule(alpha, memory, np.asarray(distances, dtype=np.float64), there, before)
        return Exchange(np.where(there, exchange.pull, 0.0), np.where(there, exchange.push, 0.0))

    def _rule(self, alpha: float, memory: Memory, distances: Floats, there: Bools, before: Floats) -> Exchange:
        if self.weights == "known":
            return elastic.known(alpha, before > 0)
        if self.weights == "missed":
            return elastic.missed(alpha, before, power=self.power)
        if self.weights == "clipped" and there.any():
            radius = elastic.clip_radius(distances[there]) if self.radius is None else self.radius
            return elastic.clipped(alpha, distances, radius=radius)
        if self.weights == "dynamic":
            score = elastic.score(memory.log_distances, coefficients=self.coefficients)
            score = np.where(memory.exchanges > self.warm_up, score, 0.0)
            return elastic.dynamic(alpha, score, thresholds=self.thresholds, reading=self.reading)
        return elastic.fixed(alpha, len(there))

    def momentum_kept(self, pull: ArrayLike, workers: int) -> Floats:
        """The part of its momentum each worker keeps after an exchange with these pulls."""
        fade = elastic.momentum_kept(self.settling_alpha(workers), pull)
        if self.momentum == "fade":
            return fade
        return np.ones_like(fade) if self.momentum == "keep" else (fade >= 1).astype(np.float64)


def exchanges_by_arrival(settings: Averaging | ElasticAverage, workers: int) -> bool:
    """Whether so many workers meet the centre one by one; one alone has nobody to wait for."""
    return isinstance(settings, ElasticAverage) and settings.exchange == "arrival" and workers > 1


def _whole(name: str, value: int | None, what: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} is {value!r}: {what}, a whole number from 1")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def _groups(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        tuples = tuple(tuple(int(rank) for rank in group) for group in groups)
    except TypeError:
        raise ValueError(f"groups is {groups!r}: lists of ranks, such as [[0, 1], [2, 3]]") from None
    if not tuples or not all(tuples):
        raise ValueError(f"groups is {groups!r}: at least one group, and none of them empty")
    return tuples
