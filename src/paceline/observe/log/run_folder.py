"""A run's folder, ``runs/<time>-<name>/`` with the event log in it, and the lock that its writer holds there.

One run at a time writes into a folder. The lock is a POSIX lock on the file ``run.lock``. The system drops it with the
process, whatever that dies of, so that a crashed run blocks nobody; loader processes do not inherit it. It keeps other
processes out, on other computers too where the folder's file system passes locks on (NFS does; it may take a minute or
two to notice that a computer is gone). On a file system without locks nothing is kept out.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from itertools import count
from pathlib import Path
from typing import IO, Any

from paceline import concurrency

LOG_NAME = "events.jsonl"
LOCK_NAME = "run.lock"
PATIENCE_S = 2.0
"""Seconds to wait for a run that is just ending."""
POLL_S = 0.05


def new_run_dir(root: Path, name: str) -> Path:
    """Make and return a new folder ``root/<time>-<name>/``, named in characters that are safe in any shell.

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
    """Return the run folder under ``root`` whose log was written to last; None when there is no run."""
    logs = [(log.stat().st_mtime_ns, log.parent.name, log.parent) for log in Path(root).glob(f"*/{LOG_NAME}")]
    return max(logs)[2] if logs else None


def log_file(path: Path) -> Path:
    """Return the event log meant by ``path``: the file itself, or the one in that folder."""
    path = Path(path)
    return path / LOG_NAME if path.is_dir() else path


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60].rstrip("-._") or "run"


def _cannot(root: Path, error: OSError) -> str:
    return f"cannot make a run folder in {root} ({error.strerror or error}): choose one that can be written"


class FolderInUse(ValueError):
    """Error: another run writes into the folder."""


class FolderLock:
    """A lock on a run's folder, held until `release`, or until nothing refers to this object any more."""

    def __init__(self, path: Path, file: IO[bytes] | None) -> None:
        self._path, self._file = path, file

    def release(self) -> None:
        if self._file is None:
            return
        if _same(self._path, self._file):
            self._path.unlink(missing_ok=True)
        self._file.close()
        self._file = None


def lock_folder(folder: Path, *, fleet: str | None = None, patience_s: float = PATIENCE_S) -> FolderLock:
    """Lock a run's folder, or raise `FolderInUse` when another run goes on in it.

    ``fleet`` names a fleet whose workers come and go. A lock held by a worker of the same fleet, which is frozen or cut
    off, is ignored.
    """
    path, until = Path(folder) / LOCK_NAME, concurrency.monotonic() + patience_s
    while True:
        file, holder = _attempt(path, {"pid": os.getpid(), "host": socket.gethostname(), "fleet": fleet})
        if holder is None or (fleet is not None and holder.get("fleet") == fleet):
            return FolderLock(path, file)
        if concurrency.monotonic() >= until:
            who = f" (process {holder['pid']} on {holder['host']})" if {"pid", "host"} <= holder.keys() else ""
            raise FolderInUse(
                f"another run{who} writes into {folder}, and two runs in one folder make one log of both: give another "
                "run_dir, or none for a new folder each time"
            )
        concurrency.sleep(POLL_S)


def _attempt(path: Path, mine: dict[str, Any]) -> tuple[IO[bytes] | None, dict[str, Any] | None]:
    """Return the locked file, with ``mine`` written to it, or its holder; (None, None) where there are no locks."""
    try:
        import fcntl

        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    except (ImportError, OSError):  # the log's writer will warn of what is wrong with the folder
        return None, None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        taken = error.errno in (errno.EACCES, errno.EAGAIN)
        holder = _read(file) if taken else None
        file.close()
        return None, holder
    if not _same(path, file):  # the last holder removed the file after it was opened here
        file.close()
        return None, {}
    file.truncate(0)
    file.write(json.dumps(mine).encode())
    return file, None


def _same(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _read(file: IO[bytes]) -> dict[str, Any]:
    try:
        holder = json.loads(file.read(4096))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
