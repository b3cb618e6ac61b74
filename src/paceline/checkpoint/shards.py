"""Tensors that are divided over a worker's processes (DTensors, as `fully_shard` makes them), and the complete ones.

A state that is saved or handed to a peer holds complete tensors, so that it fits any grouping of processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paceline.transport import Collective


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "to_local")


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    return any(map(is_sharded, tensors))


def local(tensor: Any) -> torch.Tensor:
    """Return this process's part of a tensor; all of it where it is not divided."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def dimension(tensor: Any) -> int:
    """Return the dimension along which a tensor is divided."""
    (placement,) = tensor.placements
    return int(placement.dim)


def check(name: str, tensor: Any, shards: int) -> None:
    """Raise ValueError unless a parameter is divided over the worker's processes as `fully_shard` does it."""
    placements: tuple[Any, ...] = getattr(tensor, "placements", ())
    fits = len(placements) == 1 and type(placements[0]).__name__ == "Shard" and tensor.device_mesh.size() == shards
    if not fits:
        layout = f"is laid out as {placements} over {tensor.device_mesh.size()}" if placements else "is not divided"
        raise ValueError(
            f"parameter {name} {layout} processes, and this worker has {shards}: divide all parameters with "
            "fleet.model(net, shard=True), or with fully_shard(..., mesh=fleet.mesh) of your own"
        )


def part_of(whole: torch.Tensor, shard: int, shards: int, dim: int = 0) -> torch.Tensor:
    """Return a view of the part of a complete tensor that belongs to one process.

    The parts are equal but for the last ones, as torch.chunk cuts.

    >>> [len(part_of(torch.arange(5), shard, 4)) for shard in range(4)]
    [2, 2, 1, 0]
    """
    length = whole.shape[dim]
    size = -(-length // shards)
    start = min(shard * size, length)
    return whole.narrow(dim, start, min(size, length - start))


def own_part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this process's part of a complete tensor that is divided like ``like``."""
    mesh = like.device_mesh
    return part_of(whole, mesh.get_local_rank(), mesh.size(), dimension(like))


def divided(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a complete tensor, which every process has, divided like ``like``."""
    return _as_part(own_part(whole, like).to(local(like).device, copy=True), whole, like)


def _as_part(part: torch.Tensor, whole: torch.Tensor, like: Any) -> torch.Tensor:
    stride = torch.empty(whole.shape, device="meta").stride()
    made: torch.Tensor = type(like).from_local(
        part.contiguous(), like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=stride
    )
    return made


LARGE = 1 << 12
"""Elements above which tensors of a state reach a worker's further processes part by part."""


def outline(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's state without the values of large tensors of models and tracked objects.

    It is for the processes that get parts of these tensors.
    """
    return {key: _outlined(part) if key in ("models", "tracked") else part for key, part in content.items()}


def _outlined(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta") if value.numel() > LARGE else value
    return mapped(lambda item, _: _outlined(item), value)


def handed_out(value: Any, like: Any, inside: Collective) -> Any:
    """Return a state on all processes of a worker, divided where ``like`` is.

    The first process has the complete tensors and the others an `outline`. ``like`` is a parameter, or the same
    structure.
    """
    if not isinstance(value, torch.Tensor):
        return mapped(lambda item, key: handed_out(item, _item(like, key), inside), value)
    if value.numel() <= LARGE and not (is_sharded(like) and like.shape == value.shape):
        return value.clone()
    if is_sharded(like) and like.shape == value.shape:
        part = torch.empty(local(like).shape, dtype=value.dtype, device=local(like).device)
        dim = dimension(like)
        if value.numel() > LARGE:
            inside.part("a state", lambda shard: part_of(value, shard, inside.shards, dim), part)
        else:
            part.copy_(own_part(value, like))
        return _as_part(part, value, like)
    whole = torch.empty(value.shape, dtype=value.dtype)
    inside.part("a state", lambda shard: value, whole)
    return whole


def _item(like: Any, key: Any) -> Any:
    """Return the part of a structure under this key; a parameter stands for its own moments."""
    return like if isinstance(like, torch.Tensor) else like.get(key) if isinstance(like, Mapping) else None


def mapped(function: Callable[[Any, Any], Any], value: Any) -> Any:
    """Return the same structure, with ``function(item, key)`` in place of each item."""
    if isinstance(value, Mapping):
        items = {key: function(item, key) for key, item in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if type(value) in (list, tuple):
        return type(value)(function(item, number) for number, item in enumerate(value))
    return value


def gathered(value: Any, *, keep: bool) -> Any:
    """Return the same structure with complete tensors, on the CPU, in place of divided ones.

    All processes of the worker call it; where the result is not to be kept, empty tensors replace them.
    """
    if is_sharded(value):
        whole = value.detach().full_tensor()
        return whole.cpu() if keep else torch.empty(0)
    return mapped(lambda item, _: gathered(item, keep=keep), value)


def parts_of(thing: Any) -> Any:
    """Return which tensors of an object's state are divided, and how, in the structure of its state."""
    if isinstance(thing, torch.optim.Optimizer):
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
        return {"state": dict(enumerate(parameters))}
    return thing.state_dict()


def reshard(models: Iterable[torch.nn.Module]) -> None:
    """Divide parameters again that a forward had put together: an evaluation leaves some so."""
    for model in models:
        module: Any
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()
