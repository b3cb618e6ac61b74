"""The pool of worker processes: what a worker wrote before it ended is never lost. No process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from typing import IO, Any

from paceline.launcher.output import WorkerFailure
from paceline.launcher.pool import LINGER_S, WorkerPool
from paceline.launcher.worker_process import LaunchedWorker, Signals


class Ended(LaunchedWorker):
    """A worker that has written its last words, and ended."""

    def __init__(self, number: int, stderr: bytes) -> None:
        super().__init__(number)
        ends = [os.pipe(), os.pipe()]
        os.write(ends[1][1], stderr)
        for _, write in ends:
            os.close(write)
        self._pipes = os.fdopen(ends[0][0], "rb", 0), os.fdopen(ends[1][0], "rb", 0)

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        return self._pipes

    def reap(self) -> bool:
        if self.code is not None:
            return False
        self.code = 1
        return True

    def send(self, number: int) -> None: ...

    def resume(self) -> None: ...

    def wait(self) -> None: ...


class Lines:
    broken = False

    def __init__(self) -> None:
        self.text = ""

    def err(self, text: str) -> None:
        self.text += text

    out = err


def test_what_a_worker_wrote_is_read_before_its_end_is_handled_however_busy_the_launcher_is() -> None:
    def start(number: int, environment: Mapping[str, str]) -> LaunchedWorker:
        return Ended(number, b'a warning\n  File "train.py", line 1\n    (\nSyntaxError: never closed')

    screen: Any = Lines()
    with Signals() as signals, closing(WorkerPool((), signals=signals, screen=screen, leave_s=1, start=start)) as pool:
        pool.start(0, {})
        [worker] = pool.reap(10.0)
        failure = WorkerFailure(worker, 10.0)
        assert failure.lines[-1] == "SyntaxError: never closed"
        assert screen.text == "a warning\n"
        assert pool.drained(worker, 10.0 + 2 * LINGER_S)  # a launcher that was busy all that time
