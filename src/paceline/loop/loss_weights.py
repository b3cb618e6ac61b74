"""A micro-batch's loss and its weight, as a script gives them to ``step.backward``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def check_weight(weight: Any) -> Any:
    """A number or, where looking at it would make a device wait, a tensor there; ValueError for any other."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight must be one number, got a tensor of shape {tuple(weight.shape)}")
        weight = weight.detach().reshape(())
        if weight.device.type != "cpu":
            return weight.to(torch.float64)  # looking at it would make the device wait
        weight = weight.item()
    if not isinstance(weight, (int, float, np.number)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be a finite number, zero or more, got {weight!r}")
    return float(weight)


def weighted(loss: torch.Tensor, weight: Any) -> torch.Tensor | float:
    """``loss * weight`` in double precision: a number, where looking at it makes no device wait. A weight of 0, which
    only the device may know, drops even a loss that is NaN."""
    if loss.is_cpu and not isinstance(weight, torch.Tensor):
        return float(loss.item()) * float(weight)
    loss = loss.detach().to(torch.float64)
    if isinstance(weight, torch.Tensor):
        loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
    product: torch.Tensor = loss * weight
    return product


def check_loss(loss: Any) -> None:
    """Raise ValueError unless it is one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a scalar tensor, the mean over the micro-batch; got {shape}")
