"""Optimisers that ask for the batch's loss and gradient again within one update, which a step gives once."""

from __future__ import annotations

import inspect

import torch


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where ``optimizer.step()`` cannot be called without a closure."""
    name = type(optimizer).__name__
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ValueError(
            f"{name} takes two gradients of one batch for an update, and a step has one: take two steps an update, "
            "step.combine() and first_step() or second_step() by turns, as docs/several-models.md shows"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the whole batch several times an update (its step needs a closure), and a step's batch "
            "comes once, in parts, to many workers: choose an optimiser whose step() takes no closure, such as AdamW"
        )
