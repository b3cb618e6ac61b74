"""P2's weights (WP-SGD): a worker's update counts by how much its steps contract the distance to the optimum.

rho is by how much one step of the optimiser at hand contracts through weight decay. SGD adds the decay to the gradient,
so its momentum carries it: the dominant root, `log_contraction`. Where the decay is decoupled (AdamW, AdaHessian, Muon,
Adafactor), a step multiplies the parameters by exactly ``1 - eta lambda`` before it does anything else. Where it is
part of a gradient that is then normalised (Adam, RMSprop, Adagrad), the contraction depends on the gradients and is not
known: those are refused.

>>> work = LocalWork(steps=[10, 10, 5], samples=[160, 160, 80], log_contraction=[-1.0, -1.0, -0.5])
>>> wp(work).weights.round(3).tolist()
[0.384, 0.384, 0.233]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from paceline.averaging.weights import RULES, Floats, LocalWork, Mixture, Rule, in_proportion, samples

DECOUPLED = (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor)
"""Optimisers whose weight decay never goes through the gradient."""
FASTEST = 3
"""Workers from which `spread` estimates: those that did the most steps."""
NEGLIGIBLE = 1e-12
"""A raw weight of `mse` this small is rounding."""
SIZE = 64
"""Numbers of a sketch."""


def wp(work: LocalWork) -> Mixture:
    """Weigh by P2's rule, reconstructed: ``a_i ~ rho^(T_max - T_i)``.

    With a schedule it is the product of rho_t over the steps missing. Written as ``beta_max / beta_i``, so that each
    worker's own product is all it has to send. At lambda = 0, or when all did the same work, it is `uniform`.
    """
    behind = work.log_contraction - work.log_contraction[work.worked].min(initial=0.0)
    return in_proportion(work, np.exp(-np.maximum(behind, 0.0)))


def mse(work: LocalWork) -> Mixture:
    """Weigh by the least expected squared error on a quadratic, ``D2 (sum a_i beta_i)^2 + s2 sum a_i^2``; ours.

    ``a_i ~ max(0, 1 - kappa beta_i)`` with ``kappa = D2 sum(beta) / (s2 + D2 sum(beta^2))`` over those with a weight
    above 0: a worker whose bias outweighs what it does for the noise is left out. Without noise or bias
    (`spread` had nothing to go by) it is `samples`.
    """
    distance, noise = (work.distance, work.noise) if work.sketches is None else spread(work.sketches, work)
    known = 0 <= distance < math.inf and 0 <= noise < math.inf and distance + noise > 0
    if not known:
        return samples(work)
    kept = work.worked.copy()
    while kept.any():
        raw = np.where(kept, 1 - _kappa(work.contraction[kept], distance, noise) * work.contraction, 0.0)
        dropped = kept & (raw <= NEGLIGIBLE)
        if not dropped.any():
            return in_proportion(work, raw)
        if (dropped == kept).all():  # no noise and one bias: nothing tells them apart
            break
        kept &= ~dropped
    return in_proportion(work, kept.astype(np.float64))


def _kappa(beta: Floats, distance: float, noise: float) -> float:
    below = noise + distance * float(beta @ beta)
    return distance * float(beta.sum()) / below if below > 0 else 0.0


def spread(updates: ArrayLike, work: LocalWork) -> tuple[float, float]:
    """Estimate D2 and s2 for `mse` from the updates of the fastest: workers x parameters, or a linear sketch of them.

    s2 is the variance between them and ``D2 = (|mean update|^2 - s2 / n) / (1 - beta)^2``: what noise adds to the mean
    of n is taken off, or short rounds would look like a long way to go. NaN where there is too little to go by: a
    single worker, or no contraction (lambda = 0).
    """
    rows = np.asarray(updates, dtype=np.float64)
    order = np.argsort(-work.steps, kind="stable")[:FASTEST]
    order = order[work.steps[order] > 0]
    left = 1 - work.contraction[order].mean() if len(order) else 0.0
    if len(order) < 2 or left <= 0:
        return math.nan, math.nan
    mean = rows[order].mean(axis=0)
    noise = float(((rows[order] - mean) ** 2).sum() / (len(order) - 1))
    return max(0.0, float(mean @ mean) - noise / len(order)) / left**2, noise


def sketch(tensors: Iterable[torch.Tensor], seed: int) -> Floats:
    """Return the update in ``tensors`` (in the same order on every worker) as `SIZE` numbers, by a common seed.

    ``s = sum_i r_i x_i`` over pieces x_i of the update, each `SIZE` long, with one random sign r_i per piece. It is
    linear, and inner products survive in expectation: ``E <s, s'> = <x, x'>``, within about ``sqrt(2 / SIZE)`` of
    ``|x| |x'|``. That is enough for `spread`, which needs a mean and a variance, and saves a second full round.
    """
    generator = torch.Generator().manual_seed(seed)
    total = np.zeros(SIZE)
    for tensor in tensors:
        total += _pieces(tensor.detach().flatten(), generator)
    return total


def _pieces(flat: torch.Tensor, generator: torch.Generator) -> Floats:
    count = -(-flat.numel() // SIZE)
    padded = torch.nn.functional.pad(flat, (0, count * SIZE - flat.numel())).view(count, SIZE)
    signs = (2 * torch.randint(0, 2, (count,), generator=generator) - 1).to(flat)
    found: Floats = (signs @ padded).double().cpu().numpy()
    return found


def contraction_of(optimizers: Sequence[torch.optim.Optimizer], weight_decay: float | None) -> float:
    """Return ``log rho`` of one step of these optimisers at their present rates: the mean over all parameters.

    Each parameter group has its own rate, decay and momentum, and counts by the number of its parameters: those without
    decay do not contract. ``weight_decay``: lambda of every parameter, where it is part of the loss; None: the groups'
    own. Raise ValueError where it cannot be known.
    """
    if not optimizers:
        raise ValueError(
            "weights by contraction (wp, mse) need to know the optimiser: give it to step.commit(optimizer), or name "
            "it by fleet.track(optimizer=optimizer)"
        )
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    sizes = [_size(group) for _, group in groups]
    logs = [_of_group(optimizer, group, weight_decay) for optimizer, group in groups]
    return sum(log * size for log, size in zip(logs, sizes, strict=True)) / max(1, sum(sizes))


def _size(group: Mapping[str, Any]) -> int:
    return sum(parameter.numel() for parameter in group["params"] if parameter.requires_grad)


def _of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight_decay: float | None) -> float:
    decay = group.get("weight_decay") if weight_decay is None else weight_decay
    if decay == 0:
        return 0.0
    if decay is not None and isinstance(optimizer, torch.optim.SGD):
        return log_contraction(
            float(group["lr"]),
            float(decay),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
    if decay is not None and weight_decay is None and _decoupled(optimizer, group):
        return log_contraction(float(group["lr"]), float(decay))
    raise ValueError(" ".join(_unknown(type(optimizer).__name__, decay, weight_decay)))


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether decay multiplies the parameters by ``1 - eta lambda`` (names of torch and pytorch_optimizer)."""
    by_name = group.get("decoupled_weight_decay") or (group.get("weight_decouple") and not group.get("fixed_decay"))
    return bool(by_name) or isinstance(optimizer, DECOUPLED)


def _unknown(kind: str, decay: float | None, weight_decay: float | None) -> Iterator[str]:
    if decay is None:
        yield f"{kind} does not say its weight decay, so nobody knows by how much its steps contract:"
    else:
        where = "that is part of the loss" if weight_decay is not None else "that is part of its gradient"
        yield f"by how much a step of {kind} contracts through a weight decay of {decay:g} {where} is not known:"
    yield 'weights "wp" and "mse" need SGD or decoupled decay (torch.optim.AdamW with its own weight_decay);'
    yield 'use one of them, or weights="samples"'


def log_contraction(
    learning_rate: float,
    weight_decay: float,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> float:
    """Return ``log rho`` of one step of SGD on the quadratic ``lambda/2 w^2``: what is left of the distance.

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


RULES.add("wp", Rule(wp, contraction_of))
RULES.add("mse", Rule(mse, contraction_of, sketch, SIZE))
