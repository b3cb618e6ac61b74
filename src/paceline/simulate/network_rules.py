"""When averaging pays: a round at every step against rounds now and then, on links of a given bandwidth and delay.

Every rule plays the same matrix of seconds (steps x workers, own compute for an equal share) and pays for its rounds:

    gradients        a round at every step, shares by speed (P1)
    average, k steps k local steps of the worker's share, then a round that waits for the slowest (P2)
    average, p s     local steps of an equal share for p seconds, then a round with little waiting (P2)
    elastic, tau     tau local steps, then every worker and the centre pull each other (P4): the same time and bytes

A round of n workers with a model of B bytes takes ``2 delay + 2 (n - 1) / n * B / bandwidth``
(`paceline.machines.link`), and every worker sends ``2 (n - 1) / n * B``. Averages first exchange a small table, from
which every worker computes the weights: two more crossings. After the last step the trace begins again, so that long
periods have enough rounds.

Convergence is not modelled: how many samples a rule needs for the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.machines.link import Link
from paceline.pace import WAITING, make
from paceline.pace.by_the_clock import steps_dealt, time_is_up
from paceline.simulate import play
from paceline.simulate.play import Floats, matrix


class RoundCosts(Protocol):
    """The figures of a network that a rule needs."""

    @property
    def workers(self) -> int: ...

    @property
    def sent_bytes(self) -> float: ...

    @property
    def average_s(self) -> float: ...


@dataclass(frozen=True)
class Network:
    """A fleet's links, and the bytes and seconds of its rounds."""

    link: Link
    workers: int
    model_bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that each worker sends, and receives, in a round: ``2 (n - 1) / n * B``."""
        return 2 * (self.workers - 1) / self.workers * self.model_bytes

    @property
    def gradients_s(self) -> float:
        """Seconds of a round of gradients: one sum."""
        return self.link.seconds(self.model_bytes, workers=self.workers)

    @property
    def average_s(self) -> float:
        """Seconds of a round of parameters: a table of facts, whose bytes are next to nothing, and then the sum."""
        return self.link.seconds(0, workers=self.workers) + self.gradients_s


@dataclass(frozen=True)
class Traffic:
    """Samples, seconds and bytes of a rule over its scored rounds."""

    name: str
    workers: int
    rounds: int
    samples: float
    seconds: float
    rounds_s: float
    """The part of ``seconds`` in which a round was under way."""
    waiting_s: float
    """Seconds that workers stood idle until a round began, summed over workers."""
    sent_bytes: float
    """Bytes that each worker sent, in all rounds."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def in_rounds(self) -> float:
        """Part of the time spent in rounds."""
        return self.rounds_s / self.seconds

    @property
    def waiting(self) -> float:
        """Part of all worker-seconds spent waiting for a round to begin."""
        return self.waiting_s / (self.workers * self.seconds)

    @property
    def bytes_per_sample(self) -> float:
        """Bytes that all workers together send per sample."""
        return self.workers * self.sent_bytes / self.samples

    @property
    def sent_per_s(self) -> float:
        """Bytes per second that each worker sends, on average over work and rounds."""
        return self.sent_bytes / self.seconds

    @property
    def round_every_s(self) -> float:
        """Seconds from one round to the next; infinite where there are none."""
        return self.seconds / self.rounds if self.rounds else math.inf


