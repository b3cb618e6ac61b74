"""Small sums, in about log n turns in place of a ring's 2 (n - 1), and several of them in one message.

In a ring every worker's message waits for the one before it, which for a few hundred kilobytes is all waiting: 69 ms
for 16 workers on two cores, where this takes 20. A worker's rank is written in digits, one for each turn; in a turn it
exchanges what it has with those whose ranks differ from its own in that digit alone, and all of them add the parts up
in the order of the digit. So after the last turn everybody has the same bits. Ranks beyond the largest number that can
be written so give their part to one below before the first turn, and get the sum from it after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod

import torch

from paceline import concurrency
from paceline.transport.engines.contract import (
    LANE_TAGS,
    SUM_TAGS,
    Carrier,
    Check,
    Closer,
    Engine,
    EngineAround,
    EngineWork,
    Held,
)

MOST_BYTES = 1 << 20
"""Bytes of one sum; beyond, a ring's work goes on while backward does, and is worth it."""
HOP_BYTES = 1 << 16
"""What a link carries in the time of one turn, about: from here on a ring's many short messages win."""
TINY_BYTES = 1 << 14
"""Up to here the number of turns counts, and not what they carry."""
OWN_TAGS = LANE_TAGS // 2
"""The number of a lane's tags for small sums, and for pieces of sums over the tree."""
ALIGNED = 16

Layout = tuple[tuple[torch.dtype, int], ...]
"""The type and number of elements of each of some tensors."""


@lru_cache
def digits(size: int, *, tiny: bool) -> tuple[int, ...]:
    """Return the number of values of each digit of a rank.

    There are as few digits as can be where messages are ``tiny``, else as small ones. Their product is ``size`` or the
    largest below it that has no prime factor above 5.

    >>> digits(16, tiny=True), digits(16, tiny=False), digits(7, tiny=False), digits(1, tiny=True)
    ((4, 4), (2, 2, 2, 2), (2, 3), ())
    """
    found: list[int] = []
    for digit in (4, 2, 3, 5) if tiny else (2, 3, 5):
        while size % (prod(found) * digit) == 0:
            found.append(digit)
    return tuple(found) if prod(found) == size else digits(size - 1, tiny=tiny)


def is_small(tensor: torch.Tensor, size: int) -> bool:
    """Return whether a tensor is summed this way; the same on every worker, wherever the tensor lies.

    A ring takes ``2 (n - 1)`` turns and sends the tensor twice; here it is sent once per turn and partner.
    """
    data = tensor.numel() * tensor.element_size()
    sent = sum(digit - 1 for digit in digits(size, tiny=data <= TINY_BYTES))
    return data <= MOST_BYTES and data * (sent - 2) <= HOP_BYTES * (2 * size - 2 - sent)


