"""Tensors of which each process of a worker holds a part (DTensors, as `fully_shard` makes them), and the whole ones.

A state that is saved or handed to a peer holds whole tensors, so that it fits any grouping of processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "to_local")


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    return any(map(is_sharded, tensors))


def local(tensor: Any) -> torch.Tensor:
    """This process's part; of a tensor that is not divided, all of it."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def dimension(tensor: Any) -> int:
    """Along which a tensor is divided."""
    (placement,) = tensor.placements
    return int(placement.dim)


def check(name: str, tensor: Any, shards: int) -> None:
    """Raise ValueError unless a parameter is divided over the worker's processes as `fully_shard` does it."""
    placements: tuple[Any, ...] = getattr(tensor, "placements", ())
    whole = len(placements) == 1 and type(placements[0]).__name__ == "Shard" and tensor.device_mesh.size() == shards
    if not whole:
        said = f"is laid out as {placements} over {tensor.device_mesh.size()}" if placements else "is not divided"
        raise ValueError(
            f"parameter {name} {said} processes, and this worker has {shards}: divide all parameters with "
            "fleet.model(net, shard=True), or with fully_shard(..., mesh=fleet.mesh) of your own"
        )


def part_of(whole: torch.Tensor, shard: int, shards: int, dim: int = 0) -> torch.Tensor:
    """The part of a whole tensor that belongs to one process, a view: all as large but the last ones, as torch.chunk
    cuts.

    >>> [len(part_of(torch.arange(5), shard, 4)) for shard in range(4)]
    [2, 2, 1, 0]
    """
    length = whole.shape[dim]
    size = -(-length // shards)
    start = min(shard * size, length)
    return whole.narrow(dim, start, min(size, length - start))


def own_part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's part of a whole tensor that is divided as ``like`` is."""
    mesh = like.device_mesh
    return part_of(whole, mesh.get_local_rank(), mesh.size(), dimension(like))


def divided(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor, divided as ``like`` is; nothing is sent, every process has all of it."""
    if is_sharded(whole) or not is_sharded(like) or whole.shape != like.shape:
        return whole
    part = own_part(whole, like).to(like.to_local().device, copy=True).contiguous()
    made: torch.Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def gathered(value: Any, *, keep: bool) -> Any:
    """The same with whole tensors, on the CPU, in place of divided ones. All processes of the worker call it; where the
    result is not to be kept, empty tensors take their place."""
    if is_sharded(value):
        whole = value.detach().full_tensor()
        return whole.cpu() if keep else torch.empty(0)
    if isinstance(value, Mapping):
        items = {key: gathered(item, keep=keep) for key, item in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if type(value) in (list, tuple):
        return type(value)(gathered(item, keep=keep) for item in value)
    return value


def model_state(state: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A model's whole state, divided as the model is."""
    ours = model.state_dict()
    return {name: divided(value, ours.get(name)) for name, value in state.items()}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's whole state, divided as its parameters are: moments have their shapes."""
    parameters = parameters_of(optimizer)
    moments = {
        number: {name: divided(value, parameters[number]) if isinstance(value, torch.Tensor) else value
                 for name, value in own.items()}
        for number, own in state["state"].items()
    }  # fmt: skip
    return {**state, "state": moments}


def reshard(models: Iterable[torch.nn.Module]) -> None:
    """Have parameters that were put together for a forward divided again: an evaluation leaves some so."""
    for model in models:
        module: Any
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()
