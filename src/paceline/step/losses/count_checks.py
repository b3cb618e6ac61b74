"""Whether a tensor that the script divides a loss by is a count of what the loss adds up.

A mean over some values is their sum divided by how many there are, or by the sum of their weights. Both are sums over
samples, so that the divisor of a whole batch is the sum of its micro-batches' divisors. A variance of the batch, a
moving average or the size of the global batch are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch

from paceline.step.losses.graph_nodes import Node, stem_of

_CLASSES = ("NllLoss", "NllLoss2D")
_WEIGHTED = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_FACTORS = ("self", "tensor", "vec", "mat2", "batch1", "batch2")


def is_count(divisor: Any, shape: tuple[int, ...], weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return whether a sum's divisor is a number of its values, or the sum of their weights; on CUDA a tensor.

    Args:
        divisor: a number, or a tensor of a device.
        shape: that of the values that are summed.
        weights: what they are multiplied by.
        nodes: the sum, and what lies directly below: they may have weights of their own.
    """
    values = prod(shape)
    known = is_whole(divisor, most=2 * values)
    if known is True:
        return True
    total = weight_of(weights, nodes)
    return known if total is None else known | is_multiple(divisor, total)


def is_mean_weight(divisor: Any, shape: tuple[int, ...], weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return whether a mean's divisor is the mean of the weights of its values; on CUDA a tensor."""
    total = weight_of(weights, nodes)
    return False if total is None else is_multiple(divisor * prod(shape), total)


def is_whole(divisor: Any, *, most: int) -> Any:
    """Return whether a divisor is a whole number, up to what is added so that nothing is divided by 0."""
    if isinstance(divisor, torch.Tensor):
        off = (divisor - divisor.round()).abs()
        return (off <= _ADDED * divisor.abs().clamp(min=1)) & (divisor.abs() <= most * (1 + _ADDED))
    size = abs(divisor)
    if not math.isfinite(size):  # the gradient shows it
        return True
    return abs(size - round(size)) <= _ADDED * max(1.0, size) and size <= most * (1 + _ADDED)


def is_multiple(one: Any, other: Any) -> Any:
    """Return whether one number is the other, or a whole multiple or part of it: a size that the values have more."""
    if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor):
        one, other = abs(one), abs(other)
        if not one or not other or not math.isfinite(one / other):
            return one == other
        ratio = max(one / other, other / one)
        return bool(abs(ratio - round(ratio)) <= _ADDED * ratio)
    device = (one if isinstance(one, torch.Tensor) else other).device
    one, other = (torch.as_tensor(value, device=device).double().abs() for value in (one, other))
    ratio = torch.maximum(one / other, other / one)
    return ((ratio - ratio.round()).abs() <= _ADDED * ratio) | (one == other)


def is_equal(one: Any, other: Any) -> Any:
    """Return whether two counts are equal, but for rounding; on CUDA a tensor."""
    return abs(one - other) <= _ADDED * abs(other)


_ADDED = 1e-4
"""Part of a divisor that may have been added (``mask.sum() + 1e-6``), or lost in rounding."""


def weight_of(weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return the sum of the weights of some values, as far as the graph has them; None where it has none."""
    found = [*weights, *(weight for node in nodes if (weight := _own_weight(node)) is not None)]
    if not found:
        return None
    try:
        total = reduce(torch.mul, [weight.detach() for weight in found]).sum()
    except RuntimeError:  # shapes that meet in another way
        return None
    return float(total.item()) if total.is_cpu else total


def _own_weight(node: Node) -> torch.Tensor | None:
    """Return the weights of a loss function, or what a product sums with; None where there are none."""
    stem = stem_of(node.__class__)
    if stem in _CLASSES:
        if node._saved_reduction != 0:
            return node._saved_total_weight  # type: ignore[no-any-return]
        weight, target = node._saved_weight, node._saved_target
        kept = target != node._saved_ignore_index
        return None if weight is None else weight[target.masked_fill(~kept, 0)] * kept
    if stem in _WEIGHTED:
        return node._saved_weight  # type: ignore[no-any-return]
    if stem in ("Dot", "Mv", "Mm", "Bmm"):
        saved = (getattr(node, f"_saved_{name}", None) for name in _FACTORS)
        return next((one for one in saved if isinstance(one, torch.Tensor) and not one.requires_grad), None)
    return None