class Message:
    """Several tensors in one piece of memory."""

    def __init__(self, layout: Layout) -> None:
        runs = [(dtype, [numel for _, numel in run]) for dtype, run in groupby(layout, key=lambda one: one[0])]
        lengths = [sum(numels) * dtype.itemsize for dtype, numels in runs]
        ends = list(accumulate(-(-length // ALIGNED) * ALIGNED for length in lengths))
        self.data = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8)
        self.runs = [
            self.data[start : start + length].view(dtype)
            for start, length, (dtype, _) in zip([0, *ends], lengths, runs)
        ]
        """Neighbours of one type as one tensor."""
        counts = [numels for _, numels in runs]
        self.parts = [part for run, numels in zip(self.runs, counts, strict=True) for part in torch.split(run, numels)]


class Wires:
    """The messages of one exchange: this worker's own, and what it gets in each turn. ``turns``: partners in each."""

    def __init__(self, layout: Layout, turns: Sequence[int]) -> None:
        self.layout = layout
        self.own = Message(layout)
        self.got = [[Message(layout) for _ in range(partners)] for partners in turns]


class SmallSum(EngineWork):
    """One sum, from its start until somebody waits for it: then it goes, together with others or by itself."""

    def __init__(self, sums: SmallSums, tensor: torch.Tensor) -> None:
        self.sums, self.tensor = sums, tensor
        self.exchange: SmallExchange | None = None

    def wait(self, check: Check) -> None:
        check()
        if self.exchange is None:
            self.sums.exchange([self])
        assert self.exchange is not None
        self.exchange.finish(check)

    def abandon(self) -> bool:
        """Give the sum up: nobody but `wait` writes into its tensor."""
        return True

    @property
    def done(self) -> bool:
        return self.exchange is not None and self.exchange.ended

    @property
    def carrier(self) -> Carrier | None:
        return self.sums if self.exchange is None else None


class SmallExchange:
    """Some sums in one message; ``tag`` is that of no other exchange under way, and the same on every worker.

    Nobody waits for a send: on a connection that breaks at that moment Gloo may forget to wake whoever does. That all
    was sent shows in the next round, to which everybody comes only when done with this one. Until then this object must
    be kept (`Outbox`), for a send that is freed is cancelled. The engine writes into messages alone, never into the
    tensors.
    """

    def __init__(
        self, engine: Engine, tensors: Sequence[torch.Tensor], role: RankTurns, tag: int, wires: Wires
    ) -> None:
        self.role, self.wires = role, wires
        self._engine, self._tensors, self._tag = engine, tensors, tag
        self._sent: list[EngineWork] = []
        self.over = False
        self._failure: str | None = None
        """The engine's words; its error would hold this object, by its traceback, and with it the group."""
        for part, tensor in zip(wires.own.parts, tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        self._answer = wires.own
        """What this worker has so far."""
        self.works = self._receive_all()
        """What this worker receives, turn by turn."""
        self._begin()

    def _send(self, others: Iterable[int]) -> None:
        self._sent += [self._engine.send(self._answer.data, other, self._tag) for other in others]

    def _receive_all(self) -> list[list[EngineWork]]:
        receive, tag, turns = self._engine.receive, self._tag, zip(self.wires.got, self.role.turns, strict=True)
        return [
            [receive(message.data, other, tag) for message, other in zip(messages, partners, strict=True)]
            for messages, partners in turns
        ]

    def _begin(self) -> None:
        """Send what needs nothing of others."""
        if self.role.sends_first:
            self._send(self.role.turns[0])

    @property
    def ended(self) -> bool:
        return self.over or self._failure is not None

    def finish(self, check: Check) -> None:
        """Wait until the sum stands in the tensors; raise the engine's error, every time, when it never will."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self.over:
            return
        try:
            self._run(check)
        except RuntimeError as error:
            self._failure = str(error)
            raise
        for part, tensor in zip(self._answer.parts, self._tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.over, self._tensors = True, ()

    def _run(self, check: Check) -> None:
        for number, (messages, works) in enumerate(zip(self.wires.got, self.works, strict=True)):
            if number or not self.role.sends_first:
                self._send(self.role.sends(number))
            for work in works:
                work.wait(check)
            self._answer = self.role.joined(number, self._answer, messages)
        self._send(self.role.gives_sum_to)


class RankTurns:
    """A worker's part in every exchange of its group: ``turns`` are the partners that send to it, in turn."""

    def __init__(self, rank: int, size: int, *, tiny: bool) -> None:
        bases = digits(size, tiny=tiny)
        inside = prod(bases)
        self.outside = rank >= inside
        """It gives its part away, and gets the sum."""
        other = rank + inside
        self.first = [other] if other < size else []
        """The rank that gives this worker its part before the first turn."""
        self.gives_sum_to = self.first
        steps = accumulate(bases, lambda step, base: step * base, initial=1)
        self.digits = [rank // step % base for step, base in zip(steps, bases)] if not self.outside else []
        self._partners = [] if self.outside else _partners(rank, bases)
        self.turns = [[rank - inside]] if self.outside else [*([self.first] if self.first else []), *self._partners]
        self.sends_first = self.outside or not self.first

    def sends(self, turn: int) -> list[int]:
        """Return the ranks to which a worker sends what it has in this turn, before it receives from the partners."""
        return [] if self.first and turn == 0 else self.turns[turn]

    def joined(self, turn: int, mine: Message, got: Sequence[Message]) -> Message:
        """Return what this worker has after a turn.

        Its own message may still be on its way, so one of the others' is written into.
        """
        if self.outside:
            return got[0]
        digit = 0 if self.first and turn == 0 else self.digits[turn - len(self.first)]
        parts = [*got[:digit], mine, *got[digit:]]
        into = got[0]
        for first, second, out in zip(parts[0].runs, parts[1].runs, into.runs, strict=True):
            torch.add(first, second, out=out)
        for part in parts[2:]:
            for more, out in zip(part.runs, into.runs, strict=True):
                out.add_(more)
        return into


def _partners(rank: int, bases: Sequence[int]) -> list[list[int]]:
    """Return, by turn, the ranks that differ from this one in that turn's digit alone, in order.

    >>> _partners(5, (2, 3))
    [[4], [1, 3]]
    """
    turns, step = [], 1
    for base in bases:
        lowest = rank - rank // step % base * step
        turns.append([other for other in range(lowest, lowest + base * step, step) if other != rank])
        step *= base
    return turns


class SmallSums(EngineAround):
    """An engine that adds up small tensors by messages of the engine inside."""

    def __init__(self, inner: Engine, rank: int, size: int) -> None:
        super().__init__(inner)
        self._rank, self._size = rank, size
        self._lanes = [Outbox(), Outbox()]
        """The outbox of the user's thread's calls, and that of the background rounds."""

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        if self.inner.takes(tensor) or not is_small(tensor, self._size):
            return self.inner.sum(tensor)
        return SmallSum(self, tensor)

    def exchange(self, works: Sequence[SmallSum]) -> None:
        """Send these off in one message."""
        layout = tuple((one.tensor.dtype, one.tensor.numel()) for one in works)
        role = _role(self._rank, self._size, tiny=sum(d.itemsize * count for d, count in layout) <= TINY_BYTES)
        lane = lane_here()
        outbox = self._lanes[lane]
        wires = outbox.spare(layout) or Wires(layout, [len(turn) for turn in role.turns])
        tag = SUM_TAGS + lane * LANE_TAGS + outbox.next_number() % OWN_TAGS
        exchange = SmallExchange(self.inner, [one.tensor for one in works], role, tag, wires)
        outbox.keep(exchange)
        for one in works:
            one.exchange = exchange

    def round_is_over(self) -> None:
        self._lanes[lane_here()].round_is_over()
        self.inner.round_is_over()

    def _close_own(self) -> list[Closer]:
        return [Held(exchange) for lane in self._lanes for exchange in lane.empty()]


_role = lru_cache(RankTurns)
_thread = concurrency.local()


@contextmanager
def lane(*, background: bool) -> Iterator[None]:
    """Count what this thread sums inside with the background rounds, or with the calls of the user's thread."""
    before, _thread.lane = lane_here(), int(background)
    try:
        yield
    finally:
        _thread.lane = before


def lane_here() -> int:
    """Return the lane of the calls in which this thread sums: 1 for background rounds."""
    return getattr(_thread, "lane", 0)


class Outbox:
    """Exchanges whose sends may still be on their way: those of this round and of the one before.

    The messages of earlier ones are used again.
    """

    def __init__(self) -> None:
        self._now: list[SmallExchange] = []
        self._before: list[SmallExchange] = []
        self._spare: dict[Layout, list[Wires]] = {}
        self._number = 0

    def next_number(self) -> int:
        """Return the number of the next exchange, the same on every worker."""
        self._number += 1
        return self._number

    def keep(self, exchange: SmallExchange) -> None:
        self._now.append(exchange)

    def spare(self, layout: Layout) -> Wires | None:
        """Return messages of this layout that nothing is sent from any more."""
        found = self._spare.get(layout)
        return found.pop() if found else None

    def round_is_over(self) -> None:
        """Note that everybody has come to this round, and so has all that was sent before it."""
        if self._now:  # a round without sums shows nothing of who has come
            self._spare = {}
            for exchange in self._before:
                self._spare.setdefault(exchange.wires.layout, []).append(exchange.wires)
            self._before, self._now = self._now, []

    def empty(self) -> list[SmallExchange]:
        """Give them up."""
        given_up, self._before, self._now, self._spare = self._before + self._now, [], [], {}
        return given_up
