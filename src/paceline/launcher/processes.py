"""A launcher's worker processes: started, listened to, stopped by signals and, whatever happens, ended."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

from paceline.launcher.output import Voice
from paceline.launcher.screen import Watching
from paceline.launcher.signals import Signals
from paceline.launcher.workers import Guard, Worker

INTERRUPT_GRACE_S = 5.0
TERM_GRACE_S = 2.0
LINGER_S = 0.5
"""How long output is awaited from a worker that has ended (a process it detached may hold its stdout open)."""
TICK_S = 0.1


class Crew:
    """The workers of one launcher. ``leave_s`` is how long they may take to leave after SIGTERM."""

    def __init__(
        self, command: Sequence[str], *, signals: Signals, watching: Watching, leave_s: float = INTERRUPT_GRACE_S
    ) -> None:
        self.stopped_by = 0
        """The signal that ends the run, as soon as there is one."""
        self._command, self._signals, self._watching, self._leave_s = command, signals, watching, leave_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.waker, selectors.EVENT_READ, signals.drain)
        self._voices: dict[Worker, list[Voice]] = {}
        self._streams: dict[Worker, set[IO[bytes]]] = {}
        """Those that are still open."""
        self._ended_at: dict[Worker, float] = {}
        self._ladder: list[tuple[float, int]] = []
        self._guard = Guard()

    def start(self, rank: int, environment: Mapping[str, str]) -> Worker:
        worker = Worker(rank, self._command, environment, guard=self._guard)
        out, err = worker.process.stdout, worker.process.stderr
        assert out is not None
        assert err is not None
        worker.words = Voice(rank, self._watching.err, holds=True)
        self._voices[worker] = [Voice(rank, self._watching.out, holds=False), worker.words]
        self._streams[worker] = {out, err}
        for stream, voice in zip((out, err), self._voices[worker]):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, partial(self._read, worker, stream, voice))
        return worker

    # -- while they run --------------------------------------------------------------------------------------------

    def listen(self, seconds: float = TICK_S) -> None:
        """Pass on what the workers print, until something has happened or the time is over."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def reap(self, now: float) -> list[Worker]:
        """Those that have ended since the last call."""
        ended = [worker for worker in self._voices if worker.reap()]
        for worker in ended:
            self._ended_at[worker] = now
            self._guard.release(worker)
        return ended

    def settled(self, worker: Worker, now: float) -> bool:
        """Whether it has ended and said all it had to say."""
        if worker not in self._ended_at:
            return False
        return not self._streams[worker] or now - self._ended_at[worker] > LINGER_S

    def dismiss(self, worker: Worker) -> None:
        """Stop listening to a worker that has ended."""
        for stream in [*self._streams[worker]]:
            self._close(worker, stream)
        del self._voices[worker], self._streams[worker], self._ended_at[worker]

    def tick(self, now: float, *, failing: bool) -> None:
        """Climb the ladder of signals, and show what the voices have held back for long enough."""
        while self._ladder and self._ladder[0][0] <= now:
            self.send(self._ladder.pop(0)[1])
        for voices in self._voices.values():
            for voice in voices:
                voice.tick(now, failing=failing or bool(self.stopped_by))

    # -- stopping --------------------------------------------------------------------------------------------------

    def heed(self, now: float) -> None:
        """Stop when a signal asks for it, or when nobody reads what is printed any more."""
        for number in self._signals.take():
            self._interrupted(number, now)
        if self._watching.broken and not self.stopped_by:
            self._interrupted(signal.SIGPIPE, now)

    def end_all(self, now: float, *, grace_s: float) -> None:
        """Who has not ended by itself after ``grace_s`` is asked to, then killed."""
        self._ladder = [(now + grace_s, signal.SIGTERM), (now + grace_s + TERM_GRACE_S, signal.SIGKILL)]

    def send(self, number: int) -> None:
        for worker in self._voices:
            worker.send(number)
            worker.thaw()  # one that was frozen could not hear it

    def abandon(self) -> None:
        """Whatever happened to the launcher, no worker stays behind."""
        self.send(signal.SIGKILL)
        for worker in self._voices:
            worker.process.wait()
            self._guard.release(worker)
        self._guard.dismiss()
        self._selector.close()

    def _interrupted(self, number: int, now: float) -> None:
        """A first signal is passed on; a second one ends everything at once."""
        if self.stopped_by:
            self._ladder = [(now, signal.SIGKILL)]
            return
        self.stopped_by = number
        if number == signal.SIGINT:
            self.send(signal.SIGINT)
            self.end_all(now, grace_s=INTERRUPT_GRACE_S)
            self._watching.say("stopping ... (Ctrl-C once more kills the workers at once)")
        else:
            self.send(signal.SIGTERM)
            self._ladder = [(now + self._leave_s, signal.SIGKILL)]

    # -- their output ----------------------------------------------------------------------------------------------

    def _read(self, worker: Worker, stream: IO[bytes], voice: Voice) -> None:
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if data:
            voice.feed(data, time.monotonic())
            return
        voice.close(time.monotonic())
        self._close(worker, stream)

    def _close(self, worker: Worker, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        self._streams[worker].remove(stream)
        stream.close()
