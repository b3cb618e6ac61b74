"""Connects the members of a generation: the roster's store, and an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from paceline import concurrency
from paceline.roster import Generation
from paceline.transport.distributed import channels
from paceline.transport.engines import ENGINES, choose
from paceline.transport.engines.contract import Engine, EngineKind, Facts, Meeting
from paceline.transport.group import Group, Watch
from paceline.transport.network import Store, dist
from paceline.transport.survey import Survey, find_address, own_addresses

logger = logging.getLogger("paceline")

FORMING = timedelta(seconds=5)
"""How long the engine may take to connect members that are all there."""
STORE = timedelta(seconds=20)
"""How long the roster's store may take to answer."""
PREFIX = "generation"
"""The prefix of a generation's keys in the store, before its number."""


class Connector:
    """Connects one generation after another.

    ``check`` raises when the one that is being connected is over. ``cpu_engine``: Gloo takes the place of an engine
    that needs GPUs.
    """

    def __init__(self, device: torch.device, *, check: Callable[[], None], cpu_engine: bool) -> None:
        self._device, self._check, self._cpu_engine = device, check, cpu_engine
        self.root: Store = None
        """The roster's store, whatever the generation."""
        self.signals_root: Store = None
        """The roster's store over another connection."""
        self._store_at: tuple[str, int] | None = None
        self._address = ""
        """The address at which the members of the last generation reached this worker."""
        self._survey = Survey()

    def open_store(self, generation: Generation, *, worker: int) -> Group:
        """Return the members of a generation with its store, as yet without an engine; ``worker`` is this one's id."""
        if self._store_at != generation.store:
            self.root = self._open(generation.store)
            self.signals_root = self.root.clone()
            self._store_at = generation.store
        prefix = f"{PREFIX}{generation.number}"
        store, board = self._under(prefix, self.root), self._under(prefix, self.signals_root)
        rank, size = generation.workers.index(worker), len(generation.workers)
        return Group(rank, size, generation=generation.number, store=store, signals=store, board=board)

    def forget_store(self) -> None:
        """Open new connections to the store with the next generation, for the present ones are broken."""
        self._store_at = None

    def ask(self, key: str, *, at: tuple[str, int]) -> str:
        """Return a value of the roster's store ``at`` this address, over a connection for this question alone.

        Empty where there is no value; RuntimeError when the store does not answer.
        """
        store = self._open(at)
        return str(store.get(key), "utf-8") if store.check([key]) else ""

    def connect(self, group: Group, generation: Generation, *, watch: Watch) -> str:
        """Connect these members, all of whom come here, in the order of where they are; return the engine's name."""
        store, facts = self._under("group", group.store), [generation.facts[one] for one in generation.workers]
        own = own_addresses(*generation.store, first=self._address)
        by_id = {one: generation.facts[one] for one in generation.workers}
        self._address = find_address(group, own, facts=by_id, watch=watch)
        topology = self._survey.arrange(group, facts, host=self._address, watch=watch)
        kind, spare_port = self.engine_for(facts), generation.store[1]
        how: Any = {"channels": channels(facts), "forming": FORMING, "patiently": self._on_thread}

        def make(rank: int, size: int) -> tuple[Engine, str]:
            towards = (self._address, 0)
            return kind.connect(Meeting(store, rank, size, towards, self._device, spare_port=spare_port, **how))

        group.connect(make, topology=topology)
        if kind.needs_gpus:
            logger.info("worker %d of %d sums over %s", group.rank, group.size, kind.name)
        group.sum_over(self._survey.weigh(group, topology, facts, watch=watch))
        return kind.name

    def break_off(self, group: Group) -> None:
        """Break off what is under way in the group; a thread that stays stuck in it ends the process."""
        group.break_off()
        group.end_if_stuck()

    def _open(self, at: tuple[str, int]) -> Store:
        """Open a connection to the roster's store."""
        host, port = at
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)

    def _under(self, prefix: str, store: Store) -> Store:
        """Return the same store with this prefix before each key."""
        return dist.PrefixStore(prefix, store)

    def engine_for(self, facts: Facts) -> EngineKind:
        """Return the kind of engine that connects these workers."""
        kind, on_gpus = choose(facts), all(str(one["device"]).startswith("cuda") for one in facts)
        return ENGINES["gloo"] if kind.needs_gpus and (self._cpu_engine or not on_gpus) else kind

    def _on_thread(self, make: Callable[[], Any]) -> Any:
        """Connect on a thread, which is left to itself when the generation is over.

        Connecting cannot be broken off, and engines try for long.
        """
        made: list[Any] = []
        thread = concurrency.Thread(target=_make, args=(make, made), name="paceline-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            self._check()
        group = made.pop()
        if isinstance(group, BaseException):
            raise group
        return group


def _make(make: Callable[[], Any], made: list[Any]) -> None:
    try:
        made.append(make())
    except Exception as error:  # of any kind: the thread that waits raises it
        made.append(error)
