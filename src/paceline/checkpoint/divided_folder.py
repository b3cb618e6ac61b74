"""A checkpoint in a folder, written by all processes of a worker that divides its model: each writes its parts.

The folder is one of torch.distributed.checkpoint, which holds the divided tensors by name. One further file (`REST`)
holds everything else, the tensor names, and the length of each file. It loads on any grouping of processes, and on a
worker of one.
"""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.shards import is_sharded, mapped
from paceline.transport import Collective

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


def is_one(path: Path) -> bool:
    return (path / REST).is_file() and (path / META).is_file()


def write(path: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], inside: Collective) -> None:
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


def read(path: Path, parse: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
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
