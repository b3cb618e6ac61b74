"""The loop that supervises the workers of this computer, and the contract of its policies, one per kind of fleet.

The loop prints the workers' output, shows the live view from the run's event log, forwards Ctrl-C, and leaves no
process running. The policy decides who is started, where the workers find each other and what follows a worker's end:
`paceline.launcher.fixed_fleet` or `paceline.launcher.elastic_fleet`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline import concurrency
from paceline.launcher.output import WorkerFailure, checkpoint_hint
from paceline.launcher.pool import Start, WorkerPool
from paceline.launcher.process_group import GROUP_VARIABLES, WRAPPER, processes
from paceline.launcher.screen import Screen
from paceline.launcher.worker_process import LaunchedWorker, Signals

if TYPE_CHECKING:
    from paceline.observe import RunLog


@dataclass(frozen=True)
class Order:
    """The workers to launch: their command, number, devices and settings."""

    command: tuple[str, ...]
    workers: int
    settings: Mapping[str, str]
    """Environment variables that are the same for all workers."""
    run_dir: Path
    devices: tuple[str, ...] = ()
    """One device per worker, or with ``groups`` per process; workers beyond the list begin it again. May be empty."""
    quiet: bool = False
    groups: tuple[int, ...] = ()
    """Processes per worker; workers beyond the list begin it again. Empty: every worker is one process."""

    @property
    def processes(self) -> int:
        """The number of processes of all workers, in a fixed fleet."""
        return processes(self.groups or (1,), self.workers)

    def device_variables(self, number: int) -> dict[str, str]:
        """Return the variables that set the device of worker ``number``, and the number of its processes."""
        if not self.groups:
            return {"PACELINE_DEVICE": self.devices[number % len(self.devices)]} if self.devices else {}
        return {
            "PACELINE_PROCS_PER_WORKER": str(self.groups[number % len(self.groups)]),
            "PACELINE_GROUP_FIRST": str(processes(self.groups, number)),
            **({"PACELINE_GROUP_DEVICES": ",".join(self.devices)} if self.devices else {}),
        }


class Policy(Protocol):
    """The decisions that differ between kinds of fleet. Times are of `concurrency.monotonic`."""

    leave_s: float
    """Seconds that workers may take to end after SIGTERM."""
    foreign: tuple[str, ...]
    """Variables that other launchers set, and that the workers started here must not inherit."""
    loopback: bool
    """Whether all workers are on this computer."""
    failing: bool
    """Whether the run is about to end with an error."""

    def begin(self, supervisor: Supervisor) -> None:
        """Start the first workers."""

    def environment(self, number: int) -> Mapping[str, str]:
        """Return the variables by which a worker finds the others."""

    def ended(self, worker: LaunchedWorker, now: float) -> None:
        """Handle the end of a process; some of its output may still be on its way."""

    def act(self, now: float) -> None:
        """Do what is due; called in each turn of the loop."""

    def over(self, now: float) -> bool:
        """Return whether no worker runs, and none will be started."""

    def end(self) -> tuple[str, str] | None:
        """Print what was held back, and return how the run ended (reason, text) for its log; None if it ended well."""

    def conclude(self, log: RunLog | None) -> tuple[str, int]:
        """Return the last line to print, maybe empty, and the exit code of a run that no signal has stopped."""

    def close(self) -> None: ...


def supervise(order: Order, policy: Policy, start: Start | None = None) -> int:
    """Run the workers to their end and return the exit code.

    ``start`` starts one worker; unless given, workers are processes of this computer.
    """
    command = (*WRAPPER, *order.command) if order.groups else order.command
    with Signals() as signals, closing(policy), Screen(order.run_dir, quiet=order.quiet) as screen:
        pool = WorkerPool(command, signals=signals, screen=screen, leave_s=policy.leave_s, start=start)
        try:
            return Supervisor(order, policy, pool, screen, signals.wake).run()
        finally:
            pool.close()


class Supervisor:
    """The launcher's loop: it waits for output, signals and deaths, and has the policy act on each."""

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
        """Start a worker; the policy's variables override the order's, and those override this process's."""
        here = loopback() if self._policy.loopback else None
        foreign = (*self._policy.foreign, *GROUP_VARIABLES)
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # a set of names has one order on every worker
            **({"GLOO_SOCKET_IFNAME": here} if here else {}),
            **{name: value for name, value in os.environ.items() if name not in foreign},
            **self.order.settings,
            **self.order.device_variables(number),
            **self._policy.environment(number),
            "PACELINE_LAUNCHER": str(os.getpid()),
        }
        return self.pool.start(number, environment)

    def show(self, failure: WorkerFailure) -> None:
        """Print a failed worker's last lines, unless another worker has printed the same lines and lived on."""
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
        last_line, code = (checkpoint_hint(log), 128 + stopped_by) if stopped_by else self._policy.conclude(log)
        if last_line:
            self.screen.say(last_line)
        return code


def loopback() -> str | None:
    """Return the name of the loopback interface: workers of one computer use it, since others may be filtered.

    >>> loopback() in ("lo", "lo0", None)
    True
    """
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def worker_settings(**given: object) -> dict[str, str]:
    """Return the environment variables for the settings given; None is left out.

    >>> worker_settings(pace="equal", seed=3, network=None)
    {'PACELINE_PACE': 'equal', 'PACELINE_SEED': '3'}
    """
    return {f"PACELINE_{name.upper()}": str(value) for name, value in given.items() if value is not None}
