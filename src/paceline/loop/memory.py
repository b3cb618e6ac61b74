"""``micro_batch="auto"``: a micro-batch that does not fit into memory is halved, and the step goes on.

Out of memory in the model's own call: the same samples run again in halves under activation checkpointing, which keeps
only the outputs, so the user's loop sees the outputs it asked for. Out of memory in backward: the micro-batch is given
to the loop again, as two. Either way the size is halved from then on, and the log names the worker. Which size is used
where memory suffices is found by measuring (sizing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from paceline.loop.context import LoopContext

OutOfMemory = torch.OutOfMemoryError


def shrink(loop: LoopContext, samples: int, *, again: bool) -> bool:
    """Memory ran out with so many samples at once: use at most half as many. ``again``: these come again."""
    if not loop.dealing.shrink(samples // 2, again=again):
        return False
    if loop.sizing is not None:
        loop.sizing.ran_out(samples)
    text = f"worker {loop.transport.rank} ran out of memory with {samples} samples at once: "
    loop.observe("note", {"level": "warning", "text": text + f"micro_batch is now {loop.dealing.micro_batch}"})
    return True


class Guard:
    """Gives a model a call that survives running out of memory, until ``remove``.

    ``enter(samples)`` may raise OutOfMemoryError (an emulated machine does). ``shrink(samples)`` hears how many samples
    did not fit; without it, running out of memory stays an error. The model's class becomes a subclass of itself for
    the time, and copies and pickles of the model are of its own class.
    """

    def __init__(
        self, model: torch.nn.Module, *, enter: Callable[[int], None], shrink: Callable[[int], Any] | None
    ) -> None:
        original: Any = type(model)
        self._model, self._original = model, original

        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            samples = _samples(args, kwargs)
            try:
                enter(samples)
                return original.__call__(self, *args, **kwargs)
            except OutOfMemory:
                if shrink is None or samples < 2:
                    raise
            shrink(samples)  # outside the except clause: the traceback held on to the activations
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return _in_halves(self, call, args, kwargs, samples)

        def reduce(self: torch.nn.Module, protocol: Any) -> Any:
            _, _, *rest = original.__reduce_ex__(self, protocol)
            return (_new, (original,), *rest)

        members: dict[str, Any] = {"__call__": call, "__reduce_ex__": reduce, "__module__": original.__module__}
        model.__class__ = type(str(original.__name__), (original,), members)

    def remove(self) -> None:
        self._model.__class__ = self._original


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _in_halves(model: torch.nn.Module, call: Any, args: Any, kwargs: Any, samples: int) -> Any:
    half = (samples + 1) // 2
    parts = []
    for piece in (slice(0, half), slice(half, samples)):
        inputs = _walk((args, kwargs), partial(_cut, piece=piece, samples=samples))
        if torch.is_grad_enabled():
            parts.append(checkpoint(call, model, *inputs[0], use_reentrant=False, **inputs[1]))
        else:
            parts.append(call(model, *inputs[0], **inputs[1]))
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
        return _like(tree, [_walk(value, change) for value in tree])
    return tree


def _like(tree: Any, values: list[Any]) -> Any:
    """A list, tuple or namedtuple of the same kind with other values."""
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _join(first: Any, second: Any) -> Any:
    """Put the halves' outputs together along the first dimension."""
    if isinstance(first, torch.Tensor):
        if not first.dim():
            raise ValueError(
                "the model ran out of memory and returns a scalar for the whole batch, which halves cannot give: use a "
                "smaller micro_batch, or compute the loss outside the model"
            )
        return torch.cat([first, second])
    if isinstance(first, dict):
        return type(first)({key: _join(first[key], second[key]) for key in first})
    if isinstance(first, (list, tuple)):
        return _like(first, [_join(a, b) for a, b in zip(first, second, strict=True)])
    return first
