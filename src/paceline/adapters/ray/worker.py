"""A worker as the driver sees it: an actor of Ray that stands for a process (`paceline.launcher.worker_process`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import ray
from ray.exceptions import RayActorError, RayError

from paceline import concurrency
from paceline.adapters.ray.messages import Began, Ended, Logged, Message, Printed
from paceline.errors import describe_exit
from paceline.launcher.worker_process import LaunchedWorker

NEVER_RAN = 1
"""Exit code of a worker that Ray could not start."""


UNFIT = ("creation task", "runtime_env", "runtime environment")
"""Parts of Ray's error for an actor that no node could start, however often it were tried."""


class RayWorker(LaunchedWorker):
    """A worker whose actor's messages a thread receives.

    ``logged`` receives the node and its part of the run's log, ``returned`` what a function has returned.
    """

    def __init__(
        self,
        number: int,
        actor: Any,
        stream: Any,
        *,
        logged: Callable[[str, int, bytes], None],
        returned: Callable[[int, bytes], None],
    ) -> None:
        super().__init__(number)
        self.node: str | None = None
        """Id of the node on which it runs; None while it waits for one."""
        self.address = ""
        self.since = concurrency.monotonic()
        self.lost = False
        """Whether its node, or at least its actor, is gone."""
        self._actor, self._stream, self._logged, self._returned = actor, stream, logged, returned
        self._outcome: int | None = None
        self._how = ""
        self._asked: Any = None
        self._asked_at = 0.0
        reads, self._writes = [], []
        for _ in range(2):
            read, write = os.pipe()
            reads.append(os.fdopen(read, "rb", buffering=0))
            self._writes.append(os.fdopen(write, "wb", buffering=0))
        self._reads: tuple[IO[bytes], IO[bytes]] = (reads[0], reads[1])
        self._thread = concurrency.Thread(target=self._follow, name="paceline-ray", daemon=True)
        self._thread.start()

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        return self._reads

    @property
    def ended(self) -> str:
        assert self.code is not None
        return self._how or describe_exit(self.code)

    def reap(self) -> bool:
        if not self.running or self._outcome is None:
            return False
        self.code = self._outcome
        self._end_actor()
        return True

    def send(self, number: int) -> None:
        if not self.running:
            return
        self._note_signal()
        if number == signal.SIGKILL or self.node is None:  # an actor that waits for a node cannot be called
            self._end(-number)
        else:
            self._actor.send.remote(number)

    def suspend(self) -> None:
        self._actor.send.remote(int(signal.SIGSTOP))

    def resume(self) -> None:
        if self.running and self.node is not None:
            self._actor.send.remote(int(signal.SIGCONT))

    def wait(self) -> None:
        self._thread.join(timeout=5.0)

    def unanswered_s(self, now: float) -> float:
        """Return for how many seconds the actor has not answered a query; 0 when it has."""
        if self._asked is None:
            self._asked, self._asked_at = self._actor.answer.remote(), now
        if ray.wait([self._asked], timeout=0.0)[0]:
            self._asked = None
            return 0.0
        return now - self._asked_at

    def give_up(self, how: str) -> None:
        """End a worker whose node is gone, whether Ray has noticed it yet or not."""
        self.lost = True
        self._end(-signal.SIGKILL, how)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            for reference in self._stream:
                for message in ray.get(reference):
                    self._take(message)
        except RayActorError as error:
            self._lost(error)
        except RayError as error:  # not started: its environment cannot be made, or a package is missing
            self._complain(error)
        except Exception as error:  # the driver has left the cluster meanwhile
            self._settle(-signal.SIGKILL, f"was lost ({error})")
        finally:
            self._settle(-signal.SIGKILL, "was lost")
            for pipe in self._writes:
                pipe.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Began):
            self.address, self.node = message.address, message.node
        elif isinstance(message, Printed):
            with suppress(OSError):  # it was given up, and is not read any more
                data = memoryview(message.data)
                while data:
                    data = data[self._writes[message.stream].write(data) or 0 :]
        elif isinstance(message, Logged):
            self._logged(self.node or "", message.offset, message.data)
        elif isinstance(message, Ended):
            if message.value:
                self._returned(self.number, message.value)
            self._settle(message.code)

    def _lost(self, error: RayActorError) -> None:
        if self.node is None and any(cause in str(error).lower() for cause in UNFIT):
            self._complain(error)
        else:
            self.lost = self._outcome is None
            self._settle(-signal.SIGKILL, f"was lost with its node {self.address}" if self.address else "was lost")

    def _complain(self, error: RayError) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"paceline: Ray could not start the worker ({lines[-1] if lines else type(error).__name__})\n"
        self._take(Printed(1, text.encode()))
        self._settle(NEVER_RAN)

    # -- its end ---------------------------------------------------------------------------------------------------

    def _end(self, code: int, how: str = "") -> None:
        self._settle(code, how)
        self._end_actor()

    def _settle(self, code: int, how: str = "") -> None:
        """Set how the worker ended; the first call counts."""
        if self._outcome is None:
            self._how, self._outcome = how, code

    def _end_actor(self) -> None:
        with suppress(Exception):  # gone already, or the driver has left the cluster
            ray.kill(self._actor)
