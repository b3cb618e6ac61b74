"""A folder of checkpoints that were saved automatically: their names, and which of them are kept.

Only files whose names are exactly such a name are ever looked at, moved or removed.
"""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,18})\.paceline")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint before step ``step`` (counted from 0) lies.

    >>> path_of(Path("saved"), 120).name
    'step-00000120.paceline'
    """
    return folder / f"step-{step:08d}.paceline"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None when the name is not one of ours.

    >>> step_of(Path("step-00000120.paceline")), step_of(Path("step-120.paceline.bak"))
    (120, None)
    """
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name is not None and path.name == path_of(path.parent, int(name[1])).name else None


def newest_first(folder: Path) -> list[Path]:
    """The folder's checkpoints; none when there is no such folder."""
    try:
        files = [entry for entry in folder.iterdir() if step_of(entry) is not None]
    except FileNotFoundError:
        return []
    return sorted(files, key=lambda file: step_of(file) or 0, reverse=True)


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest ``keep``."""
    for file in newest_first(folder)[keep:]:
        file.unlink(missing_ok=True)


def set_aside(folder: Path, *, beyond: int) -> list[Path]:
    """Give checkpoints of later steps than ``beyond`` another name; returns the new names.

    They belong to another training, or to one that was taken up again further back: under their own names they would
    be taken for this training's newest, and its own would be removed before them.
    """
    later = [file for file in newest_first(folder) if (step_of(file) or 0) > beyond]
    return [_rename(file) for file in later]


def _rename(file: Path) -> Path:
    names = (file.with_name(f"{file.name}.aside{number}") for number in count(1))
    new = next(name for name in names if not name.exists())
    os.rename(file, new)
    return new
