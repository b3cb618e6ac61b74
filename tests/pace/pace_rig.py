"""A fleet without processes for the pacers' tests: machines with known costs, and the run's one step of lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.pace import Ask, Pacer
from paceline.pace.shares import fill
from paceline.records import Plan, StepRecord

Floats = NDArray[np.float64]
Machines = Callable[[int], tuple[Floats, Floats]]
"""step -> (fixed seconds, seconds a sample) of each worker."""


def expected_count(deadline_s: float, per_sample_s: Floats, shares: Floats, *, at_work: Floats | float = 1.0) -> float:
    """Samples finished by the deadline, on average over the draws (one per row)."""
    return float((at_work * np.minimum(shares, deadline_s / per_sample_s).mean(axis=0)).sum())


def machines(fixed_s: Sequence[float], per_sample_s: Sequence[float]) -> Machines:
    return lambda step: (np.array(fixed_s, dtype=float), np.array(per_sample_s, dtype=float))


def slower(times: Sequence[float], *, sample_s: float = 1e-3) -> Machines:
    """Emulated machines as in ``--emulate 1,1,2,4``: no fixed cost, so many times slower than the reference."""
    return machines([0.0] * len(times), [sample_s * t for t in times])


def record(
    step: int,
    samples: Sequence[int],
    seconds: Sequence[float],
    *,
    workers: Sequence[int] | None = None,
    epoch: int = 0,
    sizes: Sequence[int] = (),
) -> StepRecord:
    workers = range(len(samples)) if workers is None else workers
    return StepRecord(
        step=step,
        epoch=epoch,
        generation=0,
        workers=tuple(workers),
        planned=tuple(samples),
        samples=tuple(samples),
        seconds=tuple(float(s) for s in seconds),
        micro_size=tuple(sizes),
    )


def best_s(fixed_s: Floats, per_sample_s: Floats, total: int) -> float:
    """The shortest step these machines can do."""
    return float(_own_s(fixed_s, per_sample_s, fill(fixed_s, per_sample_s, total)).max())


def _own_s(fixed_s: Floats, per_sample_s: Floats, samples: NDArray[np.int64]) -> Floats:
    return np.where(samples > 0, fixed_s + per_sample_s * samples, 0.0)


@dataclass
class Played:
    plans: list[Plan]
    wall_s: Floats
    best_s: Floats
    """The same steps, with the same noise, under the shares of somebody who knows the machines."""

    @property
    def of_limit(self) -> Floats:
        return self.best_s / self.wall_s

    @property
    def shares(self) -> NDArray[np.int64]:
        return np.array([plan.samples for plan in self.plans])


def play(
    pacer: Pacer,
    fleet: Machines,
    *,
    total: int,
    steps: int,
    noise: float = 0.0,
    seed: int = 0,
    first: int = 0,
    epoch_of: Callable[[int], int] = lambda step: 0,
    workers: Sequence[int] | None = None,
    unit: int = 1,
) -> Played:
    """Run the pacer as a fleet does: the plan for step k+1 is made while k computes, from the records up to k-1."""
    rng = np.random.default_rng(seed)
    members = tuple(range(len(fleet(0)[0])) if workers is None else workers)

    def ask(step: int) -> Plan:
        return pacer.plan(Ask(step=step, total=total, workers=members, epoch=epoch_of(step), unit=unit))

    plans, walls, bests, plan = [], [], [], ask(first)
    for step in range(first, first + steps):
        fixed_s, per_sample_s = fleet(step)
        jitter = rng.lognormal(0.0, noise, len(members))
        seconds = _own_s(fixed_s, per_sample_s, np.array(plan.samples)) * jitter
        known = _own_s(fixed_s, per_sample_s, fill(fixed_s, per_sample_s, total, unit=unit)) * jitter
        plans.append(plan)
        walls.append(seconds.max())
        bests.append(known.max())
        following = ask(step + 1)
        pacer.observe(record(step, plan.samples, seconds, workers=members, epoch=epoch_of(step)))
        plan = following
    return Played(plans, np.array(walls), np.array(bests))
