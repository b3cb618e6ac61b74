"""The ways to train on one fleet: every pace, combine, wire format and topology, played by the simulator's rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from paceline.pace import registered
from paceline.pace.pacer import Played, Simulated, played, rows
from paceline.simulate import play
from paceline.simulate.comparison import play_row
from paceline.simulate.network import LoopedTrace, by_clock, by_steps
from paceline.simulate.planning.fleet_spec import HOUR_S, Churn, FleetSpec, churn
from paceline.simulate.play import Outcome
from paceline.simulate.sites import SiteNetwork, Topology
from paceline.transport.formats import for_averages, for_gradients, planned

TOPOLOGIES: tuple[Topology, ...] = ("ring", "two levels")
PERIOD_S = 2.0
"""Seconds between rounds of ``combine="average"`` by default."""
IN_ROUNDS = (0.2, 0.05)
"""Parts of the time that float32 rounds take in the longer periods that are tried."""
WARM_UP = 20
"""First steps that are played and not scored."""
LEAST_STEPS, MOST_STEPS, WORK = 40, 200, 400_000
"""Bounds of the number of steps that are played, and the product of steps and workers between them."""

MANY = 500
"""Workers above which a cut-off is played once, with the first round's cost, for all rounds: each takes long."""


@dataclass(frozen=True)
class Choice:
    """One way to train on the fleet, and its simulated figures."""

    pace: str
    combine: str
    comm_dtype: str
    topology: Topology
    samples_per_s: float
    limit_per_s: float
    """Samples per second of the machines that are present, when nobody waits and rounds cost nothing."""
    round_s: float
    in_rounds: float
    """Part of the training time in rounds."""
    period_s: float | None = None
    """Seconds between rounds; for averages only."""
    found: bool = True
    """Whether a run would choose this topology: users cannot choose it."""

    @property
    def over_limit(self) -> float:
        return self.samples_per_s / self.limit_per_s

    @property
    def name(self) -> str:
        """The name of its row: the pace, or the average and its period."""
        every = "" if self.period_s is None else f", {self.period_s:g} s"
        return self.pace or f"{self.combine}{every}"

    def hours(self, samples: float) -> float:
        """Return the hours that ``samples`` samples take."""
        return samples / self.samples_per_s / HOUR_S


