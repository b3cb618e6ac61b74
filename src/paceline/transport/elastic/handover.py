"""What workers of an elastic fleet hand over to each other: results of calls, and a newcomer's state.

A worker makes its calls in two sequences, the *lanes*: those of the user's thread, and the rounds of a thread beside
it. Calls of one lane are made one after another, the same on every worker. When a generation breaks off, a call may
have ended on some workers and not on others, but only the last one of a lane: so counts differ by one at most, and a
worker that has the result hands it to those that lack it (`gift` decides who to whom).
"""

from __future__ import annotations

import json
import logging
import mmap
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.errors import Dropped, FleetError
from paceline.roster.calls import BACKGROUND, CALLS
from paceline.transport.base import Pending
from paceline.transport.call_sequences import CallSequences
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.engines.contract import STATE_TAGS

if TYPE_CHECKING:
    from paceline.transport.elastic.reform import Forming, Reform
    from paceline.transport.elastic.transport import Elastic

logger = logging.getLogger("paceline")

PIECE = 4 << 20
"""Bytes of a state that are passed on at a time: a chain of n newcomers takes (1 + n * PIECE / size) times as long as
one newcomer alone."""
LARGE_PAGE = 2 << 20
"""Bytes from which on memory is asked for in large pages."""
AT_ONCE = 4
"""Pieces that are on their way to a worker at a time: one by one, half of the time is spent on agreeing to send."""
LOOP, CALL_RESULTS = "loop", "call_results"
"""Keys in the roster's store: the loop that the fleet is in, and what the calls before it returned."""


@dataclass
class Lane:
    """One sequence of calls of this worker."""

    entered: int = 0
    finished: int = 0
    facts: list[Any] | None = None
    """What the last finished call gave, when that was facts."""
    tensors: Sequence[torch.Tensor] = ()
    """The tensors that hold the last finished call's result, when that was a round."""
    pending: Sequence[torch.Tensor] = ()
    """The tensors for the result of the round under way."""
    given: bool = False
    """The call under way was finished by others, and its result handed over."""

    def enter(self) -> int:
        """Begin the next call, or the last one again if it was cut short; its number."""
        self.entered, self.given = self.finished + 1, False
        return self.entered

    def finish(self, *, facts: list[Any] | None, tensors: Sequence[torch.Tensor]) -> None:
        self.finished = self.entered
        self.facts, self.tensors, self.pending, self.given = facts, tensors, (), False

    def finish_given(self, *, facts: bool) -> None:
        """End the call under way by what others gave: facts, in ``facts``, or a round's tensors, in ``tensors``."""
        self.finished, self.pending, self.given = self.entered, (), True
        self.facts, self.tensors = (self.facts, ()) if facts else (None, self.tensors)

    def forget(self) -> None:
        """Forget what was under way: the fleet went on without this worker."""
        self.tensors, self.pending, self.facts, self.entered = (), (), None, self.finished

    def report(self) -> dict[str, Any]:
        """Return what the others need when the group is re-formed."""
        return {"finished": self.entered if self.given else self.finished, "facts_kept": self.facts is not None}


class Lanes:
    """This worker's sequences of calls, which ``sequences`` shows to the others."""

    def __init__(self, sequences: CallSequences) -> None:
        self._sequences = sequences
        self._lanes = {CALLS: Lane(), BACKGROUND: Lane()}

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lanes)

    def enter(self, label: str, *, lane: str) -> int:
        return self._sequences.enter(label, lane=lane, since=concurrency.monotonic(), call=self[lane].enter())

    def forget(self) -> None:
        """Leave every call and step: the fleet went on without this worker."""
        self._sequences.begun = 0
        for name, lane in self._lanes.items():
            lane.forget()
            self._sequences.fall_back(lane.finished, lane=name)

    def skip_to(self, call: int, *, lane: str) -> None:
        """Continue at a peer's position in the training, calls included, which this worker has taken over."""
        self._lanes[lane] = Lane(entered=call, finished=call)
        self._sequences.skip_to(call, lane=lane)

    @property
    def rounds(self) -> int:
        """Background rounds that this worker has finished."""
        return self[BACKGROUND].finished

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self.skip_to(rounds, lane=BACKGROUND)


@dataclass(frozen=True)
class Gift:
    """The last call's result, on its way from one who has it to those who have not."""

    giver: int | None
    """None: nobody still has it as it was."""
    behind: tuple[int, ...]
    facts: bool
    """Whether it is facts; else the tensors of a round."""


