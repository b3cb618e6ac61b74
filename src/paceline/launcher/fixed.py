"""The launcher of a fleet whose workers are the same from beginning to end: when one fails, all are ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import FLEET_FAILED
from paceline.launcher.failures import WorkerFailure, closing, first_of, joined, others, resume_hint
from paceline.launcher.pool import INTERRUPT_GRACE_S
from paceline.launcher.processes import LaunchedWorker, exit_code
from paceline.launcher.rendezvous import ELASTIC_VARIABLES, RendezvousStore
from paceline.launcher.supervise import Order, Supervisor, supervise

if TYPE_CHECKING:
    from paceline.observe import RunLog

GRACE_S = 6.0
"""After a death the others have so long to end by themselves: a survivor needs up to 5 s to name the dead one."""
EXPLAIN_S = 0.5
"""How long after the first failure it is explained, so that an earlier one that ends more slowly is not missed."""


def launch_fixed(order: Order) -> int:
    """Run the workers to their end and return the exit code: 0 when all ended with 0."""
    return supervise(order, FixedPolicy(order.workers, order.processes))


class FixedPolicy:
    """Ranks that find each other through the launcher's store; it also tells the survivors of a death."""

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
        return ("error", self._explain().told) if self.failing else None

    def conclude(self, log: RunLog | None) -> tuple[str, int]:
        if self._cause is None:
            return "", 0
        said = joined(closing(self._cause, self._failures, self._workers), resume_hint(log))
        return said, exit_code(self._cause.code)

    def close(self) -> None:
        self._store.close()

    def _explain(self) -> WorkerFailure:
        """Find the failure's cause and print its last lines, once."""
        if self._cause is None:
            self._cause = first_of(self._failures)
            self._supervisor.show(self._cause)
        return self._cause
