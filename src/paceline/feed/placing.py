"""Nested batches from the host to the device: tuples, lists, dicts, named tuples, dataclasses, objects with ``.to``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def move(data: Any, device: torch.device) -> Any:
    """The same structure with every tensor on ``device``; copies from pinned memory do not block."""

    def to(leaf: Any) -> Any:
        if type(leaf) is torch.Tensor and leaf.device == device:
            return leaf
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # a batch class of the user's own whose .to knows only the device
            return leaf.to(device)

    return _each(data, to, method="to")


def pin(data: Any, *, asked: bool) -> Any:
    """The same structure with every tensor in page-locked memory: from anywhere else the copy to a GPU would make the
    host wait until the GPU has done everything before it. ``asked``: by the user, who then has objects that can pin
    themselves pinned too."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if asked else leaf
        return leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout is torch.strided else leaf

    return _each(data, to, method="pin_memory")


def _each(data: Any, change: Callable[[Any], Any], *, method: str) -> Any:
    """Apply ``change`` to every part of a nested structure that has the method; the rest is left as it is."""
    if callable(getattr(data, method, None)):
        return change(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_each(part, change, method=method) for part in data))
    if isinstance(data, (tuple, list)):
        return type(data)(_each(part, change, method=method) for part in data)
    if isinstance(data, Mapping):
        parts = {name: _each(part, change, method=method) for name, part in data.items()}
        if not isinstance(data, MutableMapping):
            return parts
        same_kind = copy.copy(data)
        same_kind.update(parts)
        return same_kind
    if is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in fields(data):  # past a frozen dataclass's guard: the copy is ours
            object.__setattr__(changed, field.name, _each(getattr(data, field.name), change, method=method))
        return changed
    return data