def gift(reports: Mapping[int, Mapping[str, Any]], *, intact: Mapping[int, bool] | None = None) -> Gift | None:
    """Return who gives the last call's result to whom, by what each reports of its lane; None: all are equally far.

    ``intact``: whose tensors still are as the round left them; without it, everybody's.

    >>> gift({0: {"finished": 7, "facts_kept": True}, 2: {"finished": 6, "facts_kept": False}})
    Gift(giver=0, behind=(2,), facts=True)
    """
    finished = {rank: int(theirs["finished"]) for rank, theirs in reports.items()}
    last = max(finished.values())
    behind = tuple(rank for rank, count in finished.items() if count < last)
    if any(finished[rank] < last - 1 for rank in behind):
        raise FleetError(f"workers are more than one call apart ({finished}): this is a bug in Paceline")
    if not behind:
        return None
    known = [rank for rank, count in finished.items() if count == last]
    facts = bool(reports[known[0]]["facts_kept"])
    givers = [rank for rank in known if facts or intact is None or intact[rank]]
    return Gift(givers[0] if givers else None, behind, facts)


class HandOver:
    """This worker's part in handing over results and states."""

    def __init__(self, transport: Elastic) -> None:
        self._transport, self._lanes = transport, transport.lanes
        self.sent: list[Any] = []
        """What was handed over, on its way."""
        self.later: tuple[list[torch.Tensor], MembershipChange] | None = None
        """A state that was handed to this newcomer, of a loop that its script has yet to come to."""
        self.recorded = concurrency.Event()
        """Whether the last background round is in the training's state, under the membership in which it ran.

        Cleared when such a round ends, here or by what was handed over. The thread that runs these rounds sets it, at
        its next call at the latest.
        """
        self.recorded.set()

    # -- the last call's result ------------------------------------------------------------------------------------

    def results(self, forming: Forming, reports: Sequence[Mapping[str, Any]], incumbents: Sequence[int]) -> None:
        """Hand the result of a lane's last call from those who finished it to those who did not."""
        for name in self._lanes:
            intact = {rank: bool(reports[rank]["intact"]) for rank in incumbents} if name == CALLS else None
            given = gift({rank: reports[rank]["lanes"][name] for rank in incumbents}, intact=intact)
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
                if name == BACKGROUND:
                    self.recorded.clear()

    def _facts(self, forming: Forming, name: str, giver: int, behind: Sequence[int]) -> None:
        group, lane, key = forming.group, self._lanes[name], f"given/{name}"
        if group.rank == giver:
            group.store.set(key, json.dumps(lane.facts))
        elif group.rank in behind:
            group.wait_for([key], watch=forming)
            lane.facts = list(json.loads(group.store.get(key)))

    def _tensors(self, forming: Forming, name: str, giver: int, behind: Sequence[int]) -> None:
        group, lane = forming.group, self._lanes[name]
        if group.rank == giver:  # whether it came shows in the next call
            for number, tensor in enumerate(lane.tensors):
                data = bytes_of(tensor)
                self.sent += [(data, group.send(data, rank, number)) for rank in behind]
        elif group.rank in behind:  # not into the call's own tensors: what was cut short may still write there
            received = []
            for number, tensor in enumerate(lane.pending):
                data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
                forming.receive(data, giver, number)
                received.append(data.view(tensor.dtype).view(tensor.shape))
            lane.tensors = received

    # -- a newcomer's state ----------------------------------------------------------------------------------------

    def send_state(self, chain: Sequence[int], held: Collection[str]) -> None:
        """Send this worker's state, at a step boundary, to the first newcomer, straight from where it lies.

        Returns when all of it has left: until then this worker's training does not go on and change it. What all
        newcomers have ``held`` stays here.
        """
        listener = self._transport.listener
        if listener is not None:
            state = listener.give_state(held)
            sending = SendingState(self._transport, chain[0], state)
            for piece in pieces_of(state):
                sending.put(piece)
            sending.end()

    def receive_state(self, giver: int, chain: Sequence[int]) -> list[torch.Tensor]:
        """Receive a peer's state from the giver, or from the newcomer before this one in the chain.

        Each piece is passed on to the newcomer behind as soon as it is here.
        """
        transport = self._transport
        at = chain.index(transport.group.rank)
        before = chain[at - 1] if at else giver
        count = torch.zeros(1, dtype=torch.int64)
        transport.start_receive(count, before, STATE_TAGS).wait()
        sizes = torch.zeros(int(count), dtype=torch.int64)
        transport.start_receive(sizes, before, STATE_TAGS + 1).wait()
        state = [room(size) for size in sizes.tolist()]
        sending = SendingState(transport, chain[at + 1], state) if at + 1 < len(chain) else None
        coming: deque[tuple[torch.Tensor, Pending]] = deque()

        def land() -> None:
            piece, pending = coming.popleft()
            pending.wait()
            if sending is not None:
                sending.put(piece)

        for number, piece in enumerate(pieces_of(state), start=2):
            coming.append((piece, transport.start_receive(piece, before, STATE_TAGS + number)))
            if len(coming) == AT_ONCE:
                land()
        while coming:
            land()
        if sending is not None:
            sending.end()
        return state

    def take_over(self, data: list[torch.Tensor], change: MembershipChange) -> None:
        """Take over a peer's state, now or once this worker's script has come to the fleet's loop."""
        if self._transport.listener is None or not self._take_over(data, change):
            self.later = (data, change)
        else:  # to give back gigabytes takes a part of a second, for which nobody is to wait
            concurrency.Thread(target=data.clear, name="paceline-free", daemon=True).start()

    def take_over_later(self) -> bool:
        """Take a state over when a newcomer's script has come to the loop that the fleet was in when it entered.

        False: the group was re-formed meanwhile, so it is to enter as one who is new.
        """
        later, self.later = self.later, None
        if later is None or self._transport.reform.is_over:
            return False
        self._transport.entered(self._take_over(*later))
        return not self._transport.outside

    def _take_over(self, data: list[torch.Tensor], change: MembershipChange) -> bool:
        assert self._transport.listener is not None
        self._transport.reform.show(change)
        return self._transport.listener.take_over(data, change)


