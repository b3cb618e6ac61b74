"""Where the workers of a fixed fleet find each other: a torch TCPStore on a loopback port, hosted by the launcher.

The port is bound before the first worker starts and the store is made in a thread, while the workers import torch
themselves: their first connections wait in the socket's queue for the moment it takes.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

ELASTIC_VARIABLES = ("PACELINE_ROSTER", "PACELINE_TOKEN", "PACELINE_WORKER")
"""What makes a worker one of a fleet that comes and goes: not meant for those of a fixed fleet."""

logger = logging.getLogger("paceline")


class RendezvousStore:
    """The store, from the binding of its port until `close`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        self._store: Any = None
        self._lock = threading.Lock()
        self._deaths: list[tuple[int, str]] = []

    def close(self) -> None:
        with self._lock:
            self._store = None
            self._socket.close()

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Variables by which worker ``rank`` of ``size`` joins the others."""
        numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        return {
            **{name: str(value) for name, value in numbers.items()},
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def host(self) -> None:
        """Make the store; returns at once."""
        threading.Thread(target=self._host, name="paceline-store", daemon=True).start()

    def announce_death(self, rank: int, how: str) -> None:
        """Tell the survivors: key ``paceline/died/<rank>`` holds how the worker ended."""
        with self._lock:
            if self._store is None:
                self._deaths.append((rank, how))
            else:
                self._set(self._store, rank, how)

    def _host(self) -> None:
        try:
            import torch.distributed

            dist: Any = torch.distributed  # its type stubs leave out half of what it exports

            with self._lock:
                listener = self._socket.detach()
            if listener < 0:  # closed already
                return
            store = dist.TCPStore(
                self.address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener
            )
        except Exception as error:  # the workers will time out on their own; a script without a fleet does not care
            logger.error("the launcher cannot host the fleet's store: %s", error)
            return
        with self._lock:
            self._store = store
            for rank, how in self._deaths:
                self._set(store, rank, how)

    @staticmethod
    def _set(store: Any, rank: int, how: str) -> None:
        try:
            store.set(f"paceline/died/{rank}", how)
        except RuntimeError as error:
            logger.warning("could not tell the others that worker %d %s: %s", rank, how, error)


def loopback() -> str | None:
    """Name of the loopback interface: all workers are on this computer, and other interfaces may be filtered.

    >>> loopback() in ("lo", "lo0", None)
    True
    """
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
