"""Gloo as an engine: its devices, its sockets, and how an operation is broken off, for Gloo's own abort does nothing.

Works of the whole group are waited for in slices of `CHECK_S`. Sends and receives cannot be: a wait that times out
closes the connection, and their works do not show their end before they are waited for. They fail when their
connections are shut, but for the rare one that Gloo forgets: its own thread takes a send off the list of those to wake,
finds the connection broken as it writes, and wakes the others. A `LeavableMessage` can be left then; for those of sums,
which cannot spare the time for a thread, see `paceline.transport.group.EngineWaits`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.contract import (
    CHECK_S,
    CLOSED,
    Check,
    Closer,
    Engine,
    EngineKind,
    EngineWork,
    Facts,
    Held,
    Meeting,
)
from paceline.transport.network import (
    ENGINE_TIMEOUT,
    Sockets,
    Store,
    any_closed,
    break_off,
    close_listeners,
    dist,
    gloo_device,
    joining,
    listening,
    open_sockets,
    read_json,
    unanswered,
)

CHECK = timedelta(seconds=CHECK_S)
ABANDON = timedelta(milliseconds=50)
"""How long an operation on connections that are shut may take to fail. Some never do."""
MakeGloo = Callable[[Store, int, int, Any], Any]
"""Makes Gloo's process group from a store, this worker's rank, the size, and options."""
Doors = dict[tuple[str, int], int]
"""The address at which each worker's engine listens, and its rank."""


