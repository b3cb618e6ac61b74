"""By how much a step of the optimiser at hand contracts through weight decay: rho of ``wp`` and ``mse``.

SGD adds the decay to the gradient, so its momentum carries it: the dominant root, `log_contraction`. Where the decay is
decoupled (AdamW, AdaHessian, Muon, Adafactor), a step multiplies the parameters by exactly ``1 - eta lambda`` before it
does anything else. Where it is part of a gradient that is then normalised (Adam, RMSprop, Adagrad), by how much a step
contracts depends on the gradients, and nobody knows it: those are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.combine.averaging.weights import log_contraction

DECOUPLED = (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor)
"""Optimisers whose weight decay never goes through the gradient."""


def contraction_of(optimizers: Sequence[torch.optim.Optimizer], weight_decay: float | None) -> float:
    """``log rho`` of one step of these optimisers at their present rates: the mean over all parameters.

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
    """Whether decay multiplies the parameters by ``1 - eta lambda``; the names are torch's and pytorch_optimizer's."""
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
