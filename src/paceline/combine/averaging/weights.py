"""How much each worker's update counts when workers did unequal local work (P2 and its relatives).

All workers start a round at the same parameters x and come back with updates ``D_i = x_i - x``. Every rule here is a
pure function from a few facts of each worker to a `Mixture`, and the round then is

    x <- x + scale * sum_i weights_i * D_i        with weights >= 0 that sum to 1.

``scale`` is 1 for all rules but `normalised`. Who did no local step brings nothing and has weight 0 under every rule;
when nobody did, the weights are equal and the update is zero anyway.

>>> work = LocalWork(steps=[10, 10, 5], samples=[160, 160, 80], log_contraction=[-1.0, -1.0, -0.5])
>>> wp(work).weights.round(3).tolist()
[0.384, 0.384, 0.233]
>>> samples(work).weights.tolist()
[0.4, 0.4, 0.2]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FASTEST = 3
"""Workers from which `spread` estimates: those that did the most steps."""
NEGLIGIBLE = 1e-12
"""A raw weight of `mse` this small is rounding."""


class LocalWork:
    """What each worker did since the common start; arrays in rank order (with groups: in the groups' order).

    ``steps`` are local optimiser steps and ``samples`` the samples in them (left out: in proportion to the steps).
    ``log_contraction`` is ``sum_t log rho_t`` over the worker's own steps (`log_contraction` gives one of them for SGD;
    left out: 0, no weight decay). ``momentum`` is the local SGD's m. ``distance`` and ``noise`` are D2 and s2 for
    `mse`, as `spread` estimates them; NaN when not known.
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
        self.momentum, self.distance, self.noise = momentum, distance, noise

    @property
    def worked(self) -> NDArray[np.bool_]:
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
        return self.scale * self.weights


