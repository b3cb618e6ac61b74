"""Optimisers that need second derivatives: AdaHessian, from the package pytorch_optimizer (extra ``research``).

AdaHessian scales its step by an estimate of the Hessian's diagonal, ``D = |Hz|`` with one random vector z of signs.
Its authors average D over the kernel window of a convolution's 4-D weights; the package does not, so `curvature` makes
the estimate here and `step` hands it over. Gradients must have been made with ``create_graph=True``. They then hold the
whole graph, so they must be dropped (``p.grad = None``) after every step, or memory grows.

It is a paper's rule (P4) and not a plug-in in ``research/``: the script hands over an optimiser and no name that a
registry could look up, so every step has to recognise its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SECOND_ORDER = ("AdaHessian",)
"""Classes of pytorch_optimizer that take Hessian estimates as they are made here."""


def needs_graph(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this optimiser's gradients must keep their graph."""
    kind = type(optimizer)
    return kind.__name__ in SECOND_ORDER and kind.__module__.split(".")[0] == "pytorch_optimizer"


def curvature(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """Return ``|Hz|`` for one random z of signs, averaged over the kernel window of 4-D parameters."""
    if not any(gradient.requires_grad for gradient in gradients):
        raise ValueError(
            "this optimiser needs second derivatives, and the gradients have none: the model's loss is linear in its "
            "parameters, or backward ran without create_graph=True; choose a first-order optimiser"
        )
    signs = [_signs(parameter, generator) for parameter in parameters]
    curved = [(gradient, sign) for gradient, sign in zip(gradients, signs, strict=True) if gradient.requires_grad]
    products = torch.autograd.grad(
        [gradient for gradient, _ in curved], list(parameters), [sign for _, sign in curved], allow_unused=True
    )
    return [
        torch.zeros_like(parameter) if product is None else _over_window(product.detach().abs())
        for parameter, product in zip(parameters, products, strict=True)
    ]


def step(optimizer: Any, *, generator: torch.Generator | None = None) -> None:
    """Make one step of AdaHessian with `curvature`; afterwards the gradients are gone, and their graph with them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    used = [parameter for parameter in parameters if parameter.grad is not None]
    try:
        found = curvature(used, [parameter.grad for parameter in used], generator=generator)
        estimates = dict(zip(map(id, used), found, strict=True))
        optimizer.step(hessian=[estimates.get(id(p), torch.zeros_like(p)) for p in parameters])
    finally:
        optimizer.zero_grad(set_to_none=True)


def _signs(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def _over_window(diagonal: torch.Tensor) -> torch.Tensor:
    return diagonal.mean(dim=(2, 3), keepdim=True).expand_as(diagonal) if diagonal.dim() == 4 else diagonal
