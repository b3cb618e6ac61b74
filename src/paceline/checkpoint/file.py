"""Checkpoint files: written with a checksum and in one move, and the folder of automatic ones.

A file is what ``torch.save`` writes, a zip archive, so ``torch.load`` reads it without Paceline. Its checksum is one
line of text in the zip archive's comment, at the very end: a file that was cut off lacks the line, and in one that was
damaged the checksum (BLAKE2b, 256 bits, over everything before the line) differs. The checksum guards against
accidents, not against forgery.

In a folder of automatic checkpoints, only files with exactly such a name are ever read, moved or removed.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from paceline.roster.liveness import computer, process_state_of

logger = logging.getLogger("paceline")

VERSION = 2
"""Version of the format; files of version 1 have no checksum."""
_CHECKSUM_LINE = "paceline checkpoint {version} blake2b {digest}\n"
_LINE_SIZE = len(_CHECKSUM_LINE.format(version=VERSION, digest="0" * 64))
_ANY_CHECKSUM_LINE = re.compile(rb"paceline checkpoint (\d{1,6}) ([ -~]*)\n\Z")
_LONGEST = 1024
"""Bytes at the end in which a checksum line, of this version or a later one, is searched."""
_TEMPORARY = re.compile(r"\..+\.(\d+)@([^@]+)\.tmp")
"""Name of a file that is being written: that of the checkpoint, the process, and the process's computer."""
OVERTAKEN_NS = 1_000_000_000
"""Nanoseconds by which a file is newer that another process has written meanwhile.

A leader that is replaced was silent for longer, and network disks round the time of a file that nobody touched.
"""
_ZIP_END = 22
"""Bytes of the record that ends a zip archive; its last two hold the length of the comment after it."""


class NewerVersion(ValueError):
    """A complete file that this Paceline is too old to read."""


class ChecksumWriter:
    """A file to write to that computes the checksum on the way; `close` writes the line with it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._end = file, blake2b(digest_size=32), b""
        self.error: OSError | None = None
        """The disk's first error; the one that torch's writer raises has less detail."""

    def write(self, data: Any) -> int:
        """Write all but what may be the archive's last record, which must contain the length of the line."""
        view = memoryview(data)
        if len(view) >= _ZIP_END:
            self._put(self._end)
            self._put(view[:-_ZIP_END])
            self._end = bytes(view[-_ZIP_END:])
        else:
            joined = self._end + bytes(view)
            self._put(joined[:-_ZIP_END])
            self._end = joined[-_ZIP_END:]
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        assert self._end[:4] == b"PK\x05\x06", "torch.save ended with something else than a zip archive's last record"
        self._put(self._end[:-2] + _LINE_SIZE.to_bytes(2, "little"))
        self._file.write(_CHECKSUM_LINE.format(version=VERSION, digest=self._digest.hexdigest()).encode())

    def _put(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write to a temporary file beside ``path``, flush it to the disk, and rename it.

    What killed writers left in that folder is removed. Where another process has written to ``path`` meanwhile, its
    file stays: this one stood still for so long that another leads, and that one's state is the newer one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    before = _written(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")
    try:
        with _open_locked(temporary) as file:
            _save({"paceline_checkpoint": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
            if (now := _written(path)) is not None and (before is None or now - before > OVERTAKEN_NS):
                logger.warning("%s was written by another process meanwhile: its file stays", path)
            else:
                os.replace(temporary, path)
        _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _written(path: Path) -> int | None:
    """Return when the file that is there now was written, in nanoseconds; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _open_locked(temporary: Path) -> IO[bytes]:
    """Open a file for writing and lock it, so that `remove_abandoned` spares it.

    Where the file was removed between the two, it is opened again.
    """
    while True:
        file = temporary.open("wb")
        with suppress(OSError):  # some network disks have no locks: `remove_abandoned` then leaves the file alone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def bytes_of(content: Mapping[str, Any]) -> torch.Tensor:
    """Return the bytes of a checkpoint file with this content."""
    buffer = io.BytesIO()
    _save({"paceline_checkpoint": VERSION, **content}, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _save(content: Mapping[str, Any], file: IO[bytes]) -> None:
    writer: Any = ChecksumWriter(file)
    try:
        torch.save(content, writer)
        writer.close()
    except RuntimeError as error:
        raise writer.error or OSError(str(error).splitlines()[0]) from error


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk: before that, a new name in it is not safe."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checked_version(data: memoryview, path: Path) -> int | None:
    """Return the version in the checksum line; None without such a line. Raise ValueError if the checksum is wrong."""
    line = _ANY_CHECKSUM_LINE.search(data[-_LONGEST:])
    if line is None:
        return None
    version = int(line[1])
    if version > VERSION:
        raise NewerVersion(f"{path} was written by a newer version of Paceline: update this one to read it")
    body = data[: len(data) - len(line[0])]
    if line[0] != _CHECKSUM_LINE.format(version=VERSION, digest=blake2b(body, digest_size=32).hexdigest()).encode():
        raise ValueError(f"{path} is not a whole checkpoint: it is damaged, its checksum is not that of its content")
    return version


def read(path: Path) -> torch.Tensor:
    """Return the file's bytes, held once."""
    with path.open("rb") as file:
        data = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        size = file.readinto(view(data))
    return data[:size]


def view(data: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor of bytes, without a copy."""
    array: Any = data.numpy()
    return memoryview(array)


class BytesReader(io.RawIOBase):
    """A file over bytes in memory, without a copy: a state may be as large as the memory that is left."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        part = self._data[self._at : self._at + len(room)]
        room[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files that processes of this computer left when they were killed.

    A living writer holds a lock on its own; files of other computers stay, and so does a file that cannot be locked.
    """
    for name in _names(folder):
        temporary = _TEMPORARY.fullmatch(name)
        if temporary is None or temporary[2] != socket.gethostname() or _lives_beside(int(temporary[1])):
            continue
        with suppress(OSError), (folder / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / name).unlink()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _lives_beside(pid: int) -> bool:
    """Return whether another process has this id; one's own id may be that of a process in an earlier container."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return not process_state_of(pid, computer()).gone  # a killed worker, before its launcher has noticed


_AUTOMATIC_NAME = re.compile(r"step-(\d{8,18})\.paceline")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint before step ``step`` (counted from 0).

    >>> path_of(Path("saved"), 120).name
    'step-00000120.paceline'
    """
    return folder / f"step-{step:08d}.paceline"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None when the name is not that of an automatic checkpoint.

    >>> step_of(Path("step-00000120.paceline")), step_of(Path("step-120.paceline.bak"))
    (120, None)
    """
    name = _AUTOMATIC_NAME.fullmatch(path.name)
    return int(name[1]) if name is not None and path.name == path_of(path.parent, int(name[1])).name else None


def newest_first(folder: Path) -> list[Path]:
    """Return the folder's checkpoints; none when there is no such folder."""
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
    """Rename checkpoints of later steps than ``beyond``; return the new paths.

    They belong to another training, or to one that was resumed further back: under their own names they would be taken
    for this training's newest, and its own would be removed before them.
    """
    later = [file for file in newest_first(folder) if (step_of(file) or 0) > beyond]
    return [_rename(file) for file in later]


def _rename(file: Path) -> Path:
    names = (file.with_name(f"{file.name}.aside{number}") for number in count(1))
    new = next(name for name in names if not name.exists())
    os.rename(file, new)
    return new
