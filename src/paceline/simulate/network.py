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
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.machines.link import Link
from paceline.observe.words.numbers import duration, number, percent, percent_cell
from paceline.pace import WAITING, make
from paceline.pace.shares import steps_dealt, time_is_up
from paceline.simulate import play
from paceline.simulate.comparison import document, empty_table, plotly
from paceline.simulate.play import Floats, matrix

if TYPE_CHECKING:
    from rich.table import Table


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
    for rule in rules:
        outcomes.append(rule())
        if progress is not None:
            progress(len(outcomes), len(rules))
    return outcomes


def enough(seconds: ArrayLike, link: Link, *, model_bytes: int, warm_up: int = 0) -> Enough | None:
    """Return the shortest period at which the network no longer matters; None if it never does, even at every step.

    Work of w seconds between rounds of r seconds leaves ``r / (r + w) <= p`` when ``w >= r (1 / p - 1)``; p is
    `MATTERS`. Work of a step takes at least ``n / sum_i (1 / x_i)``, when nobody waits, and that of k steps at least k
    times its mean.
    """
    own = matrix(seconds)[warm_up:]
    network = Network(link, own.shape[1], model_bytes)
    step_s, work = _busy_step_s(own), 1 / MATTERS - 1
    if work * network.gradients_s <= step_s:
        return None
    return Enough(MATTERS, math.ceil(work * network.average_s / step_s), work * network.average_s)


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
    for at_round in range(settling + rounds):
        steps, busy = _period(trace, at, steps_dealt(rates, 1, period_s), period_s)
        at, rates = at + steps, steps / busy
        if at_round >= settling:
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


FLOAT = 4
"""Bytes of a parameter, as of its gradient."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

NOT_MODELLED = (
    "Not modelled: convergence. With more local steps between rounds the same loss may need more samples, or another "
    "learning rate. Nor do rounds overlap with backward here."
)


def model_bytes(parameters: str | None, megabytes: float | None, *, needed_by: str = "--network") -> int:
    """Return the bytes of a round: four per parameter (such as ``25M``), or the given megabytes (of 1,000,000).

    >>> model_bytes("25M", None), model_bytes(None, 0.5)
    (100000000, 500000)
    """
    if (parameters is None) == (megabytes is None):
        raise ValueError(f"{needed_by} needs the model's size: --parameters 25M or --megabytes 100, one of them")
    if megabytes is not None:
        if not (math.isfinite(megabytes) and round(megabytes * 1e6) >= 1):
            raise ValueError(f"--megabytes is the model's size, above 0, not {megabytes:g}")
        return round(megabytes * 1e6)
    assert parameters is not None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([kmgb]?)\s*", parameters.lower(), re.ASCII)
    many = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if many < 1:
        raise ValueError(f"--parameters is a count such as 25M, 350k or 7B, above 0, not {parameters!r}")
    return FLOAT * many


def figures(outcomes: Sequence[Traffic]) -> list[dict[str, Any]]:
    """Return one dictionary per rule; the first outcome is gradients at every step, the last the limit."""
    gradients, limit = outcomes[0].samples_per_s, outcomes[-1].samples_per_s
    return [
        {
            "rule": outcome.name,
            "samples_per_s": outcome.samples_per_s,
            "over_gradients": outcome.samples_per_s / gradients,
            "over_limit": outcome.samples_per_s / limit,
            "in_rounds": outcome.in_rounds,
            "waiting": outcome.waiting,
            "round_every_s": outcome.round_every_s if outcome.rounds else None,
            "bytes_per_sample": outcome.bytes_per_sample,
            "sent_bytes_per_worker_s": outcome.sent_per_s,
            "rounds": outcome.rounds,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            "sent_bytes_per_worker": outcome.sent_bytes,
        }
        for outcome in outcomes
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures as a table for a terminal. Needs rich."""
    each, scale = _unit(max(row["bytes_per_sample"] for row in rows))
    sent, sent_scale = _unit(max(row["sent_bytes_per_worker_s"] for row in rows))
    traffic = (f"{each} per\nsample", f"{sent}/s per\nworker")
    drawn = empty_table(["rule"], ["samples/s", "gain", "in\nrounds", "waiting", "round\nevery, s", *traffic])
    for row in rows:
        drawn.add_row(
            row["rule"],
            number(row["samples_per_s"]),
            f"{row['over_gradients']:.2f}",
            percent_cell(row["in_rounds"]),
            percent_cell(row["waiting"]),
            "-" if row["round_every_s"] is None else number(row["round_every_s"]),
            number(row["bytes_per_sample"] / scale),
            number(row["sent_bytes_per_worker_s"] / sent_scale),
        )
    return drawn


