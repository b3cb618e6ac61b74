"""Tensors that are divided over a worker's processes (DTensors, as `fully_shard` makes them), and the complete ones.

A state that is saved or handed to a peer holds complete tensors, so that it fits any grouping of processes.

A checkpoint of such a worker may be a folder, to which each process writes its parts (`write_folder`). The folder is
one of torch.distributed.checkpoint, which holds the divided tensors by name. One further file (`REST`) holds everything
else, the tensor names, and the length of each file. It loads on any grouping of processes, and on a worker of one.
"""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import file as checkpoint_file
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


REST, META = "paceline.pt", ".metadata"
NAME, SHAPE, DTYPE = "paceline_divided", "shape", "dtype"
"""Keys of the entry that replaces a divided tensor: its name in the folder, its shape and type."""


class TakenOut:
    """Collector of the divided tensors of a state, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, value: Any, name: str) -> Any:
        """Return ``value`` with an entry in place of every divided tensor."""
        if is_sharded(value):
            self.tensors[name] = value.detach()
            return {NAME: name, SHAPE: list(value.shape), DTYPE: str(value.dtype)}
        return mapped(lambda item, key: self(item, f"{name}.{key}"), value)


def is_folder(path: Path) -> bool:
    return (path / REST).is_file() and (path / META).is_file()


def write_folder(
    path: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], inside: Collective
) -> None:
    """Write the tensors' parts, on all processes of the worker, and the rest on the first; raise OSError on failure."""
    temporary = path.with_name(f".{path.name}.tmp")
    if problem := inside.from_first("saving parts", _room_for(temporary) if inside.shard == 0 else None):
        raise OSError(*problem)
    try:
        _save(tensors, temporary)
        if inside.shard == 0:
            sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
            checkpoint_file.write(temporary / REST, {**content, "files": sizes})
            _put_in_place(temporary, path)
    finally:
        if inside.shard == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _room_for(temporary: Path) -> tuple[int, str] | None:
    """Create the folder anew; return (errno, text) on failure."""
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        return error.errno or 0, error.strerror or str(error)
    return None


def _save(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        _torch().save(dict(tensors), checkpoint_id=str(folder))
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first if isinstance(first, OSError) else OSError(str(first).splitlines()[0]) from None


def _torch() -> Any:
    """Import torch.distributed.checkpoint, which takes a while and is needed by few."""
    return importlib.import_module("torch.distributed.checkpoint")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename the folder to ``path``; what is there is moved away first."""
    before = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(path, before)
    os.replace(temporary, path)
    shutil.rmtree(before) if before.is_dir() else before.unlink(missing_ok=True)


def read_folder(path: Path, parse: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the content with complete tensors, on the CPU; raise ValueError when it is damaged.

    ``parse`` reads the file of the rest.
    """
    content = parse(path / REST)
    for name, size in content.pop("files").items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise ValueError(f"{path} is not a whole checkpoint: its file {name} is missing or cut off")
    wanted: dict[str, torch.Tensor] = {}
    filled = _put_back(content, wanted)
    if wanted:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that this process reads alone
                _torch().load(wanted, checkpoint_id=str(path), no_dist=True)
        except Exception as error:  # damaged bytes make the reader raise anything
            raise ValueError(f"{path} is not a whole checkpoint: it cannot be read ({type(error).__name__})") from None
    return dict(filled)


def _put_back(value: Any, wanted: dict[str, torch.Tensor]) -> Any:
    """Put empty tensors, to be filled by name, where `TakenOut` left entries."""
    if isinstance(value, Mapping) and set(value) == {NAME, SHAPE, DTYPE}:
        dtype = getattr(torch, str(value[DTYPE]).removeprefix("torch."))
        tensor = wanted[value[NAME]] = torch.empty(value[SHAPE], dtype=dtype)
        return tensor
    return mapped(lambda item, _: _put_back(item, wanted), value)
