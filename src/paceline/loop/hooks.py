"""Hooks of the user's own on parameters, which see something else here than on one machine."""

from __future__ import annotations

from collections.abc import Iterable

import torch


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
