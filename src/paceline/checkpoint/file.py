"""A checkpoint's bytes on the disk: with a checksum, and there whole or not at all.

The file is what ``torch.save`` writes, a zip archive, so ``torch.load`` reads it without Paceline. Its checksum
stands in one line of text, in the place that zip has for a comment, at the very end: a file that was cut off lacks the
line, and in one that was damaged the checksum (BLAKE2b, 256 bits, over everything before the line) is another. The
checksum guards against accidents, not against forgery.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch

VERSION = 2
"""Of the format; files of version 1 have no checksum."""
_CHECKSUM_LINE = "paceline checkpoint {version} blake2b {digest}\n"
_LINE_SIZE = len(_CHECKSUM_LINE.format(version=VERSION, digest="0" * 64))
_ANY_CHECKSUM_LINE = re.compile(rb"paceline checkpoint (\d{1,6}) ([ -~]*)\n\Z")
_LONGEST = 1024
"""Bytes at the end in which a checksum line, of this version or a later one, is looked for."""
_TEMPORARY = re.compile(r"\..+\.(\d+)@([^@]+)\.tmp")
"""Name of a file that is being written: that of the checkpoint, the process, and the process's computer."""
_ZIP_END = 22
"""Bytes of the record that ends a zip archive; its last two say how long the comment after it is."""


class NewerVersion(ValueError):
    """A whole file, which this Paceline is too old to read."""


class ChecksumWriter:
    """A file to write to that adds up the checksum on the way; `close` writes the line with it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._end = file, blake2b(digest_size=32), b""
        self.error: OSError | None = None
        """The disk's first refusal; what torch's writer makes of it says less."""

    def write(self, data: Any) -> int:
        """Write all but what may be the archive's last record, which is to know the length of the line."""
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
    """Write to a temporary file beside ``path``, flush it to the disk, and put it in place in one move. What killed
    writers left in that folder is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")
    try:
        with _open_locked(temporary) as file:
            _save({"paceline_checkpoint": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _open_locked(temporary: Path) -> IO[bytes]:
    """Open a file for writing and lock it: `remove_abandoned` then spares it. Where the file was removed between the
    two, it is opened again."""
    while True:
        file = temporary.open("wb")
        with suppress(OSError):  # some network disks have no locks: `remove_abandoned` then leaves the file alone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def bytes_of(content: Mapping[str, Any]) -> torch.Tensor:
    """What the file of a checkpoint with this content would hold."""
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
    """A new name is safe only when its folder is on the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checked_version(data: memoryview, path: Path) -> int | None:
    """The version in the checksum line; None: there is no such line. ValueError when the checksum is not the file's."""
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
    """The file's bytes, held once."""
    with path.open("rb") as file:
        data = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        size = file.readinto(view(data))
    return data[:size]


def view(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor of bytes, in place."""
    array: Any = data.numpy()
    return memoryview(array)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files that processes of this computer left when they were killed. A living writer holds a lock
    on its own; files of other computers stay, and so does a file that cannot be locked."""
    for name in _names(folder):
        told = _TEMPORARY.fullmatch(name)
        if told is None or told[2] != socket.gethostname() or _lives_beside(int(told[1])):
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
    """Whether another process has this number. One's own may be that of a process in an earlier container."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is somebody else's
        return True
    return True