Ints = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Function called with the number of rules played so far and of all rules."""

EVERY_STEPS, TAUS = (1, 4, 16, 64), (1, 2, 4)
"""Local steps between rounds that are tried: for averages, and for elastic averages (P4)."""
PERIODS = (4, 16, 64)
"""Periods by the clock that are tried, in median times of an equal share."""
SHARE = 32
"""Default number of samples of an equal share."""
SETTLING = 3
"""First rounds of every rule that are not scored: speeds are not measured yet, and a long run pays for that once."""
ROUNDS = 4
"""Least number of rounds that are scored."""
MATTERS = 0.05
"""Part of the time in rounds up to which the network no longer matters."""


@dataclass(frozen=True)
class Enough:
    """The period from which on rounds take at most the fraction ``part`` of the time."""

    part: float
    every_steps: int
    period_s: float


def compare_network(
    seconds: ArrayLike,
    link: Link,
    *,
    model_bytes: int,
    share: int = SHARE,
    warm_up: int = 0,
    every_steps: Sequence[int] = EVERY_STEPS,
    periods_s: Sequence[float] | None = None,
    taus: Sequence[int] = TAUS,
    progress: Progress | None = None,
) -> list[Traffic]:
    """Play every rule; the first one is gradients at every step, the last one the limit (all work, no network).

    ``share`` is the number of samples of an equal share. The first ``warm_up`` steps are played, but not scored, and
    are left out when the trace repeats. Without ``periods_s`` the clock's periods follow from the trace
    (`usual_periods`).
    """
    own = matrix(seconds)
    network = _checked(own, link, model_bytes, share, warm_up)
    trace = LoopedTrace(own, warm_up)
    _whole("every_steps", every_steps)
    _whole("taus", taus)
    clock = usual_periods(own) if periods_s is None else tuple(periods_s)
    if not all(0 < period_s < math.inf for period_s in clock):
        raise ValueError(f"periods_s are {clock}: seconds between rounds, above 0")
    rules: list[Callable[[], Traffic]] = [
        lambda: by_steps("gradients", trace, 1, network, network.gradients_s, share),
        *(_steps_rule(f"average, {_steps(k)}", trace, k, network, share) for k in every_steps),
        *(_clock_rule(f"average, {p:g} s", trace, p, network, share) for p in clock),
        *(_steps_rule(f"elastic, tau {tau}", trace, tau, network, share) for tau in taus),
        lambda: no_network(trace, share),
    ]
    outcomes = []
    for number, rule in enumerate(rules, start=1):
        outcomes.append(rule())
        if progress is not None:
            progress(number, len(rules))
    return outcomes


def enough(
    seconds: ArrayLike, link: Link, *, model_bytes: int, warm_up: int = 0, part: float = MATTERS
) -> Enough | None:
    """Return the shortest period at which the network no longer matters; None if it never does, even at every step.

    Work of w seconds between rounds of r seconds leaves ``r / (r + w) <= part`` when ``w >= r (1 / part - 1)``. Work of
    a step takes at least ``n / sum_i (1 / x_i)``, when nobody waits, and that of k steps at least k times its mean.
    """
    own = matrix(seconds)[warm_up:]
    network = Network(link, own.shape[1], model_bytes)
    step_s, work = _busy_step_s(own), 1 / part - 1
    if work * network.gradients_s <= step_s:
        return None
    return Enough(part, math.ceil(work * network.average_s / step_s), work * network.average_s)


def usual_periods(seconds: Floats) -> tuple[float, ...]:
    """Return periods by the clock of about `PERIODS` local steps, as 1, 2 or 5 times a power of ten."""
    median = float(np.median(seconds))
    return tuple(dict.fromkeys(_round_number(steps * median) for steps in PERIODS))


@dataclass(frozen=True)
class LoopedTrace:
    """The matrix of seconds, repeated without end: after the last step it goes on from the first that is scored."""

    seconds: Floats
    warm_up: int = 0

    def rows(self, index: Ints) -> Ints:
        scored = len(self.seconds) - self.warm_up
        looped = self.warm_up + (index - self.warm_up) % scored
        return np.where(index < self.warm_up, index, looped)

    def periods(self, rounds: int, steps: int) -> Floats:
        """Return seconds for ``steps`` steps in a row, one row per round."""
        index = self.rows(np.arange(rounds * steps))
        return np.stack([self.seconds[part].sum(axis=0) for part in index.reshape(rounds, steps)])

    @property
    def scored(self) -> Floats:
        return self.seconds[self.warm_up :]


def by_steps(name: str, trace: LoopedTrace, every: int, network: RoundCosts, round_s: float, share: int) -> Traffic:
    """Play a round every ``every`` steps; shares are planned once per round, by the default pace of real runs."""
    settling = max(SETTLING, -(-trace.warm_up // every))
    rounds = max(ROUNDS, -(-len(trace.scored) // every))
    played = play.shares(trace.periods(settling + rounds, every), make(WAITING), overhead_s=round_s, share=share)
    scored = played.after(settling)
    return Traffic(
        name,
        network.workers,
        rounds if network.workers > 1 else 0,
        samples=float(scored.shares.sum()) * every * share,
        seconds=float(scored.seconds.sum()),
        rounds_s=rounds * round_s,
        waiting_s=float(scored.waiting_s.sum()),
        sent_bytes=rounds * network.sent_bytes,
    )


def by_clock(name: str, trace: LoopedTrace, period_s: float, network: RoundCosts, share: int) -> Traffic:
    """Play a round every ``period_s`` seconds; each worker advances in its own column by complete local steps."""
    step_s = _busy_step_s(trace.scored)
    settling = max(SETTLING, math.ceil(trace.warm_up * step_s / period_s))
    rounds = max(ROUNDS, math.ceil(len(trace.scored) * step_s / period_s))
    at, rates = np.zeros(network.workers, np.int64), np.zeros(network.workers)
    samples = work_s = waiting_s = 0.0
    for number in range(settling + rounds):
        steps, busy = _period(trace, at, steps_dealt(rates, 1, period_s), period_s)
        at, rates = at + steps, steps / busy
        if number >= settling:
            samples += float(steps.sum()) * share
            work_s += float(busy.max())
            waiting_s += float((busy.max() - busy).sum())
    rounds_s = rounds * network.average_s
    met = rounds if network.workers > 1 else 0
    sent = rounds * network.sent_bytes
    return Traffic(name, network.workers, met, samples, work_s + rounds_s, rounds_s, waiting_s, sent)


def _period(trace: LoopedTrace, at: Ints, dealt: Ints, period_s: float) -> tuple[Ints, Floats]:
    """Return the local steps of each worker in one period, and the seconds that they took.

    A worker stops when the period is over or when its dealt steps are done; it does at least one.
    """
    columns, working = np.arange(len(at)), np.ones(len(at), np.bool_)
    steps, busy = np.zeros(len(at), np.int64), np.zeros(len(at))
    while working.any():
        busy += np.where(working, trace.seconds[trace.rows(at + steps), columns], 0.0)
        steps += working
        working &= (steps < dealt) & ~time_is_up(busy, steps, period_s)
    return steps, busy


def no_network(trace: LoopedTrace, share: int) -> Traffic:
    """Return the limit, where everybody works all the time and rounds cost nothing."""
    played = play.limit(trace.scored)
    samples, seconds = float(played.shares.sum()) * share, float(played.seconds.sum())
    return Traffic("limit", played.workers, 0, samples, seconds, rounds_s=0.0, waiting_s=0.0, sent_bytes=0.0)


def _steps_rule(name: str, trace: LoopedTrace, every: int, network: Network, share: int) -> Callable[[], Traffic]:
    return lambda: by_steps(name, trace, every, network, network.average_s, share)


def _clock_rule(name: str, trace: LoopedTrace, period_s: float, network: Network, share: int) -> Callable[[], Traffic]:
    return lambda: by_clock(name, trace, period_s, network, share)


def _steps(many: int) -> str:
    return "1 step" if many == 1 else f"{many} steps"


def _busy_step_s(own: Floats) -> float:
    """Return a step's mean seconds when nobody waits: the mean of ``n / sum_i (1 / x_i)``."""
    return float((own.shape[1] / (1 / own).sum(axis=1)).mean())


def _round_number(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    nearest = min((1, 2, 5, 10), key=lambda digit: abs(math.log(value / (digit * power))))
    return float(f"{nearest * power:.0e}")


def _checked(own: Floats, link: Link, model_bytes: int, share: int, warm_up: int) -> Network:
    if model_bytes < 1:
        raise ValueError(f"the model has {model_bytes} bytes: give its size, at least 1")
    if share < 1:
        raise ValueError(f"an equal share of {share} samples: the global batch has at least one sample a worker")
    if not 0 <= warm_up < len(own):
        raise ValueError(f"a warm-up of {warm_up} steps leaves nothing to score of {len(own)}")
    network = Network(link, own.shape[1], model_bytes)
    if not math.isfinite(network.average_s):
        raise ValueError(f"a round would never end on {link.describe()}")
    return network


def _whole(name: str, values: Sequence[int]) -> None:
    if not all(isinstance(value, int) and value >= 1 for value in values):
        raise ValueError(f"{name} are {tuple(values)}: local steps between rounds, whole numbers from 1")
