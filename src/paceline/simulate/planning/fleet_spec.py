"""What a plan is made for: machines, the sites they are in, and the training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.simulate.outcome import Floats
from paceline.simulate.play import all_busy_s
from paceline.simulate.sites import Sites

FLOAT = 4
"""Bytes of a parameter."""
OPTIMISERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Numbers that each keeps for every parameter."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class MachineKind:
    """Machines that are alike, each with one worker."""

    name: str
    site: str
    count: int = 1
    speed: float = 1.0
    """Times the reference machine's."""
    jitter: float = 0.05
    """Sigma of the lognormal noise from step to step."""
    stalls_per_hour: float = 0.0
    stall_s: float = 10.0
    """How long each stall lasts."""
    reclaimed_per_hour: float = 0.0
    away_s: float = 300.0
    """Seconds until another is there in its place."""
    cost_per_hour: float = 0.0
    memory_bytes: float | None = None

    @property
    def present(self) -> float:
        """Part of the time that it is there: ``1 / (1 + reclaims a second * away_s)``."""
        return 1 / (1 + self.reclaimed_per_hour / HOUR_S * self.away_s)


@dataclass(frozen=True)
class TrainedModel:
    """What is trained: the model, the global batch, and one sample's time on the reference machine."""

    model_bytes: int
    batch: int
    sample_s: float
    optimiser: str = "adam"
    samples: float | None = None
    """So many are to be done in all."""

    @property
    def state_bytes(self) -> int:
        """Parameters and the optimiser's state: what a newcomer takes over."""
        return self.model_bytes * (1 + OPTIMISERS[self.optimiser])

    @property
    def needed_bytes(self) -> int:
        """Parameters, gradients and the optimiser's state; activations come on top."""
        return self.model_bytes + self.state_bytes


@dataclass(frozen=True)
class FleetSpec:
    """All of it. Workers are in rank order: kind by kind, site by site."""

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
        """A figure of every worker, in rank order."""
        each = [
            (getattr(kind, name), kind.count) for site in self.sites.cables for kind in self.kinds if kind.site == site
        ]
        return np.repeat([value for value, _ in each], [count for _, count in each]).astype(np.float64)

    def with_count(self, name: str, count: int) -> FleetSpec:
        """The same with another number of machines of a kind."""
        kinds = (replace(kind, count=count) if kind.name == name else kind for kind in self.kinds)
        return replace(self, kinds=tuple(kind for kind in kinds if kind.count))

    def play(self, steps: int, *, seed: int = 0) -> tuple[Floats, Floats]:
        """Seconds of every worker for an equal share in every step, and the stalls that hit it, a row a step.

        A stall hits a worker in a step with ``1 - exp(-rate * step)``, the step as long as when nobody waits.
        """
        draws, shape = np.random.default_rng(seed), (steps, self.workers)
        usual = self.share * self.training.sample_s / self.column("speed")
        jitter = self.column("jitter")
        own = usual * np.exp(jitter * draws.standard_normal(shape) - jitter**2 / 2)
        step_s = all_busy_s(usual[None, :], np.zeros((1, self.workers)))[0]
        hit = 1 - np.exp(-self.column("stalls_per_hour") / HOUR_S * step_s)
        return own, np.where(draws.random(shape) < hit, self.column("stall_s"), 0.0)
