"""Checks on the script's own optimisers, hooks and tensors, which meet something else here than on one machine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

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
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [parameter for parameter in held if id(parameter) not in ours]:
            raise ValueError(_foreign_text(foreign))
        loop.script.checked_optimizers.add(id(optimizer))
    # Those that the script stepped itself were seen doing so.
    seen = (*optimizers, *loop.tracking.stepped_untracked()) if loop.transport.elastic else ()
    for optimizer in seen:
        if not loop.tracking.is_tracked(optimizer):
            raise MisuseError(
                f"the optimizer ({type(optimizer).__name__}) is not tracked, so a worker that joins could not take "
                "over its state: call fleet.track(optimizer=optimizer) before the first step"
            )


def _foreign_text(foreign: Sequence[torch.Tensor]) -> str:
    """``foreign``: what an optimiser trains and the fleet was not given."""
    text = "the optimizer has parameters that are not in fleet.model(...): "
    loose = next((tensor for tensor in foreign if not isinstance(tensor, torch.nn.Parameter)), None)
    if loose is None:
        return text + "build it from the module that fleet.model returns"
    return (
        f"{text}a tensor of shape {list(loose.shape)} is no parameter of a module. Write own = fleet.model("
        "nn.ParameterList([tensor])), use own[0] in the loss, and build the optimizer from own.parameters()"
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


MOST_NODES = 20_000
"""Nodes of a loss's graph that are looked at."""

UPDATED_BY_HAND = (
    "the loss reaches a tensor of shape {shape} that has requires_grad and is no parameter of a module of the fleet, "
    "and the script changes it: its .grad is of this worker's samples alone, so workers train unlike ones. Make it an "
    "nn.Parameter of a module, give that to fleet.model, and change it behind step.reduce() or by an optimizer"
)


class OwnLeaves:
    """The leaves that one loop's losses reach, besides the fleet's parameters: each worker would train its own.

    ``delta = torch.zeros(8, requires_grad=True)`` is no parameter of a module, so it is in no sum: after backward its
    ``.grad`` is of this worker's samples alone, and an update by hand (``delta.add_(delta.grad.sign())``) drives
    workers apart. Such a tensor is noted where a loss reaches it, and the script is warned once it has changed.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[ref[torch.Tensor], int]] = {}

    def look(self, loss: torch.Tensor, known: Iterable[torch.Tensor]) -> str:
        """Note what a loss reaches; return a warning, or nothing, about what changed since an earlier one did."""
        ours, text = set(map(id, known)), ""
        for leaf in _leaves(loss):
            if id(leaf) in ours:
                continue
            noted, version = self._noted.get(id(leaf), (None, 0))
            if noted is not None and noted() is leaf and leaf._version != version and _is_trained(leaf):
                text = UPDATED_BY_HAND.format(shape=list(leaf.shape))
            self._noted[id(leaf)] = ref(leaf), leaf._version
        return text


def _is_trained(leaf: torch.Tensor) -> bool:
    """Return whether the script may have used the leaf's gradient: that of a teacher's parameter only adds up."""
    if not isinstance(leaf, torch.nn.Parameter) or leaf.grad is None:
        return True
    return leaf.grad.is_cpu and not bool(leaf.grad.any())


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves of a loss's graph; of one that is too large, those among its first nodes."""
    leaves: list[torch.Tensor] = []
    todo: list[Any] = [loss.grad_fn]
    seen = set(todo)
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node is None:
            continue
        if node.__class__.__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return leaves
