"""Loading of a checkpoint on every worker; only the leader needs to reach the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint import shards
from paceline.checkpoint.shards import outline
from paceline.transport import Transport

_PARTS: dict[str, type] = {"models": list, "tracked": dict, "pace": dict, "seed": int}
"""Parts of every checkpoint, of any version, with their types."""
ATTEMPTS = 10
"""Leaders that may be lost while they send a checkpoint to all."""


class Found(NamedTuple):
    """A checkpoint and its path."""

    path: Path
    content: dict[str, Any]


class Lookup(NamedTuple):
    """The leader's result at a path: a checkpoint, or a problem, or neither when nothing was there."""

    found: Found | None = None
    data: torch.Tensor = torch.empty(0, dtype=torch.uint8)
    problem: str | None = None
    warnings: tuple[str, ...] = ()
    """Checkpoints that were passed over, and why."""


def fetch(
    transport: Transport, path: Path, *, device: torch.device, missing_ok: bool, warn: Callable[[str], None]
) -> Found | None:
    """Return the checkpoint at ``path`` on every worker; only the leader needs to reach it.

    Args:
        transport: connects the workers.
        path: a file, or a folder, of which the newest complete checkpoint is read.
        device: device that tensors are loaded to.
        missing_ok: return None when nothing is there; else ValueError is raised.
        warn: receives the reasons for which checkpoints were passed over.
    """
    for _ in range(ATTEMPTS):
        lookup = Lookup()

        def mine() -> list[Any]:
            nonlocal lookup
            reads = transport.rank == 0 and transport.shard == 0
            lookup = look_up(path, device=device, missing_ok=missing_ok) if reads else Lookup()
            return [str(lookup.found.path) if lookup.found else None, len(lookup.data), lookup.problem, lookup.warnings]

        where, size, problem, warnings = transport.gather("fleet.load()", mine)[0]
        for text in warnings:
            warn(text)
        if problem:
            raise ValueError(problem)
        if where is None:
            return None
        found = _receive(transport, lookup, Path(where), size if transport.shard == 0 else 0, device)
        if transport.shards > 1:
            outlined = transport.from_first("the checkpoint", found and Found(found.path, outline(found.content)))
            found = found if transport.shard == 0 else outlined
        if all(transport.gather("the checkpoint that was read", found is not None)):
            return found
    raise ValueError(f"{path} did not reach every worker: the workers that read it were lost, one after another")


def _receive(transport: Transport, lookup: Lookup, path: Path, size: int, device: torch.device) -> Found | None:
    """Return the leader's checkpoint; None when the leader was lost on the way."""
    data = lookup.data if lookup.found else torch.zeros(size, dtype=torch.uint8)
    transport.broadcast([data], inside=False)
    if transport.shard:
        return None
    try:
        return lookup.found or Found(path, parse(checkpoint_file.view(data), path=path, device=device))
    except ValueError:  # the leader has read it, so these are other bytes
        return None


def look_up(path: Path, *, device: torch.device, missing_ok: bool) -> Lookup:
    """Read the file, or the newest complete one of a folder's automatic checkpoints.

    What killed writers left there is removed.
    """
    checkpoint_file.remove_abandoned(path if path.is_dir() else path.parent)
    if shards.is_folder(path):
        return _look_into(path)
    if path.is_dir():
        return _newest_whole(path, device=device, missing_ok=missing_ok)
    if missing_ok and not path.exists():
        return Lookup()
    try:
        return _open(path, device)
    except ValueError as error:
        return Lookup(problem=str(error))


def _look_into(folder: Path) -> Lookup:
    """Read a checkpoint that several processes wrote; for other workers it becomes the bytes of one file."""

    def rest(path: Path) -> dict[str, Any]:
        return parse(checkpoint_file.view(checkpoint_file.read(path)), path=path, device=torch.device("cpu"))

    try:
        content = shards.read_folder(folder, rest)
    except (OSError, ValueError) as error:
        return Lookup(problem=str(error))
    return Lookup(Found(folder, content), checkpoint_file.bytes_of(content))


def _open(path: Path, device: torch.device) -> Lookup:
    try:
        data = checkpoint_file.read(path)
    except OSError as error:
        raise ValueError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    return Lookup(Found(path, parse(checkpoint_file.view(data), path=path, device=device)), data)


def _newest_whole(folder: Path, *, device: torch.device, missing_ok: bool) -> Lookup:
    damaged: list[str] = []
    for path in checkpoint_file.newest_first(folder):
        try:
            return _open(path, device)._replace(warnings=tuple(f"{text}: passed over" for text in damaged))
        except checkpoint_file.NewerVersion as error:  # it is whole: going back behind it would lose what it holds
            return Lookup(problem=str(error))
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        return Lookup(problem=f"no checkpoint in {folder} is whole: {'; '.join(damaged)}")
    problem = f"{folder} holds no checkpoint of fleet.autosave; fleet.load(..., missing_ok=True) then starts anew"
    return Lookup(problem=None if missing_ok else problem)


def parse(data: bytes | memoryview, *, path: Path, device: torch.device) -> dict[str, Any]:
    """Return the content of a checkpoint; raise ValueError when it is damaged or foreign."""
    view = memoryview(data)
    checked = checkpoint_file.checked_version(view, path)
    content = _unpickled(view, path, device)
    version = content.get("paceline_checkpoint") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path} was not written by fleet.save")
    if version > checkpoint_file.VERSION:
        raise checkpoint_file.NewerVersion(
            f"{path} was written by a newer version of Paceline: update this one to read it"
        )
    if version > 1 and checked is None:
        raise ValueError(f"{path} is not a whole checkpoint: its end, with the checksum, is missing or damaged")
    if any(not isinstance(content.get(key), kind) for key, kind in _PARTS.items()):
        raise ValueError(f"{path} was not written by fleet.save: parts of it are missing")
    return dict(content)


def _unpickled(data: memoryview, path: Path, device: torch.device) -> Any:
    try:
        if bytes(data[:4]) != b"PK\x03\x04":  # torch has older readers too, for files that we never wrote
            raise EOFError
        file: Any = checkpoint_file.BytesReader(data)
        return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # damaged bytes make the reader raise anything
        raise ValueError(f"{path} is not a whole checkpoint: it cannot be read ({type(error).__name__})") from None
