"""Connects the members of a generation: the roster's store, Gloo, and NCCL where every member has a GPU of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from paceline import concurrency
from paceline.roster import Generation
from paceline.transport.distributed import channels, choose_backend
from paceline.transport.engines.gloo import connect_gloo
from paceline.transport.group import Group, Watch
from paceline.transport.nccl import NcclGroup
from paceline.transport.network import ENGINE_TIMEOUT, Store, dist
from paceline.transport.paths import find_address, own_addresses
from paceline.transport.survey import Survey

logger = logging.getLogger("paceline")

FORMING = timedelta(seconds=5)
"""How long the engine may take to connect members that are all there."""
STORE = timedelta(seconds=20)
"""How long the roster's store may take to answer."""
PREFIX = "generation"
"""Of a generation's keys in the store, before its number."""


class Connector:
    """Connects one generation after another. ``check`` raises when the one that is being connected is over."""

    def __init__(self, device: torch.device, *, check: Callable[[], None], gloo_only: bool) -> None:
        self._device, self._check, self._gloo_only = device, check, gloo_only
        self.root: Store = None
        """The roster's store, whatever the generation."""
        self.aside: Store = None
        """The same over another connection."""
        self._store_at: tuple[str, int] | None = None
        self._address = ""
        """Where the members of the last generation reached this worker."""
        self._survey = Survey()

    def open_store(self, generation: Generation, *, worker: int) -> Group:
        """The members of a generation with its store, as yet without a process group; ``worker``: this one's id."""
        if self._store_at != generation.store:
            self.root = self._open(generation.store)
            self.aside = self.root.clone()
            self._store_at = generation.store
        prefix = f"{PREFIX}{generation.number}"
        store, board = self._under(prefix, self.root), self._under(prefix, self.aside)
        rank, size = generation.workers.index(worker), len(generation.workers)
        return Group(rank, size, store=store, signals=store, board=board)

    def forget_store(self) -> None:
        """Open new connections to the store with the next generation, for the present ones are broken."""
        self._store_at = None

    def ask(self, key: str, *, at: tuple[str, int]) -> str:
        """Return a value of the roster's store ``at`` this address, over a connection for this question alone.

        Empty where there is no value; RuntimeError when the store does not answer.
        """
        store = self._open(at)
        return str(store.get(key), "utf-8") if store.check([key]) else ""

    def connect(self, group: Group, generation: Generation, *, watch: Watch) -> None:
        """Form the process groups of these members, all of whom come here, as their places are."""
        store, facts = self._under("group", group.store), [generation.facts[one] for one in generation.workers]
        own = own_addresses(*generation.store, first=self._address)
        by_id = {one: generation.facts[one] for one in generation.workers}
        self._address = find_address(group, own, facts=by_id, watch=watch)
        topology = self._survey.arrange(group, facts, host=self._address, watch=watch)
        how: Any = {"make": self._make_gloo, "channels": channels(facts), "spare_port": generation.store[1]}
        group.connect(partial(connect_gloo, store, towards=(self._address, 0), **how), topology=topology)
        group.sum_over(self._survey.weigh(group, topology, facts, watch=watch))
        if self.may_use_nccl(facts):
            store = self._under("gpus", group.store)
            group.gpus = self._on_thread(lambda: NcclGroup(store, group.rank, group.size, self._device))
            logger.info("worker %d of %d sums over nccl", group.rank, group.size)

    def break_off(self, group: Group) -> None:
        """What is under way in the group fails now; a thread that stays stuck in it ends the process."""
        group.break_off()
        group.end_if_stuck()

    def _open(self, at: tuple[str, int]) -> Store:
        """Open a connection to the roster's store."""
        host, port = at
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)

    def _under(self, prefix: str, store: Store) -> Store:
        """Return the same store with this prefix before each key."""
        return dist.PrefixStore(prefix, store)

    def _make_gloo(self, store: Store, rank: int, size: int, options: Any) -> Any:
        options._timeout = FORMING
        gloo = self._on_thread(lambda: dist.ProcessGroupGloo(store, rank, size, options))
        gloo.set_timeout(ENGINE_TIMEOUT)
        return gloo

    def may_use_nccl(self, facts: Sequence[Mapping[str, Any]]) -> bool:
        on_gpus = all(str(one["device"]).startswith("cuda") for one in facts)
        return on_gpus and not self._gloo_only and choose_backend(facts) == "nccl"

    def _on_thread(self, make: Callable[[], Any]) -> Any:
        """Connecting cannot be broken off, and engines try for long: so it happens on a thread, which is left to itself
        when the generation is over."""
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
    except RuntimeError as error:
        made.append(error)
