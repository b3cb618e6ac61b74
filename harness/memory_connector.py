"""Connects the members of a generation in memory: elastic fleets whose workers are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from memory_engine import MemoryEngine, MemoryNetwork
from memory_store import MemoryPrefix, open_memory_store

from paceline.roster import Generation
from paceline.transport.elastic.connector import Connector
from paceline.transport.group import Group, Watch


class MemoryConnector(Connector):
    """A connector over a `MemoryNetwork`; a server (`MemoryServer`) must be at the address of the generation's store.

    As the factory of `Elastic(..., connector=...)`: ``partial(MemoryConnector, network=network, process="worker 1")``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        check: Callable[[], None],
        cpu_engine: bool,
        network: MemoryNetwork,
        process: Hashable = None,
    ) -> None:
        super().__init__(device, check=check, cpu_engine=cpu_engine)
        self._network, self._process = network, process

    def connect(self, group: Group, generation: Generation, *, watch: Watch) -> str:
        def make(rank: int, size: int) -> tuple[MemoryEngine, str]:
            key = (*generation.store, generation.number)
            engine = MemoryEngine(self._network, key, rank, size, process=self._process)
            engine.join(self._check)
            return engine, "memory"

        group.connect(make)
        return "memory"

    def _open(self, at: tuple[str, int]) -> Any:
        return open_memory_store(self._network, (at[0], at[1]))

    def _under(self, prefix: str, store: Any) -> Any:
        return MemoryPrefix(prefix, store)
