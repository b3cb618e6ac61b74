"""Checks on the script's own optimisers and hooks, which meet something else in a fleet than on one machine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import MisuseError

if TYPE_CHECKING:
    from paceline.step.context import LoopContext


def check_optimizers(loop: LoopContext, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError for an optimiser, given to ``step.commit``, of parameters that are not the fleet's.

    Where workers come and go, raise MisuseError for one that is not tracked. Each optimiser is checked once per loop.
    """
    for optimizer in optimizers:
        if id(optimizer) in loop.script.checked_optimizers:
            continue
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(_no_optimizer_text(optimizer))
        refuse_closures(optimizer)
        ours = {id(parameter) for parameter in loop.gradients.everything}
        groups = (group["params"] for group in optimizer.param_groups)
        if any(id(parameter) not in ours for group in groups for parameter in group):
            raise ValueError(
                "the optimizer has parameters that are not in fleet.model(...): build it from the module that "
                "fleet.model returns"
            )
        loop.script.checked_optimizers.add(id(optimizer))
    # Those that the script stepped itself were seen doing so.
    seen = (*optimizers, *loop.tracking.stepped_untracked()) if loop.transport.elastic else ()
    for optimizer in seen:
        if not loop.tracking.is_tracked(optimizer):
            raise MisuseError(
                f"the optimizer ({type(optimizer).__name__}) is not tracked, so a worker that joins could not take "
                "over its state: call fleet.track(optimizer=optimizer) before the first step"
            )


def _no_optimizer_text(given: object) -> str:
    kind = type(given).__name__
    if not callable(getattr(given, "step", None)):
        return f"step.commit takes optimizers, got {kind}"
    return (
        f"step.commit takes torch's optimizers, and {kind} is none: let it make the update itself, behind the round: "
        f"step.reduce(); {kind.lower()}.step(); step.commit()"
    )


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimiser that needs the batch's loss and gradient several times per update.

    Its ``step()`` takes a closure for that; a step of the fleet gives them once.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ValueError(
            f"{name} takes two gradients of one batch for an update, and a step has one: take two steps an update, "
            "step.reduce() and first_step() or second_step() by turns, as docs/sharding.md shows"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the whole batch several times an update (its step needs a closure), and a step's batch "
            "comes once, in parts, to many workers: choose an optimiser whose step() takes no closure, such as AdamW"
        )


def refuse_untrainable(model: torch.nn.Module) -> None:
    """Raise ValueError for parameters whose gradients cannot be summed over a fleet."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name} has no shape before its first forward (a lazy module): run one batch through the "
                "model before fleet.model"
            )
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, and gradients of complex numbers cannot be summed over the "
                "fleet: make torch.view_as_real(...) of it the parameter, and use torch.view_as_complex in forward"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise ValueError(
                f"the embedding {name or type(module).__name__} has sparse=True, and sparse gradients cannot be summed "
                "over the fleet: build it with sparse=False"
            )


def hooks_text(models: Iterable[torch.nn.Module]) -> str | None:
    """Return a warning where parameters have hooks on their gradients; None where they have none.

    A hook sees the gradient of one worker's micro-batch, times the micro-batch's part of the step. A linear one (a
    mask, a factor) commutes with the sum; clamping and clipping do not.
    """
    hooked = [name for model in models for name, parameter in model.named_parameters() if _has_hooks(parameter)]
    if not hooked:
        return None
    others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
    return (
        f"parameter {hooked[0]}{others} has hooks on its gradient, which see one micro-batch's part of the step's: a "
        "mask or a factor is right there; to clip or clamp, call step.reduce() and change p.grad, then step.commit"
    )


def _has_hooks(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
