"""Checkpoints: everything a run needs to go on, in one file (checkpoint/file.py has its bytes).

Files are read with ``weights_only``: a checkpoint holds tensors and plain values, and loading one executes nothing.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from paceline.checkpoint import file as sealing
from paceline.checkpoint import folder as shelf
from paceline.transport import Transport

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


def pack(content: Mapping[str, Any]) -> torch.Tensor:
    """Plain values and tensors as bytes, to be sent to a peer."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpack(data: torch.Tensor, *, device: torch.device) -> dict[str, Any]:
    """What `pack` made; nothing in it is executed."""
    try:
        content: Any = torch.load(io.BytesIO(data.numpy().tobytes()), map_location=device, weights_only=True)
    except Exception as error:  # whatever garbage makes the reader do
        raise ValueError(
            "a peer's state cannot be read: it holds more than tensors and plain values, and nothing in it is executed "
            f"({type(error).__name__})"
        ) from None
    return dict(content)


ATTEMPTS = 10
"""Leaders that may be lost while they hand a checkpoint round."""


class Found(NamedTuple):
    """A checkpoint, and where it lay."""

    path: Path
    content: dict[str, Any]


class Look(NamedTuple):
    """What the leader found at a path. Either there is a checkpoint, or a problem, or neither: nothing was there."""

    found: Found | None = None
    data: torch.Tensor = torch.empty(0, dtype=torch.uint8)
    problem: str | None = None
    warnings: tuple[str, ...] = ()
    """Checkpoints that were passed over, and why."""


def fetch(
    transport: Transport, path: Path, *, device: torch.device, missing_ok: bool, warn: Callable[[str], None]
) -> Found | None:
    """The checkpoint at ``path`` (a file, or a folder's newest whole one) on every worker; only the leader needs to
    reach it. None when nothing is there and that is ``missing_ok``; else ValueError says what is wrong."""
    for _ in range(ATTEMPTS):
        look = Look()

        def tell() -> list[Any]:
            nonlocal look
            look = look_at(path, device=device, missing_ok=missing_ok) if transport.rank == 0 else Look()
            return [str(look.found.path) if look.found else None, len(look.data), look.problem, look.warnings]

        where, size, problem, warnings = transport.gather("fleet.load()", tell)[0]
        for text in warnings:
            warn(text)
        if problem:
            raise ValueError(problem)
        if where is None:
            return None
        found = _receive(transport, look, Path(where), size, device)
        if all(transport.gather("the checkpoint that was read", found is not None)):
            return found
    raise ValueError(f"{path} did not reach every worker: the workers that read it were lost, one after another")


def _receive(transport: Transport, look: Look, path: Path, size: int, device: torch.device) -> Found | None:
    """The leader's bytes; None when the leader was lost on the way."""
    data = look.data if look.found else torch.zeros(size, dtype=torch.uint8)
    transport.broadcast([data])
    try:
        return look.found or Found(path, parse(sealing.view(data), path=path, device=device))
    except ValueError:  # the leader has read it, so these are other bytes
        return None


def look_at(path: Path, *, device: torch.device, missing_ok: bool) -> Look:
    """Read the file, or the newest whole one of a folder's automatic checkpoints."""
    if path.is_dir():
        return _newest_whole(path, device=device, missing_ok=missing_ok)
    if missing_ok and not path.exists():
        return Look()
    try:
        return _open(path, device)
    except ValueError as error:
        return Look(problem=str(error))


def _open(path: Path, device: torch.device) -> Look:
    try:
        data = sealing.read(path)
    except OSError as error:
        raise ValueError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    return Look(Found(path, parse(sealing.view(data), path=path, device=device)), data)


def _newest_whole(folder: Path, *, device: torch.device, missing_ok: bool) -> Look:
    damaged: list[str] = []
    for path in shelf.newest_first(folder):
        try:
            return _open(path, device)._replace(warnings=tuple(f"{text}: passed over" for text in damaged))
        except sealing.NewerVersion as error:  # it is whole: going back behind it would lose what it holds
            return Look(problem=str(error))
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        return Look(problem=f"no checkpoint in {folder} is whole: {'; '.join(damaged)}")
    said = f"{folder} holds no checkpoint of fleet.autosave; fleet.load(..., missing_ok=True) then starts anew"
    return Look(problem=None if missing_ok else said)


class _Reader(io.RawIOBase):
    """Bytes in memory as a file, without another copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        part = self._data[self._at : self._at + len(room)]
        room[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def parse(data: bytes | memoryview, *, path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, or a ValueError that says what is wrong with it."""
    view = memoryview(data)
    sealed = sealing.sealed_version(view, path)
    content = _unpickled(view, path, device)
    version = content.get("paceline_checkpoint") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by fleet.save")
    if version > sealing.VERSION:
        raise sealing.NewerVersion(f"{path} was written by a newer version of Paceline: update this one to read it")
    if version > 1 and sealed is None:
        raise ValueError(f"{path} is not a whole checkpoint: its end, with the checksum, is missing or damaged")
    if any(not isinstance(content.get(key), kind) for key, kind in _PARTS.items()):
        raise ValueError(f"{path} was not written by fleet.save: parts of it are missing")
    return dict(content)


def _unpickled(data: memoryview, path: Path, device: torch.device) -> Any:
    try:
        if bytes(data[:4]) != b"PK\x03\x04":  # torch has older readers too, for files that we never wrote
            raise EOFError
        file: Any = _Reader(data)
        return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # whatever garbage makes the reader do
        raise ValueError(f"{path} is not a whole checkpoint: it cannot be read ({type(error).__name__})") from None


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


def check_length(path: Path | str, steps: Mapping[str, Any] | None, length: int | None) -> None:
    """Raise ValueError when the checkpoint belongs to a dataset of another length; None: nobody knows it, or no loop
    had begun."""
    saved = (steps or {}).get("dataset_length")
    if saved is not None and length is not None and saved != length:
        raise ValueError(
            f"{path} belongs to other data: dataset_length was {saved} and is {length} now; give it the dataset it was "
            "saved with, or start anew"
        )


def restore(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], models: Sequence[nn.Module]) -> None:
    """Load everything that `must_match` let pass, or raise ValueError and leave everything as it was."""
    restore_tracked(path, saved["tracked"], tracked)
    for model, state in zip(models, saved["models"], strict=True):
        model.load_state_dict(state)


def restore_tracked(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any]) -> None:
    """The part of `restore` that is not the models'; things that ``saved`` does not know stay as they are."""
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
    for name, thing in tracked.items():
        if name not in saved:
            continue
        try:
            load_into(thing, saved[name])
        except Exception as error:
            for other, state in before.items():
                load_into(tracked[other], state)
            raise ValueError(f"{path}: the state of {name} does not fit: {str(error).splitlines()[0]}") from None


def load_into(thing: Any, state: Any) -> None:
    if state or not isinstance(thing, torch.amp.GradScaler):  # a disabled scaler saves nothing and takes nothing
        thing.load_state_dict(state)


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
