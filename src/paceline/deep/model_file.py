"""Model files: plain tensors and a few numbers, written by ``paceline learn``. Reading one never runs code in it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from paceline.deep.model import DeepModel
from paceline.deep.serialize import VERSION, build

KIND = "paceline deep forecast"


def save_model(model: DeepModel, path: str | Path, *, about: dict[str, Any] | None = None) -> None:
    """Write the model, whole or not at all. ``about`` is a note of plain values: where it came from, how it scored."""
    target = Path(path)
    content = {
        "kind": KIND,
        "version": VERSION,
        "shape": model.shape.as_dict(),
        "weights": {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
        "about": dict(about or {}),
    }
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save(content, part)
        part.replace(target)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"cannot write the model to {target}: {error}") from error


def load_model(path: str | Path) -> DeepModel:
    """The model in a file; ValueError for a file that is missing, damaged, not ours or of another version."""
    file, content = Path(path), _read(Path(path))
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{file} is not a forecast that `paceline learn` wrote")
    weights = content.get("weights")
    if not isinstance(weights, dict) or not isinstance(content.get("shape"), dict):
        raise ValueError(f"{file} is damaged: it has no weights or no sizes; learn it again")
    try:
        return build(content.get("version"), content["shape"], weights)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}; learn it again with this version") from None


def _read(file: Path) -> Any:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the model {file}: {error.strerror or error}") from None
    try:
        # weights_only refuses everything but tensors and plain values, so nothing in the file is ever executed.
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # bytes that are no model may trip the reader in any way
        raise ValueError(f"{file} is not a forecast that `paceline learn` wrote, or it is damaged") from None
