"""The pool of a launcher's worker processes: it starts them, reads their output, stops them, and ends every one."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO

from paceline import concurrency
from paceline.launcher.output import OutputStream
from paceline.launcher.screen import Screen
from paceline.launcher.worker_process import LaunchedWorker, Signals, Watchdog, WorkerProcess

INTERRUPT_GRACE_S = 5.0
TERM_GRACE_S = 2.0
LINGER_S = 0.5
"""Time for which output is read from a worker that has ended: a process that it detached may hold its stdout open."""
TICK_S = 0.1


Start = Callable[[int, Mapping[str, str]], LaunchedWorker]
"""Function that starts the worker with this number and these environment variables."""


class WorkerPool:
    """The workers of one launcher.

    ``leave_s`` is the time that they have to leave after SIGTERM. ``start`` starts one worker; unless given, workers
    are processes of this computer.
    """

    def __init__(
        self, command: Sequence[str], *, signals: Signals, screen: Screen, leave_s: float, start: Start | None = None
    ) -> None:
        self.stopped_by = 0
        """The signal that ends the run; 0 before there is one."""
        self._signals, self._screen, self._leave_s = signals, screen, leave_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.waker, selectors.EVENT_READ, signals.drain)
        self._outputs: dict[LaunchedWorker, list[OutputStream]] = {}
        self._open: dict[LaunchedWorker, set[IO[bytes]]] = {}
        """Pipes that have not ended yet, per worker."""
        self._ended_at: dict[LaunchedWorker, float] = {}
        self._escalation: list[tuple[float, int]] = []
        """Signals that all workers will get, as (time, signal), soonest first."""
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
        """Wait for output or a signal, at most for ``seconds``, and print the output that has arrived."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def reap(self, now: float) -> list[LaunchedWorker]:
        """Return the workers that have ended since the last call; what they wrote has been read."""
        ended = [worker for worker in self._outputs if worker.reap()]
        for worker in ended:
            self._ended_at[worker] = now
            self._read_rest(worker)
        return ended

    def drained(self, worker: LaunchedWorker, now: float) -> bool:
        """Return whether the worker has ended and all its output was read."""
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
        """Run due timers, send due signals, and print lines that were held back long enough."""
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
        """Stop the workers when a signal asks for it, or when nobody reads the launcher's output any more."""
        for number in self._signals.take():
            self._stop(number, now)
        if self._screen.broken and not self.stopped_by:
            self._stop(signal.SIGPIPE, now)

    def end_all(self, now: float, *, grace_s: float) -> None:
        """Send workers that still run after ``grace_s`` SIGTERM, and later SIGKILL."""
        self._escalation = [(now + grace_s, signal.SIGTERM), (now + grace_s + TERM_GRACE_S, signal.SIGKILL)]

    def send(self, number: int) -> None:
        for worker in self._outputs:
            worker.send(number)
            worker.resume()  # a suspended process would not act on it

    def close(self) -> None:
        """Kill every worker that still runs, and release the pool's resources."""
        self.send(signal.SIGKILL)
        for worker in self._outputs:
            worker.wait()
        if self._watchdog is not None:
            self._watchdog.close()
        self._selector.close()

    def _stop(self, number: int, now: float) -> None:
        """Pass a first signal on to the workers; kill them all on a second one."""
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

    def _read(self, worker: LaunchedWorker, pipe: IO[bytes], output: OutputStream) -> bool:
        """Print what has arrived, and return whether there was anything."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            output.feed(data, concurrency.monotonic())
            return True
        output.close(concurrency.monotonic())
        self._close_pipe(worker, pipe)
        return False

    def _read_rest(self, worker: LaunchedWorker) -> None:
        """Read what a worker that has ended left in its pipes: a busy launcher may come to it long after."""
        until = concurrency.monotonic() + LINGER_S
        for pipe in [*self._open[worker]]:
            read = self._selector.get_key(pipe).data
            while read() and concurrency.monotonic() < until:
                pass

    def _close_pipe(self, worker: LaunchedWorker, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        self._open[worker].remove(pipe)
        pipe.close()