def log_contraction(
    learning_rate: float,
    weight_decay: float,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> float:
    """``log rho`` of one local step of SGD on the quadratic ``lambda/2 w^2``: what is left of the distance, a step.

    rho is the dominant root, in size, of the update's characteristic polynomial. With ``a = eta lambda (1 -
    dampening)`` and ``z = 1 - d`` it is ``d^2 - (1 - m + a) d + a = 0``, with Nesterov ``d^2 - (1 - m + a + m a) d + a
    = 0``. Without momentum rho is ``1 - eta lambda`` (as we read P2); with momentum m and a small a about
    ``1 - a / (1 - m)``; where the roots are complex (plain momentum: a above ``(1 - sqrt(m))^2``) it is ``sqrt(m)``.

    >>> round(log_contraction(0.1, 1.0), 4)
    -0.1054
    >>> [round(log_contraction(0.1, 5e-3, momentum=m), 4) for m in (0.0, 0.9)]
    [-0.0005, -0.0053]
    """
    product = learning_rate * weight_decay
    if not (math.isfinite(product) and learning_rate >= 0 and weight_decay >= 0):
        raise ValueError(f"learning rate {learning_rate:g} and weight decay {weight_decay:g} must be finite, 0 or more")
    if not (0 <= momentum < 1 and 0 <= dampening <= 1):
        raise ValueError(f"momentum lies from 0 to below 1, dampening from 0 to 1, not at {momentum:g}, {dampening:g}")
    a = product * (1 - dampening) if momentum else product  # without momentum torch does not dampen
    middle = 1 - momentum + a + (momentum * a if nesterov else 0.0)
    inside = middle**2 - 4 * a
    if inside < 0:
        return math.log(momentum * (1 - a if nesterov else 1)) / 2
    near = 2 * a / (middle + math.sqrt(inside))
    far = (middle + math.sqrt(inside)) / 2
    if near >= 1 or far - 1 > 1 - near:
        raise ValueError(
            f"learning rate {learning_rate:g} times weight decay {weight_decay:g} is {product:g}: a step goes beyond "
            "the optimum (without momentum rho = 1 - eta*lambda must be above 0); lower one of them or choose other "
            "weights"
        )
    return math.log1p(-near)


def uniform(work: LocalWork) -> Mixture:
    """Everybody alike: SimuParallel SGD, P2's baseline."""
    return _mixture(work, np.ones_like(work.steps))


def samples(work: LocalWork) -> Mixture:
    """In proportion to the samples done: ``a_i ~ n_i``."""
    return _mixture(work, work.samples)


def wp(work: LocalWork) -> Mixture:
    """P2, reconstructed: ``a_i ~ rho^(T_max - T_i)``; with a schedule, the product of rho_t over the steps missing.

    Written as ``beta_max / beta_i``, so that each worker's own product is all it has to send. At lambda = 0, or when
    all did the same work, it is `uniform`.
    """
    behind = work.log_contraction - work.log_contraction[work.worked].min(initial=0.0)
    return _mixture(work, np.exp(-np.maximum(behind, 0.0)))


def normalised(work: LocalWork) -> Mixture:
    """FedNova: updates per unit of local work, ``x <- x + tau_eff * sum_i p_i D_i / |a_i|``, ``p_i ~ samples``.

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
    """FedNova's ``|a|``: tau for plain SGD, ``(tau - m (1 - m^tau) / (1 - m)) / (1 - m)`` for momentum m.

    It is the sum of the weights with which the round's gradients enter the update when momentum starts at zero.
    """
    if momentum == 0:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def mse(work: LocalWork) -> Mixture:
    """Ours: the weights of least expected squared error on a quadratic, ``D2 (sum a_i beta_i)^2 + s2 sum a_i^2``.

    ``a_i ~ max(0, 1 - kappa beta_i)`` with ``kappa = D2 sum(beta) / (s2 + D2 sum(beta^2))`` over those with a weight
    above 0: a worker whose bias outweighs what it does for the noise is left out. Without noise or bias
    (`spread` had nothing to go by) it is `samples`.
    """
    known = 0 <= work.distance < math.inf and 0 <= work.noise < math.inf and work.distance + work.noise > 0
    if not known:
        return samples(work)
    kept = work.worked.copy()
    while kept.any():
        raw = np.where(kept, 1 - _kappa(work, kept) * work.contraction, 0.0)
        dropped = kept & (raw <= NEGLIGIBLE)
        if not dropped.any():
            return _mixture(work, raw)
        if (dropped == kept).all():  # no noise and one bias: nothing tells them apart
            break
        kept &= ~dropped
    return _mixture(work, kept.astype(np.float64))


def _kappa(work: LocalWork, kept: NDArray[np.bool_]) -> float:
    beta = work.contraction[kept]
    whole = work.noise + work.distance * float(beta @ beta)
    return work.distance * float(beta.sum()) / whole if whole > 0 else 0.0


def spread(updates: ArrayLike, work: LocalWork, *, fastest: int = FASTEST) -> tuple[float, float]:
    """D2 and s2 for `mse`, from the updates (workers x parameters, or any linear sketch of them) of the fastest.

    s2 is the variance between them and ``D2 = (|mean update|^2 - s2 / n) / (1 - beta)^2``: what noise adds to the mean
    of n is taken off, or short rounds would look like a long way to go. NaN where there is too little to go by: a
    single worker, or no contraction (lambda = 0).
    """
    rows = np.asarray(updates, dtype=np.float64)
    order = np.argsort(-work.steps, kind="stable")[:fastest]
    order = order[work.steps[order] > 0]
    left = 1 - work.contraction[order].mean() if len(order) else 0.0
    if len(order) < 2 or left <= 0:
        return math.nan, math.nan
    mean = rows[order].mean(axis=0)
    noise = float(((rows[order] - mean) ** 2).sum() / (len(order) - 1))
    return max(0.0, float(mean @ mean) - noise / len(order)) / left**2, noise


RULES: dict[str, Callable[[LocalWork], Mixture]] = {
    "wp": wp,
    "uniform": uniform,
    "samples": samples,
    "normalised": normalised,
    "mse": mse,
}
BY_CONTRACTION = frozenset({"wp", "mse"})
"""Rules that ask how much each worker's steps contract."""
BY_SKETCH = frozenset({"mse"})
"""Rules that ask for a sketch of each worker's update."""


def over_members(mixture: Mixture, groups: Sequence[Sequence[int]]) -> Mixture:
    """Weights of groups as weights of workers: the members of a group hold the same update and share its weight.

    >>> over_members(Mixture(np.array([0.6, 0.4])), [(0, 2), (1,)]).weights.tolist()
    [0.3, 0.4, 0.3]
    """
    weights = np.zeros(sum(len(group) for group in groups))
    for weight, group in zip(mixture.weights, groups, strict=True):
        weights[list(group)] = weight / len(group)
    return Mixture(weights, mixture.scale)


def _mixture(work: LocalWork, raw: Floats) -> Mixture:
    raw = np.where(work.worked, raw, 0.0)
    total = raw.sum()
    return Mixture(raw / total if total > 0 else np.full(len(raw), 1 / len(raw)))


def _facts(name: str, values: ArrayLike, *, sign: int = 1) -> Floats:
    facts = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if facts.ndim != 1 or not np.isfinite(facts).all() or (sign * facts < 0).any():
        side = "0 or more" if sign > 0 else "0 or less"
        raise ValueError(f"{name} must be one finite number for each worker, {side}, not {values!r}")
    return facts
