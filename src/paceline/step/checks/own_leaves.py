"""Leaf tensors of the script that the loss reaches and the script changes: each worker would train one of its own.

``delta = torch.zeros(8, requires_grad=True)`` is no parameter of a module, so it is in no sum: after backward its
``.grad`` is of this worker's samples alone, and an update by hand (``delta.add_(delta.grad.sign())``) drives workers
apart. Such a tensor is noted where a loss reaches it, and the script is warned once it has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch

MOST_NODES = 20_000
"""Nodes of a loss's graph that are looked at."""

UPDATED_BY_HAND = (
    "the loss reaches a tensor of shape {shape} that has requires_grad and is no parameter of a module of the fleet, "
    "and the script changes it: its .grad is of this worker's samples alone, so workers train unlike ones. Make it an "
    "nn.Parameter of a module, give that to fleet.model, and change it behind step.reduce() or by an optimizer"
)


class OwnLeaves:
    """The leaves that one loop's losses reach, besides the fleet's parameters."""

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
