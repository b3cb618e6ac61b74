"""Accelerate's free functions on a fleet: ``accelerate.utils.gather``, ``reduce``, ``broadcast`` and their like.

They call ``torch.distributed``, whose default process group is absent in a fleet, or has other members. `serve` gives
the modules in which they stand a ``torch`` whose ``distributed`` has the fleet's collectives, and is torch's otherwise.
So they are right however the script has imported them, and before or after this adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import operations, random

from paceline.adapters.accelerate import fleet_values as values
from paceline.errors import MisuseError

if TYPE_CHECKING:
    from paceline.adapters.accelerate.accelerator import Accelerator


class FleetCollectives:
    """The collectives that Accelerate's free functions call. ``current`` returns the Accelerator; None without fleet.

    Signatures are those of ``torch.distributed``.
    """

    def __init__(self, current: Callable[[], Accelerator | None]) -> None:
        self._current = current

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *others: Any) -> None:
        """Fill the list with all workers' tensors; their numbers of rows may differ."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_gather(tensor_list, tensor, *others)
            return
        tensor_list[:] = accelerator.all_workers.tensors("accelerate.utils.gather", tensor)

    def all_gather_object(self, object_list: list[Any], obj: Any, *others: Any) -> None:
        """Fill the list with all workers' plain values."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_gather_object(object_list, obj, *others)
            return
        object_list[:] = accelerator.all_workers.objects("accelerate.utils.gather_object", obj)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *others: Any) -> None:
        """Replace the tensor by the sum, or maximum, of all workers' tensors."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_reduce(tensor, op, *others)
            return
        if accelerator.joined.context.elastic is not None:
            raise MisuseError(
                "accelerate.utils.reduce divides by a number of processes, and here workers come and go: use "
                "accelerator.reduce(tensor, reduction=...)"
            )
        parts = accelerator.all_workers.tensors("accelerate.utils.reduce", tensor)
        rule = "max" if op == dist.ReduceOp.MAX else "sum"
        tensor.copy_(values.reduced("accelerate.utils.reduce", parts, rule))

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *others: Any) -> None:
        """Replace the tensor by that of one worker."""
        accelerator = self._current()
        if accelerator is None:
            dist.broadcast(tensor, src, *others)
            return
        check_source(accelerator, "accelerate.utils.broadcast", src)
        parts = accelerator.all_workers.tensors("accelerate.utils.broadcast", tensor)
        if parts[src].shape != tensor.shape:
            raise ValueError(
                f"accelerate.utils.broadcast: the tensor of process {src} has the shape {tuple(parts[src].shape)}, and "
                f"this one {tuple(tensor.shape)}: give tensors of equal shape"
            )
        tensor.copy_(parts[src])

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, *others: Any) -> None:
        """Replace the plain values in the list by those of one worker."""
        accelerator = self._current()
        if accelerator is None:
            dist.broadcast_object_list(object_list, src, *others)
            return
        label = "accelerate.utils.broadcast_object_list"
        check_source(accelerator, label, src)
        own = list(object_list) if accelerator.process_index == src else None
        object_list[:] = accelerator.all_workers.objects(label, own)[src]


def check_source(accelerator: Accelerator, label: str, source: int) -> None:
    """Raise MisuseError where a worker's value cannot reach all others."""
    context = accelerator.joined.context
    if context.elastic is not None and (source or context.outside or accelerator.evaluation is not None):
        raise MisuseError(
            f"{label} where workers come and go: one that joins later has missed it; keep the value in an object for "
            "accelerator.register_for_checkpointing, which newcomers receive"
        )
    if not 0 <= source < accelerator.num_processes:
        raise ValueError(f"{label}: there is no process {source}, of {accelerator.num_processes}")


def serve(current: Callable[[], Accelerator | None]) -> None:
    """Have Accelerate's free functions use the fleet of the current Accelerator."""
    fleets = FleetCollectives(current)
    shown = _like(dist, {name: getattr(fleets, name) for name in vars(FleetCollectives) if not name.startswith("_")})
    for module in (operations, random):
        vars(module)["torch"] = _like(torch, {"distributed": shown})


def _like(module: ModuleType, others: dict[str, Any]) -> ModuleType:
    """Return a module with the contents of another one, except for some."""
    new = ModuleType(module.__name__)
    vars(new).update(vars(module))
    vars(new).update(others)
    return new
