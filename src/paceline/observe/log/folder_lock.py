"""One run at a time writes into a folder: the lock that its writer holds there.

It is a POSIX lock on the file ``run.lock`` in the run's folder. The system drops it with the process, whatever
that dies of, so that a crashed run blocks nobody; loader processes do not inherit it. It keeps other processes out, on
other computers too where the folder's file system passes locks on (NFS does; it may take a minute or two to notice
that a computer is gone). Where there are no locks, nothing is kept out.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

from paceline import concurrency

LOCK_NAME = "run.lock"
PATIENCE_S = 2.0
"""How long a run that is just ending is waited for, in seconds."""
POLL_S = 0.05


class FolderInUse(ValueError):
    """Another run writes into the folder."""


class FolderLock:
    """Held on a run's folder until `release`, or until nobody refers to it any more."""

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

    ``fleet`` names the fleet of workers that come and go: one of its own that holds the lock, because it is frozen or
    cut off, keeps nobody out.
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
    """The locked file, with what is ours in it; or who has it. Neither where there are no locks."""
    try:
        import fcntl

        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    except (ImportError, OSError):  # the log itself will say what is wrong with the folder
        return None, None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        taken = error.errno in (errno.EACCES, errno.EAGAIN)
        holder = _read(file) if taken else None
        file.close()
        return None, holder
    if not _same(path, file):  # its last holder removed it between our opening and our locking
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
        told = json.loads(file.read(4096))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
