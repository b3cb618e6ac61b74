"""The launcher of a fixed fleet, whose workers are the same from beginning to end: when one fails, all are ended.

They find each other through a torch TCPStore on a loopback port, which the launcher hosts (`RendezvousStore`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import FLEET_FAILED
from paceline.launcher.output import WorkerFailure, closing, first_of, joined, others, resume_hint
from paceline.launcher.pool import INTERRUPT_GRACE_S
from paceline.launcher.supervise import Order, Supervisor, supervise
from paceline.launcher.worker_process import LaunchedWorker, exit_code
from paceline.roster.persistence import StoreHost

if TYPE_CHECKING:
    from paceline.observe import RunLog

GRACE_S = 6.0
"""Time that the others have to end by themselves after a death: a survivor needs up to 5 s to name the dead worker."""
EXPLAIN_S = 0.5
"""Delay before the first failure is explained, so that an earlier one whose worker ends more slowly is not missed."""
ELASTIC_VARIABLES = ("PACELINE_ROSTER", "PACELINE_TOKEN", "PACELINE_WORKER", "PACELINE_STARTER")
"""Variables that make a process a worker of an elastic fleet: workers of a fixed fleet must not inherit them."""

logger = logging.getLogger("paceline")


def launch_fixed(order: Order) -> int:
    """Run the workers to their end and return the exit code: 0 when all ended with 0."""
    return supervise(order, FixedPolicy(order.workers, order.processes))


class FixedPolicy:
    """The policy for ranks that meet in the launcher's store, which also announces deaths to the survivors."""

    leave_s = INTERRUPT_GRACE_S
    foreign: tuple[str, ...] = ELASTIC_VARIABLES
    loopback = True

    def __init__(self, size: int, processes: int) -> None:
        self._processes, self._size, self._store, self.failing = processes, size, RendezvousStore(), False
        self._workers: list[LaunchedWorker] = []
        self._failures: list[WorkerFailure] = []
        self._cause: WorkerFailure | None = None

    def begin(self, supervisor: Supervisor) -> None:
        self._supervisor, self._pool, self._screen = supervisor, supervisor.pool, supervisor.screen
        self._workers.extend(supervisor.start(rank) for rank in range(self._size))
        self._store.start()

    def environment(self, number: int) -> Mapping[str, str]:
        return {**self._store.environment(number, self._size), "LOCAL_WORLD_SIZE": str(self._processes)}

    def ended(self, worker: LaunchedWorker, now: float) -> None:
        if worker.code == 0 or self._pool.stopped_by or worker.signalled:
            return
        if not self.failing:
            self.failing = True
            self._pool.end_all(now, grace_s=GRACE_S)
        self._failures.append(WorkerFailure(worker, now))
        if worker.code != FLEET_FAILED:
            self._store.announce_death(worker.number, worker.ended)

    def act(self, now: float) -> None:
        # Those whom the fleet's failure ended may be quicker than the one that failed: its end is waited for.
        if any(failure.code != FLEET_FAILED and now - failure.at > EXPLAIN_S for failure in self._failures):
            self._explain()

    def over(self, now: float) -> bool:
        return all(self._pool.drained(worker, now) for worker in self._workers)

    def end(self) -> tuple[str, str] | None:
        stopped = self._pool.stopped_by
        if self.failing and not stopped:
            for line in others(self._explain(), self._failures):
                self._screen.err(line)
        for worker in self._workers:
            if not worker.interrupted if stopped else worker.code == 0:
                worker.stderr.release()
        if stopped:
            return "interrupted", ""
        return ("error", self._explain().summary) if self.failing else None

    def conclude(self, log: RunLog | None) -> tuple[str, int]:
        if self._cause is None:
            return "", 0
        text = joined(closing(self._cause, self._failures, self._workers), resume_hint(log))
        return text, exit_code(self._cause.code)

    def close(self) -> None:
        self._store.close()

    def _explain(self) -> WorkerFailure:
        """Return the failure that caused the others; the first call prints its last lines."""
        if self._cause is None:
            self._cause = first_of(self._failures)
            self._supervisor.show(self._cause)
        return self._cause


class RendezvousStore(StoreHost):
    """The store through which the workers meet, from the binding of its port until `close`."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", holder="launcher")
        self._deaths: list[tuple[int, str]] = []

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Return the variables with which worker ``rank`` of ``size`` joins the others."""
        numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        return {
            **{name: str(value) for name, value in numbers.items()},
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def announce_death(self, rank: int, how: str) -> None:
        """Announce a death to the survivors: key ``paceline/died/<rank>`` holds how the worker ended."""
        with self._lock:
            self._deaths.append((rank, how))
            if self._store is not None:
                self._on_made(self._store)

    def _on_made(self, store: Any) -> None:
        for rank, how in self._deaths:
            try:
                store.set(f"paceline/died/{rank}", how)
            except RuntimeError as error:
                logger.warning("could not tell the others that worker %d %s: %s", rank, how, error)
        self._deaths.clear()
