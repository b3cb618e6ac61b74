"""The loop that supervises the workers of this computer, and the policy that tells one kind of fleet from another.

The loop passes on what workers print, shows the live view from the run's event log, forwards Ctrl-C, and leaves nothing
running behind. Who is started, where the workers find each other and what follows a worker's end is the policy's:
`paceline.launcher.fixed` or `paceline.launcher.elastic`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline import concurrency
from paceline.launcher.failures import WorkerFailure, checkpoint_hint
from paceline.launcher.group import GROUP_VARIABLES, WRAPPER, processes
from paceline.launcher.pool import Start, WorkerPool
from paceline.launcher.processes import LaunchedWorker
from paceline.launcher.rendezvous import loopback
from paceline.launcher.screen import Screen
from paceline.launcher.signals import Signals

if TYPE_CHECKING:
    from paceline.observe import RunLog


@dataclass(frozen=True)
class Order:
    """What to launch."""

    command: tuple[str, ...]
    workers: int
    settings: Mapping[str, str]
    """Environment variables that are the same for all workers."""
    run_dir: Path
    devices: tuple[str, ...] = ()
    """One for each worker, or with ``groups`` for each process; those that come later begin the list again. Or none."""
    quiet: bool = False
    groups: tuple[int, ...] = ()
    """How many processes each worker has; workers that come later begin the list again. None: the command is one."""

    @property
    def processes(self) -> int:
        """Of all workers, where each is the same from beginning to end."""
        return processes(self.groups or (1,), self.workers)

    def place(self, number: int) -> dict[str, str]:
        """Variables that say where worker ``number`` computes, and in how many processes."""
        if not self.groups:
            return {"PACELINE_DEVICE": self.devices[number % len(self.devices)]} if self.devices else {}
        return {
            "PACELINE_GROUP": str(self.groups[number % len(self.groups)]),
            "PACELINE_GROUP_FIRST": str(processes(self.groups, number)),
            **({"PACELINE_GROUP_DEVICES": ",".join(self.devices)} if self.devices else {}),
        }


class Policy(Protocol):
    """What is particular to one kind of fleet. Times are of `concurrency.monotonic`."""

    leave_s: float
    """How long workers may take to end after SIGTERM."""
    foreign: tuple[str, ...]
    """Variables that other launchers set: not true of the workers started here."""

    loopback: bool
    """Whether all workers are on this computer."""
    failing: bool
    """Whether the run is about to end with an error."""

    def begin(self, supervisor: Supervisor) -> None:
        """Start the first workers."""

    def environment(self, number: int) -> Mapping[str, str]:
        """Variables by which a worker finds the others."""

    def ended(self, worker: LaunchedWorker, now: float) -> None:
        """A process has ended; some of its output may still be on its way."""

    def act(self, now: float) -> None:
        """Do what is due; called in each turn of the loop."""

    def over(self, now: float) -> bool:
        """Whether no worker runs, and none will."""

    def end(self) -> tuple[str, str] | None:
        """Print what was held back; returns how the run ended (reason, text), for its log, unless it ended well."""

    def conclude(self, log: RunLog | None) -> tuple[str, int]:
        """The last line, if any, and the exit code of a run that no signal has stopped."""

    def close(self) -> None: ...


def supervise(order: Order, policy: Policy, start: Start | None = None) -> int:
    """Run the workers to their end and return the exit code. ``start`` starts one, unless it is a process of this
    computer."""
    command = (*WRAPPER, *order.command) if order.groups else order.command
    with Signals() as signals, closing(policy), Screen(order.run_dir, quiet=order.quiet) as screen:
        pool = WorkerPool(command, signals=signals, screen=screen, leave_s=policy.leave_s, start=start)
        try:
            return Supervisor(order, policy, pool, screen, signals.wake).run()
        finally:
            pool.close()


class Supervisor:
    """One thread that waits for output, signals and deaths, and has the policy act on each."""

    def __init__(self, order: Order, policy: Policy, pool: WorkerPool, screen: Screen, wake: Callable[[], None]):
        self.order, self.pool, self.screen, self.wake, self._policy = order, pool, screen, wake, policy

    def run(self) -> int:
        self._policy.begin(self)
        self._turn(concurrency.monotonic())
        while not self._policy.over(concurrency.monotonic()):
            self.pool.listen()
            self._turn(concurrency.monotonic())
        return self._finish()

    def start(self, number: int) -> LaunchedWorker:
        """Start a worker; the policy overrides the order's variables, and the order those of this process."""
        here = loopback() if self._policy.loopback else None
        foreign = (*self._policy.foreign, *GROUP_VARIABLES)
        environment = {
            "OMP_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": here} if here else {}),
            **{name: value for name, value in os.environ.items() if name not in foreign},
            **self.order.settings,
            **self.order.place(number),
            **self._policy.environment(number),
            "PACELINE_LAUNCHER": "1",
        }
        return self.pool.start(number, environment)

    def show(self, failure: WorkerFailure) -> None:
        """Print a worker's last lines, unless another has printed the same and lived on."""
        if not any(failure.printed_by(worker.stderr) for worker in self.pool.workers):
            for line in failure.report:
                self.screen.err(line)

    def _turn(self, now: float) -> None:
        self.pool.handle_signals(now)
        for worker in self.pool.reap(now):
            self._policy.ended(worker, now)
        self.pool.tick(now, failing=self._policy.failing)
        self._policy.act(now)

    def _finish(self) -> int:
        log = self.screen.close(self._policy.end())
        stopped_by = self.pool.stopped_by
        said, code = (checkpoint_hint(log), 128 + stopped_by) if stopped_by else self._policy.conclude(log)
        if said:
            self.screen.say(said)
        return code


def worker_settings(**given: object) -> dict[str, str]:
    """The environment variables of what is given, None left out.

    >>> worker_settings(pace="equal", seed=3, network=None)
    {'PACELINE_PACE': 'equal', 'PACELINE_SEED': '3'}
    """
    return {f"PACELINE_{name.upper()}": str(value) for name, value in given.items() if value is not None}
