"""How much each worker's update counts when workers did unequal local work.

All workers start a round at the same parameters x and come back with updates ``D_i = x_i - x``. Every rule is a pure
function from a few facts of each worker to a `Mixture`, and the round then is

    x <- x + scale * sum_i weights_i * D_i        with weights >= 0 that sum to 1.

``scale`` is 1 for all rules but `normalised`. Who did no local step brings nothing and has weight 0 under every rule;
when nobody did, the weights are equal and the update is zero anyway. P2's rules (``wp``, ``mse``) are plug-ins
(`paceline.research.wp_weights`).

>>> work = LocalWork(steps=[10, 10, 5], samples=[160, 160, 80])
>>> samples(work).weights.tolist()
[0.4, 0.4, 0.2]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.pace.plug_ins import Registry

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]


class LocalWork:
    """What each worker did since the common start; arrays in rank order (with groups: in the groups' order).

    ``steps`` are local optimiser steps and ``samples`` the samples in them (left out: in proportion to the steps).
    ``log_contraction`` is ``sum_t log rho_t`` over the worker's own steps (left out: 0, no weight decay). ``momentum``
    is the local SGD's m. ``distance`` and ``noise`` are D2 and s2 for the rule ``mse``; NaN when not known.
    ``sketches`` are the updates in a few numbers each, from which that rule estimates them; None where the rule asks
    for none.
    """

    def __init__(
        self,
        *,
        steps: ArrayLike,
        samples: ArrayLike | None = None,
        log_contraction: ArrayLike | None = None,
        momentum: float = 0.0,
        distance: float = math.nan,
        noise: float = math.nan,
        sketches: Floats | None = None,
    ) -> None:
        self.steps = _facts("steps", steps)
        self.samples = self.steps if samples is None else _facts("samples", samples)
        zero = np.zeros_like(self.steps)
        self.log_contraction = zero if log_contraction is None else _facts("log_contraction", log_contraction, sign=-1)
        sizes = {len(self.steps), len(self.samples), len(self.log_contraction)}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"facts of {sorted(sizes)} workers: give the same number of each, at least one")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum lies from 0 to below 1, not at {momentum:g}")
        self.momentum, self.distance, self.noise, self.sketches = momentum, distance, noise, sketches

    @property
    def worked(self) -> NDArray[np.bool_]:
        """Mask of those that made local steps."""
        return self.steps > 0

    @property
    def contraction(self) -> Floats:
        """``beta_i = prod_t rho_t``: what is left of the distance worker i had to go."""
        return np.exp(self.log_contraction)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The round's coefficients: worker i's update enters with ``scale * weights[i]``."""

    weights: Floats
    scale: float = 1.0

    @property
    def coefficients(self) -> Floats:
        """Factor of each worker's update."""
        return self.scale * self.weights


def uniform(work: LocalWork) -> Mixture:
    """Weigh everybody alike: SimuParallel SGD, P2's baseline."""
    return in_proportion(work, np.ones_like(work.steps))


def samples(work: LocalWork) -> Mixture:
    """Weigh in proportion to the samples done: ``a_i ~ n_i``."""
    return in_proportion(work, work.samples)


def normalised(work: LocalWork) -> Mixture:
    """Weigh updates per unit of local work (FedNova): ``x <- x + tau_eff * sum_i p_i D_i / |a_i|``, ``p_i ~ samples``.

    ``|a|`` (`local_work`) is what one worker's steps add up to, ``tau_eff = sum_i p_i |a_i|``. The coefficients need
    not sum to 1, so the mixture has a scale.
    """
    work_done = np.where(work.worked, local_work(work.steps, work.momentum), 1.0)
    shares = samples(work).weights
    per_unit = np.where(work.worked, shares / work_done, 0.0)
    if not per_unit.any():
        return uniform(work)
    return Mixture(per_unit / per_unit.sum(), float(np.sum(shares * work_done) * per_unit.sum()))


def local_work(steps: Floats, momentum: float = 0.0) -> Floats:
    """Return FedNova's ``|a|``: tau for plain SGD, ``(tau - m (1 - m^tau) / (1 - m)) / (1 - m)`` for momentum m.

    It is the sum of the weights with which the round's gradients enter the update when momentum starts at zero.
    """
    if momentum == 0:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True)
class Rule:
    """A way to weigh updates, and what it needs to know besides steps and samples."""

    weigh: Callable[[LocalWork], Mixture]
    contraction: Callable[[Sequence[torch.optim.Optimizer], float | None], float] | None = None
    """Computes ``log rho`` of one local step of these optimisers; the second argument is the weight decay that is part
    of the loss. None: the rule does not ask by how much steps contract."""
    sketch: Callable[[Iterable[torch.Tensor], int], Floats] | None = None
    """Computes a sketch of an update with this seed, ``sketch_size`` numbers. None: the rule needs none."""
    sketch_size: int = 0


RULES: Registry[Rule] = Registry()
"""All rules by name."""


def rule_of(name: str) -> Rule:
    """Return the rule of this name, which is known."""
    rule = RULES.get(name)
    assert rule is not None, name
    return rule


def over_members(mixture: Mixture, groups: Sequence[Sequence[int]]) -> Mixture:
    """Turn weights of groups into weights of workers: the members of a group hold the same update and share its weight.

    >>> over_members(Mixture(np.array([0.6, 0.4])), [(0, 2), (1,)]).weights.tolist()
    [0.3, 0.4, 0.3]
    """
    weights = np.zeros(sum(len(group) for group in groups))
    for weight, group in zip(mixture.weights, groups, strict=True):
        weights[list(group)] = weight / len(group)
    return Mixture(weights, mixture.scale)


def in_proportion(work: LocalWork, raw: Floats) -> Mixture:
    """Return these raw weights over their sum; 0 for who did nothing, equal ones where nobody did anything."""
    raw = np.where(work.worked, raw, 0.0)
    total = raw.sum()
    return Mixture(raw / total if total > 0 else np.full(len(raw), 1 / len(raw)))


def _facts(name: str, values: ArrayLike, *, sign: int = 1) -> Floats:
    facts = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if facts.ndim != 1 or not np.isfinite(facts).all() or (sign * facts < 0).any():
        side = "0 or more" if sign > 0 else "0 or less"
        raise ValueError(f"{name} must be one finite number for each worker, {side}, not {values!r}")
    return facts


RULES.plug_in("wp", "paceline.research.wp_weights")
RULES.add("uniform", Rule(uniform))
RULES.add("samples", Rule(samples))
RULES.add("normalised", Rule(normalised))
RULES.plug_in("mse", "paceline.research.wp_weights")
