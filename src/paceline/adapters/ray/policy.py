"""The particulars of a fleet whose workers are Ray's actors; all else is as with workers of one computer."""

from __future__ import annotations

import signal

from paceline.adapters.ray.cluster import Cluster
from paceline.adapters.ray.worker import RayWorker
from paceline.launcher.elastic_fleet import ElasticPolicy, WorkerSlot
from paceline.launcher.faults import Faults
from paceline.launcher.roster import OwnRoster
from paceline.launcher.supervise import Supervisor
from paceline.roster.calls import listed

STARTER = "ray"
"""Prefix of the workers' names, which stay when a worker returns on another node."""
SILENT_S = 3.0
"""Seconds without an answer of the actor after which a worker that the roster has lost is replaced.

Ray itself may take 12 s and more to report that a node is gone.
"""
WAITING_S = 10.0
"""Seconds that a worker waits for a node before the driver reports it."""


class RayPolicy(ElasticPolicy):
    """Policy for workers that find each other through a roster in the driver, on a node that is not taken away."""

    def __init__(self, roster: OwnRoster, faults: Faults, cluster: Cluster) -> None:
        super().__init__(roster, faults, "")
        self._cluster = cluster
        self._beginning = False  # do not wait for workers that may never get a node
        self._were_inside: set[RayWorker] = set()
        self._reported_waiting: set[int] = set()
        self._reported_unwatched = False

    def begin(self, supervisor: Supervisor) -> None:
        super().begin(supervisor)
        if lacks := self._cluster.lacks:
            self._reported_waiting.update(self._slots)
            self.note(f"no node has {lacks}: the workers wait until one with it comes")

    def act(self, now: float) -> None:
        running = {slot.number: slot.worker for slot in self._slots.values() if isinstance(slot.worker, RayWorker)}
        for number, worker in running.items():
            if self._ending and worker.node is None:
                worker.send(signal.SIGTERM)
            self._give_up_if_gone(worker, now)
            if worker.node in self._cluster.draining:
                self._leave_node(self._slots[number], worker)
        self._report(running, now)
        super().act(now)

    def end(self) -> tuple[str, str] | None:
        self._cluster.end_log()
        return super().end()

    def _give_up_if_gone(self, worker: RayWorker, now: float) -> None:
        if worker.number in self._roster.inside:
            self._were_inside.add(worker)
        elif worker in self._were_inside and worker.running and worker.unanswered_s(now) > SILENT_S:
            worker.give_up(f"was lost: its node {worker.address} does not answer")
        if worker.lost:
            self._cluster.give_up_node(worker.node)
        if not worker.running:
            self._were_inside.discard(worker)

    def _leave_node(self, slot: WorkerSlot, worker: RayWorker) -> None:
        """Make a worker leave a node that is to go: at the next micro-batch, to return on another node."""
        if worker.running and not slot.faulted and not self._ending:
            self.note(f"node {worker.address} is to go: worker {slot.number} leaves it, and returns on another")
            slot.faulted, slot.returns = True, True
            worker.send(signal.SIGTERM)

    def _report(self, running: dict[int, RayWorker], now: float) -> None:
        if self._cluster.cannot_watch and not self._reported_unwatched:
            self._reported_unwatched = True
            self.note(self._cluster.cannot_watch)
        waiting = [n for n, worker in running.items() if worker.node is None and now - worker.since > WAITING_S]
        if not self._ending and not self._reported_waiting.issuperset(waiting):
            self._reported_waiting.update(waiting)
            verb = "waits" if len(waiting) == 1 else "wait"
            self.note(f"{listed(waiting, {})} {verb} for a node with {self._cluster.demand}")


def own_roster(minimum: int, maximum: int, token: str, address: str) -> OwnRoster:
    """Return a roster that listens where the other nodes reach this one."""
    return OwnRoster(minimum=minimum, maximum=maximum, token=token, host=address, starter=STARTER)
