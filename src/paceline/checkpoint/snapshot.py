"""A copy of a training's state in this computer's memory, taken between two steps, for somebody else to write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


class Snapshot:
    """``content`` with a copy of every tensor in it. A GPU's are copied in the order of its own work: this thread goes
    on at once, and `wait` lets another one know that they have arrived."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self.content: dict[str, Any] = self._copy(dict(content))
        self._arrived = [_mark(device) for device in self._devices]

    def wait(self) -> None:
        """Until every copy is complete."""
        for event in self._arrived:
            event.synchronize()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = self._tensor(value.detach())
            return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._copy(item)) for key, item in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self._copy(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tied weights have several names and are copied once, as ``torch.save`` would write them."""
        if tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        key = (*where, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copies:
            self._copies[key] = self._from_gpu(tensor) if tensor.is_cuda else tensor.to("cpu", copy=True)
        return self._copies[key]

    def _from_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        self._devices.add(tensor.device)
        try:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)  # from torch's own cache after the first
        except RuntimeError:  # no more memory may be pinned: this thread waits for the copy instead
            return tensor.cpu()
        return copy.copy_(tensor, non_blocking=True)


def _mark(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
