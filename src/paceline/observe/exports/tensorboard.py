"""A run as TensorBoard's event file, written without TensorBoard: torch's own writer needs its package.

The file is a list of records (length, checksum, bytes, checksum); each holds one `Event` message of protocol buffers,
of which scalars need five fields. Checksums are CRC-32C, masked as the format asks.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.observe.analysis.evaluations import evaluations
from paceline.observe.exports.scalars import scalars
from paceline.observe.log.logged import logged
from paceline.observe.log.reader import RunLog

MOST_STEPS = 10_000
"""Of a longer run every few steps are written: TensorBoard draws a thousand points a curve."""


def write_tensorboard(log: RunLog, folder: Path) -> Path:
    """Write ``folder/events.out.tfevents…`` with every figure of `scalars`, and what was evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    started = _time(log)
    file = folder / f"events.out.tfevents.{int(started):010d}.{socket.gethostname()}"
    with file.open("wb") as out:
        out.write(record(_double(1, started) + _bytes(3, b"brain.Event:2")))
        for step, t, figures in _rows(log):
            out.write(record(_double(1, t) + _int(2, step) + _bytes(5, _summary(figures))))
    return file


def _rows(log: RunLog) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    every = -(-len(log.records) // MOST_STEPS) or 1
    started = _time(log)
    for each, t in list(zip(log.records, log.times))[::every]:
        yield each.step, t if math.isfinite(t) else started, scalars(each)
    for found in evaluations(log.others):
        means = {f"evaluate/{name}": value for name, value in found.means.items()}
        yield found.step, found.t if math.isfinite(found.t) else started, means
    for step, t, figures in logged(log.others):
        yield step, t if math.isfinite(t) else started, figures


def _time(log: RunLog) -> float:
    t = log.run.get("started", log.run.get("t"))
    return float(t) if isinstance(t, (int, float)) else time.time()


def _summary(figures: Mapping[str, float]) -> bytes:
    return b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in figures.items())


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    largest = 3.4e38  # what a 32-bit float holds
    return _varint(field << 3 | 5) + struct.pack("<f", min(max(value, -largest), largest))


def record(data: bytes) -> bytes:
    """The bytes between their length and checksums."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
