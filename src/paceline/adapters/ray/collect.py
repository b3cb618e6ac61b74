"""The run's log, put together on the driver's disk from what the nodes send of theirs."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from paceline import concurrency
from paceline.adapters.ray.messages import MARK
from paceline.observe.log.folders import LOG_NAME
from paceline.observe.log.reader import parse_line


class LogCollector:
    """Appends to the log in ``run_dir`` what is new. Workers of one node read the same file and send the same lines:
    by their place in it each counts once. A leader on a node without the log begins one with a second ``run`` event,
    which would begin another run: it is left out."""

    def __init__(self, run_dir: Path) -> None:
        self.mark = secrets.token_hex(8)
        self._run_dir, self._lock = run_dir, concurrency.Lock()
        self._read: dict[str, int] = {}
        """How far each node's file is known, in bytes."""
        (run_dir / MARK).write_text(self.mark)

    def add(self, node: str, offset: int, data: bytes) -> None:
        """Called from any thread."""
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