def verdict(outcomes: Sequence[Traffic], network: Network, period: Enough | None) -> list[str]:
    """Return what the figures mean, in sentences."""
    if network.workers < 2:
        return ["One worker has no rounds: the network does not matter."]
    gradients = outcomes[0]
    work_s = (gradients.seconds - gradients.rounds_s) / gradients.rounds
    sentences = [
        f"On {network.link.describe()} a round of {size(network.model_bytes)} takes {seconds(network.gradients_s)}, a "
        f"step's work {seconds(work_s)}: with gradients at every step {percent(gradients.in_rounds)} of the time goes "
        "into rounds."
    ]
    if period is None:
        return [*sentences, _does_not_matter(outcomes)]
    sentences.append(
        f"From a round every {period.every_steps:,} {'step' if period.every_steps == 1 else 'steps'} or "
        f"{seconds(period.period_s)} on, rounds take at most {percent(period.part)} of the time: from there on the "
        "network no longer matters."
    )
    return [*sentences, _pays(outcomes)]


def _pays(outcomes: Sequence[Traffic]) -> str:
    name, gain = _best(outcomes)
    if gain <= 1:
        return "No period tried does more samples per second than gradients at every step."
    return (
        f'"{name}" does {number(gain)} times the samples per second of gradients at every step: it pays unless it '
        f"needs more than {number(gain)} times the samples for the same loss."
    )


def _does_not_matter(outcomes: Sequence[Traffic]) -> str:
    advice = "The network does not matter here: take gradients at every step, which are exact."
    name, gain = _best(outcomes)
    if gain <= 1 + MATTERS:
        return advice
    return (
        f'{advice} What "{name}" gains, {number(gain)} times the samples per second, is less waiting: see what a '
        "deadline makes of that (joint, without --network)."
    )


def _best(outcomes: Sequence[Traffic]) -> tuple[str, float]:
    """Return the average with the most samples per second, and its gain over gradients at every step."""
    best = max(outcomes[1:-1], key=lambda outcome: outcome.samples_per_s)
    return best.name, best.samples_per_s / outcomes[0].samples_per_s


def page(title: str, outcomes: Sequence[Traffic], sentences: Sequence[str]) -> str:
    """Return one self-contained page of HTML: the sentences, where the time goes, and bytes per sample."""
    return document(title, [_times(outcomes), _bytes(outcomes)], words=sentences)


def _times(outcomes: Sequence[Traffic]) -> Any:
    """Draw the fleet's milliseconds per sample: working, waiting and in rounds."""
    names, each = [o.name for o in outcomes], [1000 / o.samples_per_s for o in outcomes]
    parts = {
        "working": [ms * (1 - o.in_rounds - o.waiting) for ms, o in zip(each, outcomes)],
        "waiting": [ms * o.waiting for ms, o in zip(each, outcomes)],
        "in rounds": [ms * o.in_rounds for ms, o in zip(each, outcomes)],
    }
    figure = plotly("plotly.graph_objects").Figure()
    for part, values in parts.items():
        figure.add_bar(x=values, y=names, name=part, orientation="h")
    return _laid_out(figure, "Where the time goes", "milliseconds per sample", len(names))


def _bytes(outcomes: Sequence[Traffic]) -> Any:
    sending = [o for o in outcomes if o.sent_bytes]
    bars = {"x": [o.bytes_per_sample for o in sending], "y": [o.name for o in sending]}
    figure = plotly("plotly.graph_objects").Figure().add_bar(**bars, orientation="h")
    return _laid_out(figure, "Bytes sent for a sample", "bytes, all workers", len(sending)).update_xaxes(type="log")


def _laid_out(figure: Any, title: str, unit: str, rows: int) -> Any:
    return figure.update_layout(
        title=title, barmode="stack", xaxis_title=unit, yaxis={"autorange": "reversed"}, height=160 + 28 * rows
    )


def size(many: float) -> str:
    """Return bytes with a unit, in powers of 1,000.

    >>> size(100e6), size(1536), size(0)
    ('100 MB', '1.54 kB', '0 B')
    """
    name, unit = _unit(many)
    return f"{number(many / unit)} {name}"


def _unit(many: float) -> tuple[str, float]:
    return next(((name, unit) for unit, name in SIZES if many >= 0.9995 * unit), ("B", 1.0))


def seconds(value: float) -> str:
    """Return a duration in words, with a fraction below ten seconds, which `duration` would round away.

    >>> seconds(1.28), seconds(0.034), seconds(125)
    ('1.28 s', '34 ms', '2 min 05 s')
    """
    return f"{value:.3g} s" if 0.9995 <= value < 9.995 else duration(value)
