"""What workers of an elastic fleet hand over to each other: the last call's result, to those whom it has not reached
before the group was re-formed, and a newcomer's whole state."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.errors import Dropped
from paceline.roster.calls import CALLS, ROUNDS
from paceline.transport.distributed import one_line
from paceline.transport.elastic.calls import gift
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.group import Group

if TYPE_CHECKING:
    from paceline.transport.elastic.reform import Forming, Reform
    from paceline.transport.elastic.transport import Elastic

logger = logging.getLogger("paceline")

STATE_TAG = 1 << 29
PIECE = 4 << 20
"""Bytes of a state that are passed on at a time: a chain of n newcomers takes (1 + n * PIECE / size) times as long as
one newcomer alone."""
LOOP, TOLD = "loop", "told"


class HandOver:
    """This worker's part in handing over results and states."""

    def __init__(self, transport: Elastic) -> None:
        self._transport, self._lanes = transport, transport.lanes
        self.sent: list[Any] = []
        """What was handed over, on its way."""
        self.later: tuple[torch.Tensor, MembershipChange] | None = None
        """A state that was handed to this newcomer, of a loop that its script has yet to come to."""
        self.recorded = concurrency.Event()
        """Not set: a round aside has ended, here or by what was handed over, and is not in the training's state yet,
        under the old membership. The thread that runs these rounds sets it, at its next call at the latest."""
        self.recorded.set()

    # -- the last call's result ------------------------------------------------------------------------------------

    def results(self, forming: Forming, said: Sequence[Mapping[str, Any]], incumbents: Sequence[int]) -> None:
        """Those who finished the last call of a lane give its result to those who did not."""
        for name in self._lanes:
            intact = {rank: bool(said[rank]["intact"]) for rank in incumbents} if name == CALLS else None
            given = gift({rank: said[rank]["lanes"][name] for rank in incumbents}, intact=intact)
            if given is None:
                continue
            lacks_it = forming.group.rank in given.behind
            if given.giver is None:
                if lacks_it:
                    text = "the last round's result was changed in place by an optimiser, and cannot be handed over"
                    raise Dropped(text)
                continue
            hand_over = self._facts if given.facts else self._tensors
            hand_over(forming, name, given.giver, given.behind)
            if lacks_it:
                self._lanes[name].finish_given(facts=given.facts)
                if name == ROUNDS:
                    self.recorded.clear()

    def _facts(self, forming: Forming, name: str, giver: int, behind: Sequence[int]) -> None:
        group, lane, key = forming.group, self._lanes[name], f"given/{name}"
        if group.rank == giver:
            group.store.set(key, json.dumps(lane.result))
        elif group.rank in behind:
            group.wait_for([key], watch=forming)
            lane.result = list(json.loads(group.store.get(key)))

    def _tensors(self, forming: Forming, name: str, giver: int, behind: Sequence[int]) -> None:
        group, lane = forming.group, self._lanes[name]
        if group.rank == giver:  # whether it came shows in the next call
            for number, tensor in enumerate(lane.kept):
                data = bytes_of(tensor)
                self.sent += [(data, group.send(data, rank, number)) for rank in behind]
        elif group.rank in behind:  # not into the call's own tensors: what was cut short may still write there
            received = []
            for number, tensor in enumerate(lane.pending):
                data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
                forming.receive(data, giver, number)
                received.append(data.view(tensor.dtype).view(tensor.shape))
            lane.kept = received

    # -- a newcomer's state ----------------------------------------------------------------------------------------

    def send_state(self, chain: Sequence[int]) -> None:
        """At a step boundary: pack this worker's state, and send it to the first of the newcomers on a thread."""
        listener = self._transport.listener
        if listener is not None:
            data = listener.give_state()
            sender = StateSender(self._transport.group, chain[0], data.numel())
            for piece in pieces_of(data):
                sender.put(piece)
            sender.end()

    def receive_state(self, giver: int, chain: Sequence[int]) -> torch.Tensor:
        """A peer's state, from the giver or the newcomer before this one in the chain; each piece is passed on to the
        one behind as soon as it is here."""
        group = self._transport.group
        at = chain.index(group.rank)
        before = chain[at - 1] if at else giver
        size = torch.zeros(1, dtype=torch.int64)
        self._transport.receive(size, before, STATE_TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        sender = StateSender(group, chain[at + 1], int(size)) if at + 1 < len(chain) else None
        try:
            for number, piece in enumerate(pieces_of(data), start=1):
                self._transport.receive(piece, before, STATE_TAG + number)
                if sender is not None:
                    sender.put(piece)
        finally:
            if sender is not None:
                sender.end()
        return data

    def take_over(self, data: torch.Tensor, change: MembershipChange) -> None:
        """Take over a peer's state, now or once this worker's script has come to the fleet's loop."""
        if self._transport.listener is None or not self._take_over(data, change):
            self.later = (data, change)

    def take_over_later(self) -> bool:
        """The script of a newcomer has come to the loop that the fleet was in when it entered. False: the group was
        re-formed meanwhile, so it is to enter as one who is new."""
        later, self.later = self.later, None
        if later is None or self._transport.reform.is_over:
            return False
        self._transport.entered(self._take_over(*later))
        return not self._transport.outside

    def _take_over(self, data: torch.Tensor, change: MembershipChange) -> bool:
        assert self._transport.listener is not None
        self._transport.reform.show(change)
        return self._transport.listener.take_over(data, change)


class FleetLoop:
    """Which loop (``fleet.steps``) of the script the fleet is in: a newcomer has nothing to do in those before it."""

    def __init__(self, transport: Elastic, reform: Reform) -> None:
        self._transport, self._reform = transport, reform
        self.number = 0
        """Of the loop that this worker's script is in, from 1; 0 before the first."""
        self._told = ""

    def begin(self, number: int, told: str) -> None:
        """This worker's script begins another loop, with ``number - 1`` loops before it. ``told``: what a newcomer that
        passes them by needs to know, in words of the training's own."""
        self.number, self._told = number, told
        self.publish()

    def publish(self) -> None:
        """The leader tells those who wait to enter."""
        if not self._transport.outside and self._reform.group.rank == 0:
            with suppress(RuntimeError):
                self._reform.connector.root.set(TOLD, self._told)
                self._reform.connector.root.set(LOOP, str(self.number))

    def told_by_fleet(self) -> str:
        """For a worker that waits to enter: what the fleet said when its loop began; empty when nobody knows."""
        return self._ask_fleet(TOLD)

    def of_fleet(self) -> int:
        """For a worker that waits to enter: the loop that the fleet is in; 0 when nobody knows."""
        return int(self._ask_fleet(LOOP) or 0)

    def _ask_fleet(self, key: str) -> str:
        with suppress(RuntimeError):
            return self._reform.connector.ask(key, at=self._reform.client.store)
        return ""


class StateSender:
    """Sends a state of ``size`` bytes to one newcomer, piece by piece as it is `put`, on a thread; this one does not
    wait. If it cannot be sent, the newcomer is gone or the generation over: either shows elsewhere."""

    def __init__(self, group: Group, to: int, size: int) -> None:
        self._pieces: concurrency.SimpleQueue[torch.Tensor | None] = concurrency.SimpleQueue()
        self._pieces.put(torch.tensor([size], dtype=torch.int64))
        logger.info("sends a state of %d MB to rank %d", size // 1_000_000, to)
        send = partial(self._send, group, to)
        concurrency.Thread(target=send, name="paceline-send-state", daemon=True).start()

    def put(self, piece: torch.Tensor) -> None:
        self._pieces.put(piece)

    def end(self) -> None:
        """There is nothing more to send."""
        self._pieces.put(None)

    def _send(self, group: Group, to: int) -> None:
        try:
            for number, piece in enumerate(iter(self._pieces.get, None)):
                group.send(piece, to, STATE_TAG + number).wait(group.look)
        except RuntimeError as error:
            logger.info("the state for rank %d was not sent: %s", to, one_line(error))


def pieces_of(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[at : at + PIECE] for at in range(0, data.numel(), PIECE)]


def chain_of(newcomers: Sequence[int], hosts: Sequence[str], *, giver: int) -> list[int]:
    """The order in which newcomers pass a state on: those of one computer one after another, the giver's own first, so
    that the state enters each computer once. ``hosts``: of all ranks.

    >>> chain_of([1, 2, 3, 4], ["a", "b", "a", "b", "c"], giver=0)
    [2, 1, 3, 4]
    """
    return sorted(newcomers, key=lambda rank: (hosts[rank] != hosts[giver], hosts[rank], rank))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
