"""The driver's Ray cluster, asked for actors and watched for nodes that are to go, and the policy of a fleet in it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from paceline import concurrency
from paceline.adapters.ray.demand import Demand, lacking
from paceline.adapters.ray.messages import LogCollector, NodeOrder
from paceline.adapters.ray.worker import NodeWorker, RayWorker
from paceline.launcher.elastic_fleet import ElasticPolicy, WorkerSlot
from paceline.launcher.faults import Faults
from paceline.launcher.roster import OwnRoster
from paceline.launcher.supervise import Supervisor
from paceline.roster.calls import listed

REACHED_S = 3.0
"""Seconds that the cluster's head may take to answer a first connection."""
DRAIN_S = 1.0
"""Seconds between two queries for the nodes that are to go."""
AVOIDED_S = 60.0
"""Seconds for which nothing is started on a node that was given up: it may only have been cut off."""
NODE_ID = "ray.io/node-id"
"""Label by which Ray itself names a node."""
AT_ONCE = 4
"""Calls that an actor serves at the same time: the one that runs the process, and signals."""
STARTER = "ray"
"""Prefix of the workers' names, which stay when a worker returns on another node."""
SILENT_S = 3.0
"""Seconds without an answer of the actor after which a worker that the roster has lost is replaced.

Ray itself may take 12 s and more to report that a node is gone.
"""
WAITING_S = 10.0
"""Seconds that a worker waits for a node before the driver reports it."""


def connect(address: str, runtime_env: Mapping[str, Any] | None = None) -> bool:
    """Join the cluster at ``address``; return whether this process was not in it already.

    "auto" is the cluster that this computer is a node of. Raise ValueError with one line when there is none.
    """
    if ray.is_initialized():
        return False
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address}: the driver must be on a node of the cluster, where the workers reach it; run it there, "
            "with --ray auto or through `ray job submit`"
        )
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    _check_reached(address, named)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=dict(runtime_env or {}) or None,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == "auto" and not named:
            raise ValueError(
                "--ray auto: no Ray cluster runs on this computer; start one (ray start --head), or give its address, "
                "such as --ray 10.0.0.1:6379"
            ) from None
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"--ray {address}: cannot join the cluster ({reason})") from None
    return True


def _check_reached(address: str, named: str) -> None:
    """Raise ValueError if the head does not answer; Ray itself would try for half a minute."""
    host, colon, port = named.rpartition(":")
    if not named and address == "auto":
        return
    if not colon or not port.isdigit():
        raise ValueError(f"--ray {named or address}: write auto, or the head's HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--ray {named}: no Ray cluster answers there ({reason})") from None


class Cluster:
    """Starter of a run's workers as actors, each by itself: a placement group is a gang, and lost as one.

    An actor for which there is no room waits, and is what an autoscaler sees as demand.
    """

    def __init__(
        self,
        demand: Demand,
        run_dir: Path,
        *,
        called: tuple[str, ...] = (),
        function: bytes | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self.demand, self.returned = demand, dict[int, bytes]()
        self.draining: frozenset[str] = frozenset()
        """Ids of nodes that are to go."""
        self.cannot_watch = ""
        """Reason for which the nodes that are to go are unknown; empty when they are known."""
        self._called, self._function, self._run_dir = called, function, run_dir
        self._collector = LogCollector(run_dir)
        self._gone: dict[str, float] = {}
        """Times at which nodes were given up."""
        self._runtime_env = {"runtime_env": dict(runtime_env)} if runtime_env else {}
        self._actor = ray.remote(NodeWorker)
        self._closed = concurrency.Event()
        self._thread = concurrency.Thread(target=self._watch, name="paceline-ray", daemon=True)
        self._thread.start()

    @property
    def lacks(self) -> str:
        """Return which needs of a worker no node has; empty when one has all."""
        return lacking(self.demand, ray.nodes())

    def start(self, number: int, environment: Mapping[str, str]) -> RayWorker:
        """Start a worker. Nodes get Paceline's variables of the driver's environment; runtime_env has the rest."""
        ours = {name: value for name, value in environment.items() if name.startswith("PACELINE_")}
        order = NodeOrder(
            number, self._called, self._function, ours, os.getcwd(), str(self._run_dir), self._collector.mark
        )
        actor = self._actor.options(
            max_restarts=0,
            max_concurrency=AT_ONCE,
            scheduling_strategy="SPREAD",
            **avoiding(self.demand, self._recently_gone()).options(),
            **self._runtime_env,
        ).remote()
        stream = actor.work.options(num_returns="streaming").remote(order)
        return RayWorker(number, actor, stream, logged=self._collector.add, returned=self.returned.__setitem__)

    def give_up_node(self, node: str | None) -> None:
        """Start nothing on a node for a while: Ray may take 12 s and more to notice that it is gone."""
        if node is not None:
            self._gone[node] = concurrency.monotonic()

    def _recently_gone(self) -> list[str]:
        now = concurrency.monotonic()
        return sorted(node for node, since in self._gone.items() if now - since < AVOIDED_S)

    def end_log(self) -> None:
        """Close the log: the nodes have sent all of theirs."""
        self._collector.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)
        self._collector.close()

    def _watch(self) -> None:
        ask = draining_nodes()
        if ask is None:
            self.cannot_watch = (
                f"Ray {ray.__version__} does not tell which nodes are to go: workers there do not leave by themselves"
            )
            return
        while not self._closed.wait(DRAIN_S):
            with suppress(Exception):  # the head may be unreachable for a while
                self.draining = frozenset(ask())


def avoiding(demand: Demand, nodes: Sequence[str]) -> Demand:
    """Return the same demand on any node but these.

    >>> avoiding(Demand(), ["a", "b"]).labels
    {'ray.io/node-id': '!in(a,b)'}
    """
    if not nodes or NODE_ID in demand.labels:
        return demand
    return Demand(demand.resources, {**demand.labels, NODE_ID: f"!in({','.join(nodes)})"})


def draining_nodes() -> Callable[[], Mapping[str, int]] | None:
    """Return Ray's function that returns the ids of nodes being drained or preempted; None when it is missing.

    It is private to Ray (2.60 has no public one), and so it may go.
    """
    found: Any = ray
    for name in ("_private", "state", "state", "get_draining_nodes"):
        found = getattr(found, name, None)
    return found if callable(found) else None


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