def steps_for(workers: int) -> int:
    """Return the number of steps to play: fewer, the larger the fleet."""
    return max(LEAST_STEPS, min(MOST_STEPS, WORK // workers))


class Player:
    """The player of one fleet; outcomes that do not depend on the round's cost are played once."""

    def __init__(self, fleet: FleetSpec, *, steps: int | None = None, seed: int = 0) -> None:
        self.fleet, self._seed = fleet, seed
        many = steps_for(fleet.workers) if steps is None else steps
        self._own, self._stalls = fleet.play(many + WARM_UP, seed=seed)
        self.churn: Churn = churn(fleet)
        self.found: Topology = fleet.sites.found(fleet.order)
        self._share = max(1, round(fleet.share))
        limit = play.limit(self._own, cost_s=self._stalls).after(WARM_UP)
        self.limit_per_s = limit.throughput * fleet.share * self.churn.present
        self._once: dict[str, tuple[float, Outcome]] = {}

    def network(self, wire: str, topology: Topology) -> SiteNetwork:
        return SiteNetwork(self.fleet.sites, self.fleet.order, self.fleet.training.model_bytes, wire, topology)

    def gradients(self, pace: str, wire: str, topology: Topology) -> Choice:
        """Play a round at every step."""
        round_s = self.network(wire, topology).gradients_s if self.fleet.workers > 1 else 0.0
        outcome = self._outcome(pace, round_s)
        step_s = float(outcome.seconds.mean())
        return self._choice(pace, "gradients", wire, topology, outcome.throughput * self.fleet.share, round_s, step_s)

    def average(self, period_s: float, wire: str, topology: Topology) -> Choice:
        """Play local steps of an equal share for ``period_s`` seconds, then a round; a stall lengthens its step."""
        network = self.network(wire, topology)
        trace = LoopedTrace(self._own + self._stalls, WARM_UP)
        traffic = by_clock("", trace, period_s, network, self._share)
        each = traffic.samples_per_s * self.fleet.share / self._share
        every_s = traffic.seconds / max(1, traffic.rounds)
        return self._choice("", "average", wire, topology, each, network.average_s, every_s, period_s)

    def elastic_average(self, wire: str, topology: Topology) -> Choice:
        """Play a round after every local step, with the time and bytes of an average."""
        network = self.network(wire, topology)
        trace = LoopedTrace(self._own + self._stalls, WARM_UP)
        traffic = by_steps("", trace, 1, network, network.average_s, self._share)
        each = traffic.samples_per_s * self.fleet.share / self._share
        every_s = traffic.seconds / max(1, traffic.rounds)
        return self._choice("", "elastic-average", wire, topology, each, network.average_s, every_s)

    def _choice(
        self,
        pace: str,
        combine: str,
        wire: str,
        topology: Topology,
        samples_per_s: float,
        round_s: float,
        step_s: float,
        period_s: float | None = None,
    ) -> Choice:
        left = samples_per_s * self.churn.left
        found = topology == self.found
        return Choice(pace, combine, wire, topology, left, self.limit_per_s, round_s, round_s / step_s, period_s, found)

    def _outcome(self, pace: str, round_s: float) -> Outcome:
        """Play a pace; one that waits for every share is played once, since its round only comes on top.

        Cut-offs and deadlines depend on the round's cost.
        """
        how, row = pace_row(pace, self._seed)
        once = how == "shares" or (how == "arrivals" and self.fleet.workers > MANY)
        if not once:
            return self._play(how, row, round_s)
        if pace not in self._once:
            self._once[pace] = round_s, self._play(how, row, round_s)
        before_s, outcome = self._once[pace]
        return outcome.with_round(round_s - before_s)

    def _play(self, how: Played, row: Simulated, round_s: float) -> Outcome:
        settings: dict[str, Any] = {"overhead_s": round_s, "cost_s": self._stalls, "seed": self._seed}
        return play_row(how, row, self._own, **settings, share=self._share).after(WARM_UP)

    def again(self, choice: Choice) -> Choice:
        """Play the same choice on this fleet."""
        if choice.combine == "gradients":
            return self.gradients(choice.pace, choice.comm_dtype, choice.topology)
        if choice.period_s is None:
            return self.elastic_average(choice.comm_dtype, choice.topology)
        return self.average(choice.period_s, choice.comm_dtype, choice.topology)

    def periods_s(self) -> tuple[float, ...]:
        """Return the default period, and longer ones with one digit: ``r (1 / part - 1)`` for rounds of r seconds."""
        round_s = self.network("float32", self.found).average_s
        longer = [_one_digit(round_s * (1 / part - 1)) for part in IN_ROUNDS]
        return tuple(dict.fromkeys(max(PERIOD_S, period_s) for period_s in (PERIOD_S, *longer)))


def _one_digit(value: float) -> float:
    """Round up to one significant digit.

    >>> _one_digit(34.2), _one_digit(0.0123)
    (40.0, 0.02)
    """
    power = math.floor(math.log10(value))
    return float(f"{math.ceil(value / 10.0**power)}e{power}")


def pace_row(pace: str, seed: int) -> tuple[Played, Simulated]:
    """Return how a pace is played, and a new pacer."""
    kind = registered()[pace]
    return played(kind), next(row for row in rows(kind, seed=seed) if row.as_chosen)


def paces() -> list[str]:
    """Return every pace that can be chosen by its name alone."""
    return [name for name, kind in registered().items() if any(row.as_chosen for row in rows(kind))]


Tick = Callable[[int, int], None]


def choices(player: Player, *, tick: Tick | None = None) -> list[Choice]:
    """Play all choices: a round at every step with each pace, and averages; on one fast site, in one topology."""
    asked = list(_asked(player))
    found = []
    for number, ask in enumerate(asked, start=1):
        found.append(ask())
        if tick is not None:
            tick(number, len(asked))
    return found


def _asked(player: Player) -> Iterator[Callable[[], Choice]]:
    shapes = TOPOLOGIES if player.found != "ring" else TOPOLOGIES[:1]
    for pace, wire, shape in product(paces(), planned(for_gradients()), shapes):
        yield partial(player.gradients, pace, wire, shape)
    if player.fleet.workers < 2:
        return
    for period_s, wire, shape in product(player.periods_s(), planned(for_averages()), shapes):
        yield partial(player.average, period_s, wire, shape)
    for shape in shapes:
        yield partial(player.elastic_average, "float32", shape)
