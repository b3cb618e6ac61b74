"""Replicas: the same parameters on every worker, checked when they start and now and then while they train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from paceline.settings import must_agree
from paceline.transport import Transport

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> float:
    """A number that two sets of tensors share when they are equal bit for bit: sums of their bits, tensor by tensor.

    Whole numbers below 2**52, so it travels exactly in a float64. Within a tensor it does not see the order.
    """
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.uint8))
        total = (total * 1_000_003 + int(bits.sum(dtype=torch.int64))) % (1 << 52)
    return float(total)


def shape_of(model: torch.nn.Module) -> list[list[Any]]:
    state = model.state_dict()
    return [[name, list(t.shape), str(t.dtype)] for name, t in state.items() if isinstance(t, torch.Tensor)]


def check_same_shape(transport: Transport, model: torch.nn.Module) -> None:
    """Raise ValueError on every worker, naming the first parameter that differs, when models are not alike."""
    shape = shape_of(model)
    digest = blake2b(repr(shape).encode(), digest_size=16).hexdigest()
    if len(set(transport.gather("fleet.model()", digest))) == 1:
        return
    described = {name: f"{size} {dtype}" for name, size, dtype in shape}
    names = sorted({name for theirs in transport.gather("fleet.model() names", list(described)) for name in theirs})
    must_agree(transport, "fleet.model()", {name: described.get(name, "missing") for name in names})


@torch.no_grad()
def spread(transport: Transport, models: Sequence[torch.nn.Module]) -> None:
    """Give every worker the leader's parameters and buffers, and check that they arrived."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    transport.broadcast([t.detach() for t in tensors if t.numel()])
    must_agree(transport, "the leader's weights", {"fingerprint": fingerprint(tensors)})
