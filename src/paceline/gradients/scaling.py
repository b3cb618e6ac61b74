"""Loss scaling for half precision, with torch's GradScaler, when workers may hold unlike precisions.

Each worker divides its own scale out of its gradients before the round, so a bf16 worker, an fp16 worker and a CPU can
share a step. An overflow anywhere skips the update everywhere, and every scaler adjusts its scale.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, cast

import torch

from paceline.errors import MisuseError

LARGEST = torch.finfo(torch.float32).max
"""The largest scale: a scale is a float32 and never grows to infinity."""
LOOKED_AT = 64
"""Operations at the end of a loss's graph among which a scale is looked for: it was multiplied in last, or nearly."""
_OURS = {
    "scale": "step.backward(loss) scales",
    "unscale_": "the round unscales",
    "step": "step.commit(optimizer) steps",
    "update": "step.commit updates the scale",
}
"""The calls of a tracked scaler that are errors, and what Paceline does instead."""


def next_state(state: dict[str, Any], *, overflow: bool) -> dict[str, Any]:
    """Return the next state by GradScaler's rule.

    An overflow backs the scale off; ``growth_interval`` steps without one let it grow.

    >>> state = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}
    >>> next_state(state, overflow=False)["scale"], next_state(state, overflow=True)["scale"]
    (16.0, 4.0)
    """
    if overflow:
        return {**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
    if state["_growth_tracker"] + 1 >= state["growth_interval"]:
        grown = state["scale"] * state["growth_factor"]
        return {**state, "scale": grown if grown <= LARGEST else state["scale"], "_growth_tracker": 0}
    return {**state, "_growth_tracker": state["_growth_tracker"] + 1}


def is_active(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())


def take_over(scaler: Any) -> None:
    """Make the user's own calls of a tracked scaler errors: they would scale or step twice."""
    for name, instead in _OURS.items():
        setattr(scaler, name, _refuse(name, instead))


def give_back(scaler: Any) -> None:
    for name in _OURS:
        vars(scaler).pop(name, None)


def scaled(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss times the scaler's scale."""
    return cast(torch.Tensor, type(scaler).scale(scaler, loss))


class LivingScalers:
    """The living GradScalers, found when they are first asked for: the scan takes as long as a step."""

    def __init__(self) -> None:
        self._found: list[Any] | None = None

    def scales(self) -> list[torch.Tensor]:
        """Return the tensors in which they keep their scales, as far as they have begun to scale."""
        if self._found is None:
            self._found = instances(torch.amp.GradScaler)
        return [scale for scaler in self._found if (scale := getattr(scaler, "_scale", None)) is not None]


def scale_in(loss: torch.Tensor, living: LivingScalers) -> float | None:
    """Return the scale that ``scaler.scale(loss)`` of some GradScaler has left in this loss; None: it has none.

    Only a product with the very tensor in which a living scaler keeps its scale counts, so a factor of the user's own
    is none, whatever its size.
    """
    factors = {factor.data_ptr() for node in _last_operations(loss) for factor in _factors(node)}
    if not factors:
        return None
    return next((float(scale) for scale in living.scales() if scale.data_ptr() in factors), None)


def instances(*kinds: type) -> list[Any]:
    """Return the living objects of these classes and of their subclasses.

    An object refers to its class, and the interpreter finds who refers to some without making a list of all objects: a
    million take a third of the time of a loop over `gc.get_objects` for one class, three quarters for thirty.
    """
    wanted = {subclass for kind in kinds for subclass in _subclasses(kind)}
    # type() alone: an object's own attributes, such as __class__, may run any code.
    return [thing for thing in gc.get_referrers(*wanted) if type(thing) in wanted]


def _subclasses(kind: type) -> list[type]:
    """Return a class and all its subclasses."""
    below: list[type] = type.__subclasses__(kind)
    return [kind, *(other for subclass in below for other in _subclasses(subclass))]


def _last_operations(loss: torch.Tensor) -> list[Any]:
    """Return the operations nearest to the loss, breadth first."""
    found: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in found:  # grows meanwhile
        if len(found) >= LOOKED_AT:
            break
        found += [other for other, _ in node.next_functions if other is not None and other not in found]
    return found


def _factors(node: Any) -> list[torch.Tensor]:
    """Return the single float32 numbers without a gradient, as scalers keep theirs, that this node multiplied by."""
    if node.name() != "MulBackward0":
        return []
    try:
        saved = [node._saved_other, node._saved_self]
    except RuntimeError:  # backward has been through here: torch raises its own error
        return []
    numbers = [s for s in saved if isinstance(s, torch.Tensor) and s.numel() == 1 and s.dtype == torch.float32]
    return [number for number in numbers if not number.requires_grad]


def _refuse(name: str, instead: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise MisuseError(f"scaler.{name}() on a tracked GradScaler: {instead}; delete the call")

    return refuse
