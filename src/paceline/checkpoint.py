"""Checkpoints: everything a run needs to go on, in one file, written whole or not at all.

Files are read with ``weights_only``: a checkpoint holds tensors and plain values, and loading one executes nothing.
"""

from __future__ import annotations

import copy
import io
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.transport import Transport

VERSION = 1


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype)


def plain(value: Any, where: str) -> Any:
    """``value`` in types that load without executing anything (NumPy's numbers become Python's), or a ValueError that
    says which part is not: better now than when the checkpoint is needed."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        copy = {plain(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        return OrderedDict(copy) if isinstance(value, OrderedDict) else copy
    if isinstance(value, (list, tuple, set)) and type(value) in (list, tuple, set):
        return type(value)(plain(item, f"{where}[{number}]") for number, item in enumerate(value))
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds plain values and "
        "tensors alone, so that loading it executes nothing"
    )


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write to a temporary file beside ``path``, flush it to the disk, and put it in place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"paceline_checkpoint": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except RuntimeError as error:  # torch's writer on a full disk
        raise OSError(str(error).splitlines()[0]) from error
    finally:
        temporary.unlink(missing_ok=True)


def pack(content: Mapping[str, Any]) -> torch.Tensor:
    """Plain values and tensors as bytes, to be sent to a peer."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpack(data: torch.Tensor, *, device: torch.device) -> dict[str, Any]:
    """What `pack` made; nothing in it is executed."""
    content: Any = torch.load(io.BytesIO(data.numpy().tobytes()), map_location=device, weights_only=True)
    return dict(content)


def read_on_leader(transport: Transport, path: Path) -> bytes:
    """The file's bytes on every worker; only the leader needs to reach it."""
    data, problem = b"", None
    if transport.rank == 0:
        try:
            data = path.read_bytes()
        except OSError as error:
            problem = f"cannot read the checkpoint {path}: {error.strerror or error}"
    size, problem = transport.gather("fleet.load()", [len(data), problem])[0]
    if problem:
        raise ValueError(problem)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
    transport.broadcast([buffer])
    return buffer.numpy().tobytes()


def parse(data: bytes, *, path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, or a ValueError that says what is wrong with it."""
    try:
        content: Any = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:  # whatever garbage makes the reader do
        raise ValueError(f"{path} is not a whole checkpoint: it cannot be read ({type(error).__name__})") from None
    version = content.get("paceline_checkpoint") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by fleet.save")
    if version > VERSION:
        raise ValueError(f"{path} was written by a newer version of Paceline")
    if any(not isinstance(content.get(key), kind) for key, kind in _PARTS.items()):
        raise ValueError(f"{path} was not written by fleet.save: parts of it are missing")
    return dict(content)


_PARTS: dict[str, type] = {"models": list, "tracked": dict, "pace": dict, "seed": int}


def must_match(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], models: Sequence[nn.Module]) -> None:
    """Raise ValueError when the checkpoint and the script do not hold the same things."""
    if len(saved["models"]) != len(models):
        raise ValueError(f"{path} holds {len(saved['models'])} models, and fleet.model was called {len(models)} times")
    for model, state in zip(models, saved["models"], strict=True):
        ours, theirs = _shapes(model.state_dict()), _shapes(state)
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                said = f"{theirs.get(name, 'missing')} in the checkpoint and {ours.get(name, 'missing')} in the model"
                raise ValueError(f"{path} does not fit the model: {name} is {said}")
    missing, extra = sorted(set(tracked) - set(saved["tracked"])), sorted(set(saved["tracked"]) - set(tracked))
    if missing or extra:
        said = " and ".join(
            [f"lacks {', '.join(missing)}"] * bool(missing)
            + [f"holds {', '.join(extra)}, which the script does not track"] * bool(extra)
        )
        raise ValueError(f"{path} {said}: fleet.track(...) must name the same things as when it was saved")


def restore(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], models: Sequence[nn.Module]) -> None:
    """Load everything that `must_match` let pass, or raise ValueError and leave everything as it was."""
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
    for name, thing in tracked.items():
        try:
            load_into(thing, saved["tracked"][name])
        except Exception as error:
            for other, state in before.items():
                load_into(tracked[other], state)
            raise ValueError(f"{path}: the state of {name} does not fit: {str(error).splitlines()[0]}") from None
    for model, state in zip(models, saved["models"], strict=True):
        model.load_state_dict(state)


def load_into(thing: Any, state: Any) -> None:
    if state or not isinstance(thing, torch.amp.GradScaler):  # a disabled scaler saves nothing and takes nothing
        thing.load_state_dict(state)


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
