"""The fleet that a plan is made for: its machines, their sites, the training, and the cost of reclaimed machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.simulate.goodput import reform_s
from paceline.simulate.play import Floats, all_busy_s
from paceline.simulate.sites import Sites

OPTIMISERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Numbers that each optimiser keeps per parameter."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class MachineKind:
    """A kind of machines that are alike, each with one worker."""

    name: str
    site: str
    count: int = 1
    speed: float = 1.0
    """Speed as a multiple of the reference machine's."""
    jitter: float = 0.05
    """Sigma of the lognormal noise from step to step."""
    stalls_per_hour: float = 0.0
    stall_s: float = 10.0
    """Seconds of each stall."""
    reclaimed_per_hour: float = 0.0
    away_s: float = 300.0
    """Seconds until a reclaimed machine is replaced."""
    cost_per_hour: float = 0.0
    memory_bytes: float | None = None

    @property
    def present(self) -> float:
        """Part of the time that a machine is present: ``1 / (1 + reclaims per second * away_s)``."""
        return 1 / (1 + self.reclaimed_per_hour / HOUR_S * self.away_s)


@dataclass(frozen=True)
class TrainedModel:
    """The training: the model, the global batch, and one sample's time on the reference machine."""

    model_bytes: int
    batch: int
    sample_s: float
    optimiser: str = "adam"
    samples: float | None = None
    """Samples of the complete training."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the parameters and the optimiser's state, which a newcomer takes over."""
        return self.model_bytes * (1 + OPTIMISERS[self.optimiser])

    @property
    def needed_bytes(self) -> int:
        """Bytes of parameters, gradients and the optimiser's state; activations come on top."""
        return self.model_bytes + self.state_bytes


@dataclass(frozen=True)
class FleetSpec:
    """A fleet and its training. Workers are in rank order: site by site, and kind by kind within a site."""

    kinds: tuple[MachineKind, ...]
    sites: Sites
    training: TrainedModel

    @property
    def workers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def order(self) -> tuple[str, ...]:
        """Each worker's site, in rank order."""
        return tuple(
            site for site in self.sites.cables for kind in self.kinds if kind.site == site for _ in range(kind.count)
        )

    @property
    def share(self) -> float:
        """Samples of an equal share."""
        return self.training.batch / self.workers

    def column(self, name: str) -> Floats:
        """Return one field of `MachineKind` per worker, in rank order."""
        each = [
            (getattr(kind, name), kind.count) for site in self.sites.cables for kind in self.kinds if kind.site == site
        ]
        return np.repeat([value for value, _ in each], [count for _, count in each]).astype(np.float64)

    def with_count(self, name: str, count: int) -> FleetSpec:
        """Return this fleet with another number of machines of one kind."""
        kinds = (replace(kind, count=count) if kind.name == name else kind for kind in self.kinds)
        return replace(self, kinds=tuple(kind for kind in kinds if kind.count))

    def play(self, steps: int, *, seed: int = 0) -> tuple[Floats, Floats]:
        """Draw every worker's seconds for an equal share in every step, and the seconds of stalls; one row per step.

        A stall hits a worker in a step with probability ``1 - exp(-rate * step)``, where ``step`` is the length of a
        step in which nobody waits.
        """
        draws, shape = np.random.default_rng(seed), (steps, self.workers)
        usual = self.share * self.training.sample_s / self.column("speed")
        jitter = self.column("jitter")
        own = usual * np.exp(jitter * draws.standard_normal(shape) - jitter**2 / 2)
        step_s = all_busy_s(usual[None, :], np.zeros((1, self.workers)))[0]
        hit = 1 - np.exp(-self.column("stalls_per_hour") / HOUR_S * step_s)
        return own, np.where(draws.random(shape) < hit, self.column("stall_s"), 0.0)


@dataclass(frozen=True)
class Churn:
    """The cost of machines that are reclaimed: they are absent for a while, and every change pauses the others.

    With a_i the part of the time that machine i is present and v_i its speed, ``sum a_i v_i / sum v_i`` of the fleet's
    speed is left. Every reclaim changes the members twice: when the machine goes, and when another takes its position,
    which needs the training's state. With c such changes per second of training and P seconds each, ``1 / (1 + c P)``
    of the time is training.
    """

    present: float
    """Part of the sum of speeds that is present."""
    changes_per_s: float
    """Members that go or come, per second."""
    going_s: float
    """The pause when a member goes."""
    coming_s: float
    """The pause when a member comes."""

    @property
    def paused(self) -> float:
        """Seconds of pause per second of training."""
        return self.changes_per_s / 2 * (self.going_s + self.coming_s)

    @property
    def left(self) -> float:
        """Part of the undisturbed fleet's samples per second that is left."""
        return self.present / (1 + self.paused)


def churn(fleet: FleetSpec) -> Churn:
    """Return the fleet's churn; newcomers take the state from a peer in their site, or else over the link."""
    speeds, present = fleet.column("speed"), fleet.column("present")
    reclaims = fleet.column("reclaimed_per_hour") * present / HOUR_S
    going_s = reform_s(fleet.workers)
    coming_s = going_s + 8 * fleet.training.state_bytes / _slowest_bits(fleet)
    return Churn(float((present * speeds).sum() / speeds.sum()), 2 * float(reclaims.sum()), going_s, coming_s)


def _slowest_bits(fleet: FleetSpec) -> float:
    """Return the bandwidth of the slowest path by which a newcomer's state may come."""
    inside: dict[str, int] = {}
    for kind in fleet.kinds:
        inside[kind.site] = inside.get(kind.site, 0) + kind.count
    found = []
    for site in {kind.site for kind in fleet.kinds if kind.reclaimed_per_hour}:
        found.append(fleet.sites.cables[site].bits_per_s)
        others = [other for other in inside if other != site]
        if inside[site] == 1 and others:
            found.append(max(_narrowest(fleet, other, site) for other in others))
    return min(found, default=float("inf"))


def _narrowest(fleet: FleetSpec, start: str, stop: str) -> float:
    return min(fleet.sites.link(hop).bits_per_s for hop in fleet.sites.route(start, stop))
