"""Flat tensors that hold the gradients of several parameters, and each parameter's place in one.

Parameters are grouped in about the order in which backward ends, so that a flat tensor is complete, and its sum over
the fleet can start, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20
"""As in DDP a small first bucket starts the round early, and then larger ones keep it efficient. They are a third of
DDP's: sums of 10 MB are as fast a byte as larger ones on Gloo, travel side by side, and end sooner after backward."""


class Slot:
    """One parameter's place."""

    __slots__ = ("bucket", "grad", "home", "parameter", "seen", "shown", "version")

    def __init__(self, parameter: torch.nn.Parameter, bucket: Bucket | None, home: torch.Tensor | None) -> None:
        self.parameter, self.bucket, self.home = parameter, bucket, home
        self.grad: torch.Tensor | None = None
        """Where this step's gradient adds up; None until the first one comes."""
        self.shown: torch.Tensor | None = None
        """What stands in ``p.grad`` until the next backward, and nobody else may change: the sum or, under a deadline,
        the gradient of the micro-batch before it joins the sum."""
        self.version = 0
        self.seen = -1
        """The backward pass in which the last gradient came."""


class Bucket:
    """Slots that share a flat tensor and one sum."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, flats: int = 1) -> None:
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        self._flats = [self._new_flat(size, first) for _ in range(flats)]
        self._homes = [_homes(flat, parameters) for flat in self._flats]
        self.flat = self._flats[0]
        self.slots = [Slot(p, self, home) for p, home in zip(parameters, self._homes[0], strict=True)]
        self.awaited = len(self.slots)
        self.started = False

    def _new_flat(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(size, dtype=like.dtype, device=like.device)

    def renew(self) -> None:
        """A flat tensor of its own, for something may still write into this one."""
        self._flats[0] = self._new_flat(self.flat.numel(), self.flat)
        self._homes[0] = _homes(self._flats[0], [slot.parameter for slot in self.slots])
        self._use_first()

    def turn_over(self) -> None:
        """Use the other flat tensor, and leave this one as it is."""
        self._flats.reverse()
        self._homes.reverse()
        self._use_first()

    def _use_first(self) -> None:
        self.flat = self._flats[0]
        for slot, home in zip(self.slots, self._homes[0], strict=True):
            slot.home = home

    def fill(self) -> None:
        """Copy this worker's own gradients to where they are summed."""
        came = [
            (home, slot.grad) for home, slot in zip(self._homes[0], self.slots, strict=True) if slot.grad is not None
        ]
        if len(came) < len(self.slots):
            self.flat.zero_()
        copy_all(came)


@torch.no_grad()
def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to each first tensor its second, in one call: on a GPU in a few kernels."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [source.detach() for _, source in pairs])


def group(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Buckets of one dtype and device, in reverse order of definition: about the order in which backward ends."""
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group, size = open_groups.get(kind, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        full = size >= (FIRST_BYTES if group is groups[0] else BUCKET_BYTES)
        open_groups[kind] = ([], 0) if full else (group, size)
    return groups


def _homes(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Each parameter's place in the flat tensor, one after another."""
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [_view_like(flat, end - p.numel(), p) for end, p in zip(ends, parameters, strict=True)]


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view of the flat tensor with the parameter's shape and, where dense, its memory layout."""
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    if dense if parameter.dim() == 4 else parameter.is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
