"""Checkpoints: everything a run needs to go on, in one file, written whole or not at all.

Files are read with ``weights_only``: a checkpoint holds tensors and plain values, and loading one executes nothing.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VERSION = 1


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
    finally:
        temporary.unlink(missing_ok=True)


def parse(data: bytes, *, path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, or a ValueError that says what is wrong with it."""
    try:
        content = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"{path} is not a whole checkpoint: {reason[0] if reason else type(error).__name__}") from None
    if not isinstance(content, dict) or "paceline_checkpoint" not in content:
        raise ValueError(f"{path} was not written by fleet.save")
    if content["paceline_checkpoint"] > VERSION:
        raise ValueError(f"{path} was written by a newer version of Paceline")
    return content


def must_match(path: Path, saved: Mapping[str, Any], tracked: Mapping[str, Any], models: int) -> None:
    """Raise ValueError when the checkpoint and the script do not hold the same things."""
    if len(saved["models"]) != models:
        raise ValueError(f"{path} holds {len(saved['models'])} models, and fleet.model was called {models} times")
    missing, extra = sorted(set(tracked) - set(saved["tracked"])), sorted(set(saved["tracked"]) - set(tracked))
    if missing or extra:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"holds {', '.join(extra)}, which the script does not track"] if extra else []
        raise ValueError(
            f"{path} {' and '.join(said)}: fleet.track(...) must name the same things as when it was saved"
        )
