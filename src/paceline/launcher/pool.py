"""All worker processes of a launcher: started, read, stopped by signals and, whatever happens, ended."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO

from paceline import concurrency
from paceline.launcher.output import OutputStream
from paceline.launcher.processes import LaunchedWorker, Watchdog, WorkerProcess
from paceline.launcher.screen import Screen
from paceline.launcher.signals import Signals

INTERRUPT_GRACE_S = 5.0
TERM_GRACE_S = 2.0
LINGER_S = 0.5
"""How long output is awaited from a worker that has ended (a process it detached may hold its stdout open)."""
TICK_S = 0.1


Start = Callable[[int, Mapping[str, str]], LaunchedWorker]
"""Starts worker number so and so, with these environment variables."""


class WorkerPool:
    """The workers of one launcher. ``leave_s`` is how long they may take to leave after SIGTERM; ``start`` starts one,
    as a process of this computer unless given."""

    def __init__(
        self, command: Sequence[str], *, signals: Signals, screen: Screen, leave_s: float, start: Start | None = None
    ) -> None:
        self.stopped_by = 0
        """The signal that ends the run, as soon as there is one."""
        self._signals, self._screen, self._leave_s = signals, screen, leave_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.waker, selectors.EVENT_READ, signals.drain)
        self._outputs: dict[LaunchedWorker, list[OutputStream]] = {}
        self._open: dict[LaunchedWorker, set[IO[bytes]]] = {}
        """The pipes that have not ended yet."""
        self._ended_at: dict[LaunchedWorker, float] = {}
        self._escalation: list[tuple[float, int]] = []
        """Which signal all workers get when, soonest first."""
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._watchdog = Watchdog() if start is None else None
        self._start = start or partial(self._start_here, command)

    @property
    def workers(self) -> Collection[LaunchedWorker]:
        return self._outputs.keys()

    def start(self, number: int, environment: Mapping[str, str]) -> LaunchedWorker:
        worker = self._start(number, environment)
        out, err = worker.pipes
        worker.stderr = OutputStream(number, self._screen.err, holds=True)
        self._outputs[worker] = [OutputStream(number, self._screen.out, holds=False), worker.stderr]
        self._open[worker] = {out, err}
        for pipe, output in zip((out, err), self._outputs[worker]):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, worker, pipe, output))
        return worker

    def _start_here(self, command: Sequence[str], number: int, environment: Mapping[str, str]) -> LaunchedWorker:
        return WorkerProcess(number, command, environment, watchdog=self._watchdog)

    # -- while they run --------------------------------------------------------------------------------------------

    def listen(self, seconds: float = TICK_S) -> None:
        """Pass on what the workers print, until something has happened or the time is over."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def reap(self, now: float) -> list[LaunchedWorker]:
        """Those that have ended since the last call."""
        ended = [worker for worker in self._outputs if worker.reap()]
        for worker in ended:
            self._ended_at[worker] = now
        return ended

    def drained(self, worker: LaunchedWorker, now: float) -> bool:
        """Whether it has ended and all its output was read."""
        if worker not in self._ended_at:
            return False
        return not self._open[worker] or now - self._ended_at[worker] > LINGER_S

    def remove(self, worker: LaunchedWorker) -> None:
        """Stop reading from a worker that has ended."""
        for pipe in [*self._open[worker]]:
            self._close_pipe(worker, pipe)
        del self._outputs[worker], self._open[worker], self._ended_at[worker]

    def do_in(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((concurrency.monotonic() + seconds, action))

    def tick(self, now: float, *, failing: bool) -> None:
        """Do what is due, and show what was held back for long enough."""
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()
        while self._escalation and self._escalation[0][0] <= now:
            self.send(self._escalation.pop(0)[1])
        for outputs in self._outputs.values():
            for output in outputs:
                output.tick(now, failing=failing or bool(self.stopped_by))

    # -- stopping --------------------------------------------------------------------------------------------------

    def handle_signals(self, now: float) -> None:
        """Stop when a signal asks for it, or when nobody reads what is printed any more."""
        for number in self._signals.take():
            self._stop(number, now)
        if self._screen.broken and not self.stopped_by:
            self._stop(signal.SIGPIPE, now)

    def end_all(self, now: float, *, grace_s: float) -> None:
        """Workers that have not ended by themselves after ``grace_s`` get SIGTERM, then SIGKILL."""
        self._escalation = [(now + grace_s, signal.SIGTERM), (now + grace_s + TERM_GRACE_S, signal.SIGKILL)]

    def send(self, number: int) -> None:
        for worker in self._outputs:
            worker.send(number)
            worker.resume()  # a suspended process would not act on it

    def close(self) -> None:
        """Whatever happened to the launcher, no worker stays behind."""
        self.send(signal.SIGKILL)
        for worker in self._outputs:
            worker.wait()
        if self._watchdog is not None:
            self._watchdog.close()
        self._selector.close()

    def _stop(self, number: int, now: float) -> None:
        """A first signal is passed on; a second one ends everything at once."""
        if self.stopped_by:
            self._escalation = [(now, signal.SIGKILL)]
            return
        self.stopped_by = number
        if number == signal.SIGINT:
            self.send(signal.SIGINT)
            self.end_all(now, grace_s=INTERRUPT_GRACE_S)
            self._screen.say("stopping ... (Ctrl-C once more kills the workers at once)")
        else:
            self.send(signal.SIGTERM)
            self._escalation = [(now + self._leave_s, signal.SIGKILL)]

    # -- their output ----------------------------------------------------------------------------------------------

    def _read(self, worker: LaunchedWorker, pipe: IO[bytes], output: OutputStream) -> None:
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if data:
            output.feed(data, concurrency.monotonic())
            return
        output.close(concurrency.monotonic())
        self._close_pipe(worker, pipe)

    def _close_pipe(self, worker: LaunchedWorker, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        self._open[worker].remove(pipe)
        pipe.close()
