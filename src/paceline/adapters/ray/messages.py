"""The data that the driver and a worker's actor exchange, and the run's log merged from it. Works without Ray."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import concurrency
from paceline.observe.log.reader import parse_line
from paceline.observe.log.run_folder import LOG_NAME

MARK = "driver.mark"
"""File in the run's folder: a node that sees the driver's shares its disk, and need not send the run's log."""


@dataclass(frozen=True)
class NodeOrder:
    """Request for one process of a worker."""

    number: int
    called: tuple[str, ...]
    """Arguments of the interpreter: the script and its arguments, or ``-m``, a module and its arguments."""
    function: bytes | None
    """Pickled function of no arguments, in place of a script."""
    environment: Mapping[str, str]
    folder: str
    """The driver's working folder: the process's, too, where it exists and Ray brings no other."""
    run_dir: str
    mark: str
    """Content of the driver's `MARK`."""


@dataclass(frozen=True)
class Began:
    """Report that the actor has a node, and its process runs there."""

    node: str
    address: str


@dataclass(frozen=True)
class Printed:
    """Bytes of the process's stdout (0) or stderr (1)."""

    stream: int
    data: bytes


@dataclass(frozen=True)
class Logged:
    """Complete lines of the run's log on the node, from this byte of the file on."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Ended:
    """Report that the process has ended, and all it wrote was sent; ``value`` is what a function returned, pickled."""

    code: int
    value: bytes = b""


Message = Began | Printed | Logged | Ended


class LogCollector:
    """Writer of the log in ``run_dir``, which appends what is new in the nodes' reports.

    Workers of one node read the same file and send the same lines: by their offset in it each counts once. A leader on
    a node without the log begins one with a second ``run`` event, which would begin another run: it is left out.
    """

    def __init__(self, run_dir: Path) -> None:
        self.mark = secrets.token_hex(8)
        self._run_dir, self._lock = run_dir, concurrency.Lock()
        self._read: dict[str, int] = {}
        """Bytes that are known of each node's file."""
        (run_dir / MARK).write_text(self.mark)

    def add(self, node: str, offset: int, data: bytes) -> None:
        """Append a node's new lines; any thread may call it."""
        with self._lock:
            fresh = data[max(0, self._read.get(node, 0) - offset) :]
            self._read[node] = max(self._read.get(node, 0), offset + len(data))
            if not fresh:
                return
            with (self._run_dir / LOG_NAME).open("ab") as file:
                lines = fresh.splitlines(keepends=True)
                file.writelines(lines if file.tell() == 0 else [line for line in lines if not _begins(line)])

    def close(self) -> None:
        with suppress(OSError):
            (self._run_dir / MARK).unlink()


def _begins(line: bytes) -> bool:
    event = parse_line(line) if b'"run"' in line[:40] else None
    return event is not None and event["event"] == "run"