class FleetLoop:
    """Which loop (``fleet.steps``) of the script the fleet is in: a newcomer has nothing to do in those before it."""

    def __init__(self, transport: Elastic, reform: Reform) -> None:
        self._transport, self._reform = transport, reform
        self.number = 0
        """Number of the loop that this worker's script is in, from 1; 0 before the first."""
        self._call_results = ""

    def begin(self, number: int, call_results: str) -> None:
        """Begin another loop of the script, with ``number - 1`` loops before it.

        ``call_results``: what calls between these loops returned (`CallResults.to_json`), for a newcomer that passes
        over them.
        """
        self.number, self._call_results = number, call_results
        self.publish()

    def publish(self) -> None:
        """Publish the loop, on the leader, for those who wait to enter."""
        if not self._transport.outside and self._reform.group.rank == 0:
            with suppress(RuntimeError):
                self._reform.connector.root.set(CALL_RESULTS, self._call_results)
                self._reform.connector.root.set(LOOP, str(self.number))

    def call_results_of_fleet(self) -> str:
        """Return what the fleet published when its loop began, for a worker that waits to enter; empty: unknown."""
        return self._ask_fleet(CALL_RESULTS)

    def of_fleet(self) -> int:
        """Return the loop that the fleet is in, for a worker that waits to enter; 0: unknown."""
        return int(self._ask_fleet(LOOP) or 0)

    def _ask_fleet(self, key: str) -> str:
        with suppress(RuntimeError):
            return self._reform.connector.ask(key, at=self._reform.client.store)
        return ""


class SendingState:
    """A state on its way to one newcomer, piece by piece as it is `put`.

    If it cannot be sent, the newcomer is gone or the generation over: either raises `GenerationOver`.
    """

    def __init__(self, transport: Elastic, to: int, state: Sequence[torch.Tensor]) -> None:
        self._transport, self._to, self._number = transport, to, 0
        self._sent: deque[tuple[torch.Tensor, Pending]] = deque()
        sizes = [part.numel() for part in state]
        logger.info("sends a state of %d MB to rank %d", sum(sizes) // 1_000_000, to)
        for fact in ([len(sizes)], sizes):
            self.put(torch.tensor(fact, dtype=torch.int64))

    def put(self, piece: torch.Tensor) -> None:
        """Send the next piece, which must not change before the `end`; waits when `AT_ONCE` are on their way."""
        piece = piece.cpu()
        self._sent.append((piece, self._transport.start_send(piece, self._to, STATE_TAGS + self._number)))
        self._number += 1
        if len(self._sent) == AT_ONCE:
            self._sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until all has left."""
        while self._sent:
            self._sent.popleft()[1].wait()


def pieces_of(state: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (part[at : at + PIECE] for part in state for at in range(0, part.numel(), PIECE))


def room(size: int) -> torch.Tensor:
    """Return memory for this many bytes, in large pages where the system has them.

    A system that hands it out in pages of 4 KB takes longer for that than the bytes take to arrive.
    """
    if size < LARGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def chain_of(newcomers: Sequence[int], hosts: Sequence[str], *, giver: int) -> list[int]:
    """Return the order in which newcomers pass a state on.

    Those of one computer stand one after another, the giver's own first, so that the state enters each computer once.
    ``hosts`` are those of all ranks.

    >>> chain_of([1, 2, 3, 4], ["a", "b", "a", "b", "c"], giver=0)
    [2, 1, 3, 4]
    """
    return sorted(newcomers, key=lambda rank: (hosts[rank] != hosts[giver], hosts[rank], rank))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
