"""The launcher: starts the workers of a fleet on this computer and stays with them until all have ended.

It hosts the store through which the workers find each other, passes on what they print, shows the live view from the
run's event log, tells the survivors when a worker has died, forwards Ctrl-C, and leaves nothing running behind. A
fleet whose workers come and go has a launcher of its own (`paceline.launcher.elastic`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.launcher.failures import Failure, checkpoint_hint, closing, first_of, others, resume_hint
from paceline.launcher.processes import Crew
from paceline.launcher.rendezvous import Meeting, loopback
from paceline.launcher.screen import Watching
from paceline.launcher.signals import Signals
from paceline.launcher.workers import FLEET_FAILED, Worker, exit_code

GRACE_S = 6.0
"""After a death the others have so long to end by themselves: a survivor needs up to 5 s to name the dead one."""
EXPLAIN_S = 0.5
"""How long after the first failure it is explained, so that an earlier one that ends more slowly is not missed."""
ELASTIC = ("PACELINE_ROSTER", "PACELINE_TOKEN", "PACELINE_WORKER")
"""What makes a worker one of a fleet that comes and goes: not meant for those started here."""


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
        crew = Crew(order.command, signals=signals, watching=watching)
        try:
            return Launcher(order, crew, meeting, watching).run()
        finally:
            crew.abandon()


class Launcher:
    """The loop of `launch`: one thread that waits for output, signals and deaths, and acts on each."""

    def __init__(self, order: Order, crew: Crew, meeting: Meeting, watching: Watching) -> None:
        self._order, self._crew, self._meeting, self._watching = order, crew, meeting, watching
        self._workers: list[Worker] = []
        self._failures: list[Failure] = []
        self._cause: Failure | None = None

    def run(self) -> int:
        for rank in range(self._order.workers):
            self._workers.append(self._crew.start(rank, self._environment(rank)))
        self._meeting.host()
        while not all(self._crew.settled(worker, time.monotonic()) for worker in self._workers):
            self._crew.listen()
            self._tick(time.monotonic())
        return self._finish()

    def _environment(self, rank: int) -> dict[str, str]:
        size = str(self._order.workers)
        device = {"PACELINE_DEVICE": self._order.devices[rank]} if self._order.devices else {}
        return {
            "OMP_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}),
            **without(os.environ, ELASTIC),
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

    def _tick(self, now: float) -> None:
        self._crew.heed(now)
        for worker in self._crew.reap(now):
            self._ended(worker, now)
        self._crew.tick(now, failing=bool(self._failures))
        # Those whom the fleet's failure ended may be quicker than the one that failed: its end is waited for.
        if any(one.code != FLEET_FAILED and now - one.at > EXPLAIN_S for one in self._failures):
            self._explain()

    def _ended(self, worker: Worker, now: float) -> None:
        if worker.code == 0 or self._crew.stopped_by or worker.stopped:
            return
        if not self._failures:
            self._crew.end_all(now, grace_s=GRACE_S)
        self._failures.append(Failure(worker, now, worker.words))
        if worker.code != FLEET_FAILED:
            self._meeting.announce_death(worker.rank, worker.ended)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _explain(self) -> Failure:
        """Find the cause of the failure and print its last words, once: another may have said the same and lived on."""
        if self._cause is None:
            self._cause = first_of(self._failures)
            if not any(self._cause.said_by(worker.words) for worker in self._workers):
                for line in self._cause.words:
                    self._watching.err(line)
        return self._cause

    def _finish(self) -> int:
        stopped_by = self._crew.stopped_by
        if self._failures and not stopped_by:
            return self._finish_failed(self._explain())
        for worker in self._workers:
            interrupted = stopped_by and any("KeyboardInterrupt" in line for line in worker.words.held)
            if not interrupted and worker.code != FLEET_FAILED:
                worker.words.release()
        log = self._watching.close(("interrupted", "") if stopped_by else None)
        if stopped_by and (hint := checkpoint_hint(log)):
            self._watching.say(hint)
        return 128 + stopped_by if stopped_by else 0

    def _finish_failed(self, cause: Failure) -> int:
        for line in others(cause, self._failures):
            self._watching.err(line)
        for worker in self._workers:
            if worker.code == 0:
                worker.words.release()
        log = self._watching.close(("error", cause.told))
        if last := " ".join(filter(None, [closing(cause, self._failures, self._workers), resume_hint(log)])):
            self._watching.say(last)
        return exit_code(cause.code)


def without(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}
