"""Where the workers of a fixed fleet find each other: a torch TCPStore on a loopback port, hosted by the launcher."""

from __future__ import annotations

import logging
import socket
from typing import Any

from paceline.roster.persistence import StoreHost

ELASTIC_VARIABLES = ("PACELINE_ROSTER", "PACELINE_TOKEN", "PACELINE_WORKER", "PACELINE_STARTER")
"""What makes a worker one of a fleet that comes and goes: not meant for those of a fixed fleet."""

logger = logging.getLogger("paceline")


class RendezvousStore(StoreHost):
    """The store, from the binding of its port until `close`."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", holder="launcher")
        self._deaths: list[tuple[int, str]] = []

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Variables by which worker ``rank`` of ``size`` joins the others."""
        numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        return {
            **{name: str(value) for name, value in numbers.items()},
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def announce_death(self, rank: int, how: str) -> None:
        """Tell the survivors: key ``paceline/died/<rank>`` holds how the worker ended."""
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


def loopback() -> str | None:
    """Name of the loopback interface: all workers are on this computer, and other interfaces may be filtered.

    >>> loopback() in ("lo", "lo0", None)
    True
    """
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
