"""An optimiser for the fleet's averaged update: SGD with Nesterov momentum over the rounds, as DiLoCo has it.

The averaged update U of a round is taken for a step against a gradient ``-U``:

    v <- momentum * v + U
    x <- x + lr * (U + momentum * v)        (Nesterov; without it: x + lr * v)

With ``lr=1, momentum=0`` the round is the plain average. Each worker applies the same step to the same averaged
update, so the outer state is replicated and nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Settings of the outer optimiser. DiLoCo's are the defaults."""

    lr: float = 0.7
    """Step along the averaged update; 1 without momentum is the plain average."""
    momentum: float = 0.9
    """Part of the last rounds' updates that goes on, from 0 to below 1."""
    nesterov: bool = True
    """Whether the momentum looks ahead (Nesterov) or not."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"the outer learning rate is {self.lr}: a finite number above 0 (1 is plain averaging)")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum is {self.momentum}: from 0 to below 1")


class OuterSGD:
    """The outer optimiser of one model; its velocity is all its state."""

    def __init__(self, settings: Outer) -> None:
        self.settings = settings
        self.velocity: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, start: Sequence[torch.Tensor], update: Sequence[torch.Tensor]) -> None:
        """Move ``start`` (the round's common start, changed in place) by the fleet's averaged ``update``."""
        points, moves = list(start), list(update)
        lr, momentum = self.settings.lr, self.settings.momentum
        if momentum == 0:
            torch._foreach_add_(points, moves, alpha=lr)
            return
        if self.velocity is None:
            self.velocity = [torch.zeros_like(move) for move in moves]
        torch._foreach_mul_(self.velocity, momentum)
        torch._foreach_add_(self.velocity, moves)
        if self.settings.nesterov:
            torch._foreach_add_(points, moves, alpha=lr)
            torch._foreach_add_(points, self.velocity, alpha=lr * momentum)
        else:
            torch._foreach_add_(points, self.velocity, alpha=lr)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": None if self.velocity is None else [v.clone() for v in self.velocity]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        velocity = state["velocity"]
        self.velocity = None if velocity is None else [v.clone() for v in velocity]