class GlooWork(EngineWork):
    """An operation of the whole group."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, check: Check) -> None:
        """Wait in slices: an operation on connections that were shut under it may never fail."""
        while True:
            try:
                self._work.wait(CHECK)
                return
            except RuntimeError:
                if self.done:  # it failed, or it ended just after the wait for it had timed out
                    self._work.wait(CHECK)
                    return
            check()

    def abandon(self) -> bool:
        try:
            self._work.wait(ABANDON)
        except RuntimeError as error:
            return "timed out" not in str(error).lower()
        return True

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())


class GlooMessage(GlooWork):
    """A send or a receive, which is waited for until it ends or its connection is shut."""

    _waited = False

    def wait(self, check: Check) -> None:
        try:
            self._work.wait(ENGINE_TIMEOUT)
        finally:
            self._waited = True

    @property
    def done(self) -> bool:
        """Whether somebody has waited for the message: Gloo does not show its end before."""
        return self._waited

    def leavable(self) -> LeavableMessage:
        return LeavableMessage(self)


class LeavableMessage(EngineWork):
    """A message that is waited for on a thread of its own, so that whoever needs it can leave."""

    def __init__(self, message: GlooMessage) -> None:
        self._message = message

    def wait(self, check: Check) -> None:
        ended, errors = concurrency.Event(), list[RuntimeError]()

        def wait() -> None:
            try:
                self._message.wait(check)
            except RuntimeError as error:
                errors.append(error.with_traceback(None))
            finally:
                ended.set()

        concurrency.Thread(target=wait, name="paceline-message", daemon=True).start()
        while not ended.wait(CHECK_S):
            check()
        if errors:
            raise errors[0]

    def abandon(self) -> bool:
        return self._message.abandon()

    @property
    def done(self) -> bool:
        return self._message.done


class GlooEngine(Engine):
    """A process group of Gloo's. ``spare_port``: the store's, whose connections `abort` leaves alone."""

    def __init__(
        self,
        gloo: Any,
        *,
        rank: int = 0,
        sockets: Sockets = frozenset(),
        doors: Doors | None = None,
        spare_port: int = 0,
    ) -> None:
        self._gloo, self._rank, self._sockets, self._doors = gloo, rank, sockets, doors or {}
        self._spare_port = spare_port

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise RuntimeError(CLOSED)
        return self._gloo

    def sum(self, tensor: torch.Tensor) -> GlooWork:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return GlooWork(self._group.allreduce([tensor], options))

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> GlooWork:
        return GlooWork(self._group.alltoall_base(got.view(-1), sent.view(-1), [], [], dist.AllToAllOptions()))

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooWork:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return GlooWork(self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> GlooMessage:
        return GlooMessage(self._group.send([tensor], to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> GlooMessage:
        return GlooMessage(self._group.recv([tensor], source, tag))

    def abort(self) -> None:
        sockets, self._sockets = self._sockets, frozenset[tuple[int, str]]()
        if sockets:
            break_off(sockets, spare_port=self._spare_port)

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        """Return what the kernel knows of unacknowledged packets.

        A connection that this worker opened leads to the port of one worker. One that was opened from the other end
        shows the address alone: then any other worker at that address may be meant.
        """
        named: dict[tuple[str, int], float] = {}
        unnamed: dict[str, float] = {}
        for (address, port), silent_s in unanswered(self._sockets).items():
            rank = self._doors.get((address, port))
            if rank is None:
                unnamed[address] = max(silent_s, unnamed.get(address, 0.0))
            else:
                named[address, rank] = max(silent_s, named.get((address, rank), 0.0))
        found = [([rank], address, silent_s) for (address, rank), silent_s in named.items() if rank != self._rank]
        for address, silent_s in unnamed.items():
            there = {rank for (theirs, _), rank in self._doors.items() if theirs == address} - {self._rank}
            if ranks := [rank for rank in sorted(there) if (address, rank) not in named]:
                found.append((ranks, address, silent_s))
        return sorted(found, key=lambda one: (one[1], one[0]))

    def lost(self) -> bool:
        return any_closed(self._sockets)

    def close(self) -> list[Closer]:
        gloo, self._gloo = self._gloo, None
        return [] if gloo is None else [Held(gloo)]


class Gloo(EngineKind):
    """Sums over TCP, whatever the devices are."""

    name = "gloo"

    def suits(self, facts: Facts) -> bool:
        return True

    def connect(self, meeting: Meeting) -> tuple[GlooEngine, str]:
        def make(store: Store, rank: int, size: int, options: Any) -> Any:
            options._timeout = meeting.forming or ENGINE_TIMEOUT
            gloo = meeting.patiently(lambda: dist.ProcessGroupGloo(store, rank, size, options))
            if meeting.forming is not None:
                gloo.set_timeout(ENGINE_TIMEOUT)
            return gloo

        return connect_gloo(
            meeting.store,
            meeting.rank,
            meeting.size,
            towards=meeting.towards,
            spare_port=meeting.spare_port,
            make=make,
            channels=meeting.channels,
        )


def connect_gloo(
    store: Store,
    rank: int,
    size: int,
    *,
    towards: tuple[str, int],
    spare_port: int,
    make: MakeGloo | None = None,
    channels: int = 1,
) -> tuple[GlooEngine, str]:
    """Form a process group, to which all its workers come; returns it and a description for the log.

    ``towards``: where the fleet meets, or an address of this computer. ``channels``: how many sums may travel side by
    side, the same for all workers.
    """
    before = open_sockets()
    devices, (where, *_) = zip(*(gloo_device(*towards) for _ in range(channels)), strict=True)
    listeners = open_sockets() - before  # Gloo's, and what another thread of the script may have opened meanwhile
    mine = listening(listeners)
    store.set(f"doors/{rank}", json.dumps(mine))
    options = dist.ProcessGroupGloo._Options()
    options._devices = list(devices)
    options._threads = max(2, channels)
    options._timeout = ENGINE_TIMEOUT
    gloo = (make or dist.ProcessGroupGloo)(store, rank, size, options)
    doors = {at: other for other in range(size) for at in _doors_of(store, other)}  # all have come by now
    made = open_sockets() - before
    sockets = joining(made, {port for _, port in doors}) or made
    if len(mine) == channels:  # surely Gloo's
        close_listeners(listeners)
    return GlooEngine(gloo, rank=rank, sockets=sockets, doors=doors, spare_port=spare_port), f"gloo, {where}"


def _doors_of(store: Store, rank: int) -> list[tuple[str, int]]:
    """Return where a worker's engine listens; RuntimeError where the store has lost it, as when it was restarted."""
    try:
        return [(str(address), int(port)) for address, port in read_json(store, f"doors/{rank}")]
    except (TypeError, ValueError):
        raise RuntimeError(f"the store does not say where rank {rank} listens") from None
