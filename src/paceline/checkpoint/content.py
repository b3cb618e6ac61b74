"""What a checkpoint holds: plain values and tensors, whether they fit the script, and putting them back.

Files are read with ``weights_only``: a checkpoint holds tensors and plain values, and loading one executes nothing.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint import shards
from paceline.transport import Collective

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
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(data: torch.Tensor, *, device: torch.device) -> dict[str, Any]:
    """What `pack` made; nothing in it is executed."""
    try:
        file: Any = _Bytes(data)
        content: Any = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # whatever garbage makes the reader do
        raise ValueError(
            "a peer's state cannot be read: it holds more than tensors and plain values, and nothing in it is executed "
            f"({type(error).__name__})"
        ) from None
    return dict(content)


class _Bytes(io.RawIOBase):
    """A tensor of bytes as a file, without a copy: a state may be as large as what memory is left."""

    def __init__(self, data: torch.Tensor) -> None:
        array: Any = data.numpy()
        self._view, self._at = memoryview(array), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        part = self._view[self._at : self._at + len(memoryview(into).cast("B"))]
        memoryview(into).cast("B")[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence])
        return self._at


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


def restore(
    path: Path,
    saved: Mapping[str, Any],
    tracked: Mapping[str, Any],
    models: Sequence[nn.Module],
    *,
    inside: Collective | None = None,
) -> None:
    """Load everything that `must_match` let pass, or raise ValueError and leave everything as it was. ``inside``: of
    a worker of several processes, whose first alone has the large tensors."""
    restore_tracked(path, saved["tracked"], tracked, inside=inside)
    for model, state in zip(models, saved["models"], strict=True):
        load_into(model, state, inside)


def restore_tracked(
    path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], *, inside: Collective | None = None
) -> None:
    """The part of `restore` that is not the models'; things that ``saved`` does not know stay as they are."""
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
    for name, thing in tracked.items():
        if name not in saved:
            continue
        try:
            load_into(thing, saved[name], inside)
        except Exception as error:
            for other, state in before.items():
                load_into(tracked[other], state)
            raise ValueError(f"{path}: the state of {name} does not fit: {str(error).splitlines()[0]}") from None


def load_into(thing: Any, state: Any, inside: Collective | None = None) -> None:
    if inside is not None:
        state = shards.handed_out(state, shards.parts_of(thing), inside)
    if state or not isinstance(thing, torch.amp.GradScaler):  # a disabled scaler saves nothing and takes nothing
        thing.load_state_dict(state)


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
