"""Many tensors as a few flat ones: one sum for each kind of number instead of one for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def like_flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without memory, of the sizes that `Flats` would have."""
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [torch.empty(sum(t.numel() for t in tensors if t.dtype is k), dtype=k, device="meta") for k in kinds]


class Flats:
    """Room for the sum of tensors like these, in flat tensors that are sent as they are.

    >>> room = Flats([torch.zeros(2, 2), torch.zeros(3)])
    >>> room.fill([torch.ones(2, 2), torch.full((3,), 2.0)])
    >>> room.flats[0].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes = dict.fromkeys((tensor.dtype for tensor in like), 0)
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        rooms = {kind: torch.empty(size, dtype=kind, device=like[0].device) for kind, size in sizes.items()}
        ends = dict.fromkeys(sizes, 0)
        self.flats = list(rooms.values())
        self.views: list[torch.Tensor] = []
        """The same memory, in the tensors' own shapes and order."""
        for tensor in like:
            begin = ends[tensor.dtype]
            ends[tensor.dtype] = begin + tensor.numel()
            self.views.append(rooms[tensor.dtype][begin : ends[tensor.dtype]].view(tensor.shape))

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.views, list(tensors))
