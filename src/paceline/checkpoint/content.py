"""The content of a checkpoint: plain values and tensors, whether they fit the script, and their restoring.

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

from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint import shards
from paceline.transport import Collective

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype)


def plain(value: Any, where: str) -> Any:
    """Return ``value`` in types that load without executing anything; NumPy's numbers become Python's.

    Raise ValueError that names the part for which this is impossible: better now than when the checkpoint is needed.
    """
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
    """Return plain values and tensors as bytes, to be sent to a peer."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(data: torch.Tensor, *, device: torch.device) -> dict[str, Any]:
    """Return what `pack` packed; nothing in it is executed."""
    try:
        file: Any = checkpoint_file.BytesReader(checkpoint_file.view(data))
        content: Any = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # damaged bytes make the reader raise anything
        raise ValueError(
            "a peer's state cannot be read: it holds more than tensors and plain values, and nothing in it is executed "
            f"({type(error).__name__})"
        ) from None
    return dict(content)


def must_match(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], models: Sequence[nn.Module]) -> None:
    """Raise ValueError when the checkpoint and the script do not hold the same things."""
    if len(saved["models"]) != len(models):
        raise ValueError(f"{path} holds {len(saved['models'])} models, and fleet.model was called {len(models)} times")
    for model, state in zip(models, saved["models"], strict=True):
        ours, theirs = _shapes(model.state_dict()), _shapes(state)
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                difference = (
                    f"{theirs.get(name, 'missing')} in the checkpoint and {ours.get(name, 'missing')} in the model"
                )
                raise ValueError(f"{path} does not fit the model: {name} is {difference}")
    missing, extra = sorted(set(tracked) - set(saved["tracked"])), sorted(set(saved["tracked"]) - set(tracked))
    if missing or extra:
        difference = " and ".join(
            [f"lacks {', '.join(missing)}"] * bool(missing)
            + [f"holds {', '.join(extra)}, which the script does not track"] * bool(extra)
        )
        raise ValueError(f"{path} {difference}: fleet.track(...) must name the same things as when it was saved")


def check_length(path: Path | str, steps: Mapping[str, Any] | None, length: int | None) -> None:
    """Raise ValueError when the checkpoint belongs to a dataset of another length.

    A length of None, for a stream or where no loop had begun, passes.
    """
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
    """Load everything that `must_match` let pass, or raise ValueError and leave everything as it was.

    ``inside`` connects the processes of a worker of several, whose first alone has the large tensors.
    """
    restore_tracked(path, saved["tracked"], tracked, inside=inside)
    _load_models(models, saved["models"], inside)


def take_over(
    path: Path,
    saved: Mapping[str, Any],
    tracked: Mapping[str, Any],
    models: Sequence[nn.Module],
    *,
    inside: Collective | None = None,
) -> None:
    """Load a peer's state, whose tensors nobody else holds: tracked objects may keep them.

    A state that does not fit raises ValueError and ends this worker, so nothing is kept to go back to.
    """
    for name, thing in tracked.items():
        if name in saved["tracked"]:
            _load_tracked(path, name, thing, saved["tracked"][name], inside)
    _load_models(models, saved["models"], inside)


def _load_models(models: Sequence[nn.Module], states: Sequence[Any], inside: Collective | None) -> None:
    for model, state in zip(models, states, strict=True):
        load_into(model, state, inside)


def _load_tracked(path: Path, name: str, thing: Any, state: Any, inside: Collective | None) -> None:
    try:
        load_into(thing, state, inside)
    except Exception as error:
        raise ValueError(f"{path}: the state of {name} does not fit: {str(error).splitlines()[0]}") from None


def restore_tracked(
    path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], *, inside: Collective | None = None
) -> None:
    """Load the tracked objects alone; objects that are not in ``saved`` stay as they are."""
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
    for name, thing in tracked.items():
        if name not in saved:
            continue
        try:
            _load_tracked(path, name, thing, saved[name], inside)
        except ValueError:
            for other, state in before.items():
                load_into(tracked[other], state)
            raise


def load_into(thing: Any, state: Any, inside: Collective | None = None) -> None:
    if inside is not None:
        state = shards.handed_out(state, shards.parts_of(thing), inside)
    if state or not isinstance(thing, torch.amp.GradScaler):  # a disabled scaler saves nothing and takes nothing
        thing.load_state_dict(state)


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
