"""Elastic averages (EASGD, and P4's dynamic weights): every worker is tied to a replicated centre by a spring.

>>> ElasticAverage(tau=4).alpha_for(8)
0.1125
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from paceline.averaging.merge import (
    DISTANCE,
    FACTS,
    MERGES,
    PRESENT,
    Merge,
    MergeSettings,
    Table,
    Turns,
    check_choice,
    check_count,
    copies,
)
from paceline.research import elastic_weights as elastic
from paceline.research.elastic_weights import Exchange, Memory, Reading
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.averaging.periods import Periods
    from paceline.step.context import LoopContext

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOMENTUM = ("keep", "fade", "reset")
EXCHANGES = ("round", "arrival")
TURN = len(FACTS)
"""A column that follows where workers meet the centre one by one: whose turn it is."""


@dataclass(frozen=True, kw_only=True)
class ElasticAverage(MergeSettings):
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
    """``fixed`` (EASGD), ``dynamic`` (P4), ``missed``, ``clipped`` or ``known``; research/elastic_weights.py."""
    momentum: Literal["keep", "fade", "reset"] = "fade"
    """A worker's optimiser momentum after an exchange: kept as it is; faded by how much harder than usual it was
    pulled (gone after a full pull); or reset after any harder pull. Second moments are always kept."""
    reading: Reading = "growth"
    """For ``dynamic``: whose score counts, a worker that drifted away or one that is being pulled back."""
    thresholds: tuple[float, float] = elastic.THRESHOLDS
    """For ``dynamic``: scores at which the weights start to change and have changed fully. A low of 0 is one reading of
    P4; it stalls early training, in which every distance grows."""
    coefficients: tuple[float, ...] = elastic.COEFFICIENTS
    """For ``dynamic``: weights of the last changes of log-distance, the newest first and heaviest."""
    warm_up: int = elastic.WARM_UP
    """For ``dynamic``: a worker's first exchanges are ordinary ones."""
    power: float = 1.0
    """For ``missed``: how fast a worker that missed rounds loses its say."""
    radius: float | None = None
    """For ``clipped``: the farthest a worker may stand from the centre and count in full; None: twice the median."""
    overlap: float = 0.0
    """P4's r: this part of the data is dealt to every worker, the rest to one each."""

    name: ClassVar[str] = "elastic-average"
    """Name in ``combine=`` and the log."""

    def __post_init__(self) -> None:
        check_count("tau", self.tau, "local steps between exchanges")
        check_choice("exchange", self.exchange, EXCHANGES)
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}: above 0, at most 1, and at most 2 / (1 + workers) to be stable")
        check_choice("weights", self.weights, elastic.RULES)
        check_choice("momentum", self.momentum, MOMENTUM)
        check_choice("reading", self.reading, elastic.READINGS)
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

    @property
    def steps_per_round(self) -> int:
        """Local steps between exchanges."""
        return self.tau

    @property
    def shared_part(self) -> float:
        """The part of the data that is dealt to every worker."""
        return self.overlap

    def by_arrival(self, workers: int) -> bool:
        """Return whether the workers meet the centre one by one; one alone has nobody to wait for."""
        return self.exchange == "arrival" and workers > 1

    def alpha_for(self, workers: int) -> float:
        """Return the strength of an ordinary exchange among this number of workers."""
        return 0.9 / workers if self.alpha is None else self.alpha

    def check(self, workers: int, *, step_curvature: float = 0.0) -> None:
        """Raise ValueError, with the bound, when alpha is not stable for this number of workers.

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

    def check_wire(self, wire: str, *, coarse: bool) -> None:
        """Raise ValueError: what workers send may not be rounded."""
        raise ValueError(
            f"comm_dtype {wire!r} rounds what workers send, and in combine 'elastic-average' the centre must move by "
            "just what the workers do: leave comm_dtype out, or use combine 'average'"
        )

    def settling_alpha(self, workers: int) -> float:
        """Return `alpha_for` or, once more workers have come than it is stable for, the usual 0.9 / workers.

        >>> ElasticAverage(alpha=0.4).settling_alpha(4), ElasticAverage(alpha=0.4).settling_alpha(9)
        (0.4, 0.1)
        """
        alpha = self.alpha_for(workers)
        return alpha if alpha <= elastic.largest_alpha(workers) else 0.9 / workers

    def memory(self, workers: int) -> Memory:
        """Return the rule's memory of this number of workers, empty yet."""
        return Memory(workers, lags=len(self.coefficients))

    def weigh(
        self, memory: Memory, distances: ArrayLike, present: ArrayLike, expected: ArrayLike | None = None
    ) -> Exchange:
        """Note a round's distances in ``memory``, and return how hard to pull and push; absent workers get zeros.

        ``expected``: whose turn it was; everybody's when left out.
        """
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
        """Return the part of its momentum that each worker keeps after an exchange with these pulls."""
        fade = elastic.momentum_kept(self.settling_alpha(workers), pull)
        if self.momentum == "fade":
            return fade
        return np.ones_like(fade) if self.momentum == "keep" else (fade >= 1).astype(np.float64)

    def merge(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> Springs:
        """Return the springs of these parameters, at their start."""
        return Springs(self, parameters, transport)


class Springs(Merge):
    """Every worker tied to a replicated centre (EASGD), with the weights of `paceline.research.elastic_weights`."""

    def __init__(
        self, settings: ElasticAverage, parameters: Sequence[torch.nn.Parameter], transport: Transport
    ) -> None:
        self._settings, self._memory = settings, settings.memory(transport.size)
        super().__init__(parameters, transport)

    def rebase(self) -> None:
        self.centre = copies(self._parameters)

    def distance(self) -> float:
        """Return how far this worker is from the centre as it is now."""
        return math.sqrt(sum(float(norm) ** 2 for norm in torch._foreach_norm(self._apart())))

    @torch.no_grad()
    def part(self, table: Table, update: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the way from the centre, as hard as this worker pushes."""
        push = float(self._weigh(deepcopy(self._memory), table).push[self._transport.rank])
        return list(torch._foreach_mul(self._apart(), push))

    @torch.no_grad()
    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        rank, pull = self._transport.rank, self._weigh(self._memory, table).pull
        if pull[rank]:  # a worker that is absent may be training
            torch._foreach_add_([p.data for p in self._parameters], self._apart(), alpha=-float(pull[rank]))
        torch._foreach_add_(self.centre, list(total))
        self.rounds += 1
        self._fade(optimizers, float(self._settings.momentum_kept(pull, len(table))[rank]))

    def _apart(self) -> list[torch.Tensor]:
        return list(torch._foreach_sub([p.detach() for p in self._parameters], self.centre))

    def _weigh(self, memory: Memory, table: Table) -> Exchange:
        turn = table[:, TURN] > 0 if table.shape[1] > TURN else None
        return self._settings.weigh(memory, table[:, DISTANCE], table[:, PRESENT] > 0, turn)

    def turns(self, periods: Periods, loop: LoopContext, *, first: int) -> Turns:
        from paceline.research.by_arrival import ArrivalTurns  # which exchanges with these springs

        return ArrivalTurns(self, periods, loop, first=first)

    def members_changed(self, old_ranks: Sequence[int | None]) -> str | None:
        self._memory.members_changed(old_ranks)
        size, settings = self._transport.size, self._settings
        stable = settings.settling_alpha(size)
        if stable == settings.alpha_for(size):
            return None
        return f"alpha {settings.alpha} is not stable among {size} workers: it is {stable:.3g}"

    def _fade(self, optimizers: Sequence[torch.optim.Optimizer], kept: float) -> None:
        """Weaken the momentum: after a hard pull it points where the worker no longer is."""
        if kept == 1.0:
            return
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for name in ("momentum_buffer", "exp_avg"):
                    if isinstance(state.get(name), torch.Tensor):
                        state[name].mul_(kept)

    @contextmanager
    def shown(self) -> Iterator[None]:
        own = copies(self._parameters)
        torch._foreach_copy_([p.data for p in self._parameters], self.centre)
        try:
            yield
        finally:
            torch._foreach_copy_([p.data for p in self._parameters], own)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memory": self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the parameters are the centre's, from which every worker starts."""
        super().load_state_dict(state)
        if len(state["memory"]["missed"]) == self._transport.size:
            self._memory.load_state_dict(state["memory"])


MERGES.add(ElasticAverage.name, ElasticAverage)
