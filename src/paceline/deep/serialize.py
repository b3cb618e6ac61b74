"""A deep model and its arrays in plain JSON types: numbers as base64 of little-endian bytes, so nothing is rounded."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.deep.model import DeepModel, Shape

VERSION = 1
"""Version of the model's networks and of their inputs: weights of another one mean something else."""


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """The array as plain types."""
    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">":
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    return {"dtype": plain.dtype.str, "shape": list(plain.shape), "bytes": base64.b64encode(plain.tobytes()).decode()}


def unpack(plain: Mapping[str, Any]) -> NDArray[Any]:
    array = np.frombuffer(base64.b64decode(plain["bytes"]), dtype=np.dtype(plain["dtype"]))
    return array.reshape(plain["shape"]).copy()


def pack_model(model: DeepModel) -> dict[str, Any]:
    """Sizes and weights as plain types."""
    weights = {name: pack(tensor.numpy()) for name, tensor in model.state_dict().items()}
    return {"version": VERSION, "shape": model.shape.as_dict(), "weights": weights}


def unpack_model(plain: Mapping[str, Any]) -> DeepModel:
    weights = {name: torch.from_numpy(unpack(packed)) for name, packed in plain["weights"].items()}
    return build(plain["version"], plain["shape"], weights)


def build(version: Any, shape: Any, weights: Mapping[str, Any]) -> DeepModel:
    """A model from its parts, each of which is checked: a ValueError says which one is not ours."""
    if version != VERSION:
        raise ValueError(f"a deep forecast of version {version!r}, where this Paceline reads version {VERSION}")
    try:
        sizes = Shape(**shape)
    except TypeError:
        raise ValueError(f"the sizes of a deep forecast are not {shape!r}") from None
    with torch.device("meta"):
        model = DeepModel(sizes)
    _check_weights(model, weights)
    model.load_state_dict(dict(weights), assign=True)
    return model.requires_grad_(False).eval()


def _check_weights(model: DeepModel, weights: Mapping[str, Any]) -> None:
    wanted = model.state_dict()
    if set(weights) != set(wanted):
        odd = min(set(weights) ^ set(wanted))
        raise ValueError(f"the weights of a deep forecast do not match its networks: {odd!r}")
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != wanted[name].shape or tensor.dtype != torch.float32:
            raise ValueError(f"the weights {name!r} of a deep forecast do not have the size that was announced")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the weights {name!r} of a deep forecast are not all finite")
