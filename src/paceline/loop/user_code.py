"""Checks on the script's own optimisers and hooks, which meet something else in a fleet than on one machine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where an optimiser asks for the batch's loss and gradient again within one update, as its
    ``step()`` with a closure does: a step of the fleet gives them once."""
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


def hooks_text(models: Iterable[torch.nn.Module]) -> str | None:
    """A warning where parameters have hooks on their gradients; None where they have none.

    A hook sees the gradient of one worker's micro-batch, times the micro-batch's part of the step. A linear one (a
    mask, a factor) commutes with the sum; clamping and clipping do not.
    """
    hooked = [name for model in models for name, parameter in model.named_parameters() if _has_hooks(parameter)]
    if not hooked:
        return None
    others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
    return (
        f"parameter {hooked[0]}{others} has hooks on its gradient, which see one micro-batch's part of the step's: a "
        "mask or a factor is right there; to clip or clamp, call step.combine() and change p.grad, then step.commit"
    )


def _has_hooks(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
