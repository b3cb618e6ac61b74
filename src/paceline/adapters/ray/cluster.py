"""The Ray cluster of the driver: joined, asked for actors, watched for nodes that are to go."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from paceline import concurrency
from paceline.adapters.ray.demand import Demand, lacking
from paceline.adapters.ray.messages import LogCollector, NodeOrder
from paceline.adapters.ray.node import NodeWorker
from paceline.adapters.ray.worker import RayWorker

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
