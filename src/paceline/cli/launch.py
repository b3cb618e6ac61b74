"""The launcher: starts the workers of a fleet on this computer and stays with them until all have ended.

It hosts the store through which the workers find each other, passes on what they print, shows the live view from the
run's event log, tells the survivors when a worker has died, forwards Ctrl-C, and leaves nothing running behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from paceline.cli.ending import Failure, closing, first_of, others, resume_hint
from paceline.cli.meeting import Meeting, loopback
from paceline.cli.signals import Signals
from paceline.cli.voices import Voice
from paceline.cli.watching import Watching
from paceline.cli.workers import FLEET_FAILED, Guard, Worker, exit_code

GRACE_S = 6.0
"""After a death the others have so long to end by themselves: a survivor needs up to 5 s to name the dead one."""
INTERRUPT_GRACE_S = 5.0
TERM_GRACE_S = 2.0
EXPLAIN_S = 0.5
"""How long after the first failure it is explained, so that an earlier one that ends more slowly is not missed."""
LINGER_S = 0.5
"""How long output is awaited from a worker that has ended (a process it detached may hold its stdout open)."""
TICK_S = 0.1


@dataclass(frozen=True)
class Order:
    """What to launch."""

    command: tuple[str, ...]
    workers: int
    settings: Mapping[str, str]
    """Environment variables that are the same for all workers."""
    run_dir: Path
    devices: tuple[str, ...] = ()
    """One for each worker, or none."""
    quiet: bool = False


def launch(order: Order) -> int:
    """Run the workers to their end and return the exit code: 0 when all ended with 0."""
    with Signals() as signals, Meeting() as meeting, Watching(order.run_dir, quiet=order.quiet) as watching:
        launcher = Launcher(order, signals, meeting, watching)
        try:
            return launcher.run()
        finally:
            launcher.abandon()


class Launcher:
    """The loop of `launch`: one thread that waits for output, signals and deaths, and acts on each."""

    def __init__(self, order: Order, signals: Signals, meeting: Meeting, watching: Watching) -> None:
        self._order, self._signals, self._meeting, self._watching = order, signals, meeting, watching
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.waker, selectors.EVENT_READ, signals.drain)
        self._workers: list[Worker] = []
        self._voices: list[Voice] = []
        self._errors: list[Voice] = []
        """Those of the workers' stderr, by rank."""
        self._open = 0
        self._failures: list[Failure] = []
        self._cause: Failure | None = None
        self._stopped_by = 0
        self._ladder: list[tuple[float, int]] = []
        self._last_end = 0.0
        self._guard: Guard | None = None

    def run(self) -> int:
        for rank in range(self._order.workers):
            self._start(rank)
        self._guard = Guard(self._workers)
        self._meeting.host()
        while not self._over():
            for key, _ in self._selector.select(TICK_S):
                key.data()
            self._tick(time.monotonic())
        return self._finish()

    def abandon(self) -> None:
        """Whatever happened to the launcher, no worker stays behind."""
        for worker in self._workers:
            worker.send(signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()
        if self._guard:
            self._guard.dismiss()
        self._selector.close()

    # -- starting --------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        worker = Worker(rank, self._order.command, self._environment(rank))
        self._workers.append(worker)
        out, err = worker.process.stdout, worker.process.stderr
        assert out is not None
        assert err is not None
        self._listen(out, Voice(rank, self._watching.out, holds=False))
        self._errors.append(self._listen(err, Voice(rank, self._watching.err, holds=True)))

    def _environment(self, rank: int) -> dict[str, str]:
        size = str(self._order.workers)
        device = {"PACELINE_DEVICE": self._order.devices[rank]} if self._order.devices else {}
        return {
            "OMP_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}),
            **os.environ,
            **self._order.settings,
            **device,
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": self._meeting.address,
            "MASTER_PORT": str(self._meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PACELINE_LAUNCHER": "1",
        }

    def _listen(self, stream: IO[bytes], voice: Voice) -> Voice:
        self._open += 1
        self._voices.append(voice)
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, partial(self._read, stream, voice))
        return voice

    # -- while they run --------------------------------------------------------------------------------------------

    def _read(self, stream: IO[bytes], voice: Voice) -> None:
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if data:
            voice.feed(data, time.monotonic())
            return
        voice.close(time.monotonic())
        self._selector.unregister(stream)
        stream.close()
        self._open -= 1

    def _tick(self, now: float) -> None:
        for number in self._signals.take():
            self._interrupted(number, now)
        for worker in self._workers:
            if worker.reap():
                self._ended(worker, now)
        if self._watching.broken and not self._stopped_by:  # nobody reads what is printed any more
            self._interrupted(signal.SIGPIPE, now)
        while self._ladder and self._ladder[0][0] <= now:
            self._send_all(self._ladder.pop(0)[1])
        for voice in self._voices:
            voice.tick(now, failing=bool(self._failures or self._stopped_by))
        if self._failures and now - self._failures[0].at > EXPLAIN_S:
            self._explain()

    def _ended(self, worker: Worker, now: float) -> None:
        self._last_end = now
        if worker.code == 0 or self._stopped_by or worker.stopped:
            return
        if not self._failures:
            self._ladder = [(now + GRACE_S, signal.SIGTERM), (now + GRACE_S + TERM_GRACE_S, signal.SIGKILL)]
        self._failures.append(Failure(worker, now, self._errors[worker.rank]))
        if worker.code != FLEET_FAILED:
            self._meeting.announce_death(worker.rank, worker.ended)

    def _interrupted(self, number: int, now: float) -> None:
        """A first signal is passed on; a second one ends everything at once."""
        if self._stopped_by:
            self._ladder = [(now, signal.SIGKILL)]
            return
        self._stopped_by = number
        if number == signal.SIGINT:
            self._send_all(signal.SIGINT)
            term = now + INTERRUPT_GRACE_S
            self._ladder = [(term, signal.SIGTERM), (term + TERM_GRACE_S, signal.SIGKILL)]
            self._watching.say("stopping ... (Ctrl-C once more kills the workers at once)")
        else:
            self._send_all(signal.SIGTERM)
            self._ladder = [(now + INTERRUPT_GRACE_S, signal.SIGKILL)]

    def _send_all(self, number: int) -> None:
        for worker in self._workers:
            worker.send(number)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if any(worker.running for worker in self._workers):
            return False
        return self._open == 0 or time.monotonic() - self._last_end > LINGER_S

    def _explain(self) -> Failure:
        """Find the cause of the failure and print its last words, once."""
        if self._cause is None:
            self._cause = first_of(self._failures)
            for line in self._cause.words:
                self._watching.err(line)
        return self._cause

    def _finish(self) -> int:
        if self._failures and not self._stopped_by:
            return self._finish_failed(self._explain())
        for worker, voice in zip(self._workers, self._errors):
            interrupted = self._stopped_by and any("KeyboardInterrupt" in line for line in voice.held)
            if not interrupted and worker.code != FLEET_FAILED:
                voice.release()
        self._watching.close()
        return 128 + self._stopped_by if self._stopped_by else 0

    def _finish_failed(self, cause: Failure) -> int:
        for line in others(cause, self._failures):
            self._watching.err(line)
        for worker, voice in zip(self._workers, self._errors):
            if worker.code == 0:
                voice.release()
        log = self._watching.close()
        if last := " ".join(filter(None, [closing(cause, self._failures, self._workers), resume_hint(log)])):
            self._watching.say(last)
        return exit_code(cause.code)
