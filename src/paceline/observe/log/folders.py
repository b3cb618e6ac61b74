"""Where a run's files live: one folder a run, ``runs/<time>-<name>/``, with the event log in it."""

from __future__ import annotations

import re
import time
from itertools import count
from pathlib import Path

LOG_NAME = "events.jsonl"


def new_run_dir(root: Path, name: str) -> Path:
    """Make and return ``root/<time>-<name>/``: unique, and of characters that are safe in any shell.

    Raises ValueError when it cannot be made, so that a run does not start that could not be recorded.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{_safe(name)}"
    for attempt in count(1):
        folder = Path(root) / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True, exist_ok=False)
            return folder
        except FileExistsError as error:
            if not folder.is_dir():  # the root, or one of its parents, is a file: no other name will help
                raise ValueError(_cannot(root, error)) from error
        except OSError as error:
            raise ValueError(_cannot(root, error)) from error
    raise AssertionError("unreachable")


def latest(root: Path) -> Path | None:
    """The run folder under ``root`` whose log was written to last; None when there is no run."""
    logs = [(log.stat().st_mtime_ns, log.parent.name, log.parent) for log in Path(root).glob(f"*/{LOG_NAME}")]
    return max(logs)[2] if logs else None


def log_file(path: Path) -> Path:
    """The event log meant by ``path``: the file itself, or the one in that folder."""
    path = Path(path)
    return path / LOG_NAME if path.is_dir() else path


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60].rstrip("-._") or "run"


def _cannot(root: Path, error: OSError) -> str:
    return f"cannot make a run folder in {root} ({error.strerror or error}): choose one that can be written"
