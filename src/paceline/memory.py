"""``micro_batch="auto"``: a micro-batch that does not fit into memory is halved, and the step goes on.

Out of memory in the model's forward: the same samples run again in halves under activation checkpointing, which keeps
only the outputs, so the user's loop sees the outputs it asked for. Out of memory in backward: the micro-batch is given
to the loop again, as two. Either way the size is halved from then on, and the log names the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

OutOfMemory = torch.OutOfMemoryError


def guard(model: torch.nn.Module, *, enter: Callable[[int], None], on_halve: Callable[[int], Any] | None) -> None:
    """Give the model a forward that survives running out of memory.

    ``enter(samples)`` may raise OutOfMemoryError (an emulated machine does). ``on_halve(samples)`` hears of a
    micro-batch that did not fit; without it, running out of memory stays an error. The model's class becomes a
    subclass of itself, so that deepcopy, isinstance and state_dict are as before.
    """
    original: Any = type(model)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        samples = _samples(args, kwargs)
        try:
            enter(samples)
            return original.forward(self, *args, **kwargs)
        except OutOfMemory:
            if on_halve is None or samples < 2:
                raise
        on_halve(samples)  # outside the except clause: the traceback held on to the activations
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return _in_halves(self, forward, args, kwargs, samples)

    model.__class__ = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _in_halves(model: torch.nn.Module, forward: Any, args: Any, kwargs: Any, samples: int) -> Any:
    half = (samples + 1) // 2
    parts = []
    for piece in (slice(0, half), slice(half, samples)):
        inputs = _walk((args, kwargs), partial(_cut, piece=piece, samples=samples))
        if torch.is_grad_enabled():
            parts.append(checkpoint(forward, model, *inputs[0], use_reentrant=False, **inputs[1]))
        else:
            parts.append(forward(model, *inputs[0], **inputs[1]))
    return _join(parts[0], parts[1])


def _cut(tensor: torch.Tensor, *, piece: slice, samples: int) -> torch.Tensor:
    return tensor[piece] if tensor.dim() and len(tensor) == samples else tensor


def _samples(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor among the arguments."""
    sizes: list[int] = []
    _walk((args, kwargs), lambda t: sizes.append(len(t)) if t.dim() else None)
    return sizes[0] if sizes else 0


def _walk(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _walk(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_walk(value, change) for value in tree)
    return tree


def _join(first: Any, second: Any) -> Any:
    """Put the halves' outputs together along the first dimension."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second]) if first.dim() else first
    if isinstance(first, dict):
        return type(first)({key: _join(first[key], second[key]) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(_join(a, b) for a, b in zip(first, second, strict=True))
    return first
