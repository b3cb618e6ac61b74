"""Sums over the tree of a `Topology`: up through computers and sites, once across the links between them, and down.

A worker adds its children's sums to its own part, in the order of the tree, and sends that to its parent. The ones that
cross exchange theirs: each piece of a sum is added up, in the order of sites, by one of them (its owner), who sends the
total to the others; two, or several with little to say, send their sums to each other directly and all add them up in
that order. Each piece is so added in one order, whoever does it, and everybody has the same bits.

Sums are cut into pieces, and three threads move them on, up, across and down, so that links never wait for a worker's
additions. The engine sends and receives between two workers only; it writes into messages alone, never into tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import concurrency
from paceline.transport.engines.base import LOOK_S, EngineWork, Look
from paceline.transport.formats import Format
from paceline.transport.small_sums import OWN_TAGS, TAGS, lane_here
from paceline.transport.topology import Branch

PIECE_BYTES = 1 << 18
"""A slow link takes long for it, and a computer's memory does not."""
WINDOW = 64
"""Pieces under way at a time, of all that a worker hears from."""
LEAST_WINDOW = 4
LITTLE_BYTES = 1 << 14
"""Up to here, in all that one worker sends, the number of messages in turn counts, and not what they carry."""

MESSAGE_BYTES = 1 << 12
"""Up to here small sums, which need no thread, are as good on any link: a round's header is one."""

Send = Callable[[torch.Tensor, int, int], EngineWork]
Coming = tuple[torch.Tensor, EngineWork]
"""A message that was asked for, and the work that brings it."""


class TreeSum(EngineWork):
    """One sum under way, in pieces, whose number is one that the workers who cross (``tops``) can share evenly; between
    them in the format ``form``."""

    def __init__(self, tensor: torch.Tensor, *, tops: int = 1, form: Format | None = None) -> None:
        self.form = form
        self._tensor, self._flat = tensor, tensor.detach().reshape(-1)
        self.parts = list(torch.split(self._flat, piece_length(tensor, tops))) if self._flat.numel() else []
        self._left = len(self.parts)
        self._lock = concurrency.Lock()
        self._over = concurrency.Event()
        self._failure: str | None = None
        self._given_up = False
        if not self.parts:
            self._over.set()

    def land(self, part: torch.Tensor, total: torch.Tensor) -> None:
        """A piece's total has come."""
        with self._lock:
            if self._given_up:
                return
            part.copy_(total)
            self._left -= 1
            if self._left == 0:
                if self._flat.data_ptr() != self._tensor.data_ptr():
                    self._tensor.detach().copy_(self._flat.view(self._tensor.shape))
                self._over.set()

    def fail(self, why: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self._given_up, self._failure = True, why
                self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, look: Look) -> None:
        while not self._over.wait(LOOK_S):
            look()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def abandon(self) -> bool:
        """From now on nothing writes into its tensor."""
        with self._lock:
            self._given_up = True
        return True


def piece_length(tensor: torch.Tensor, tops: int) -> int:
    """Elements of a piece: so many pieces as `PIECE_BYTES` allow, made a multiple of ``tops`` where each has an owner.

    >>> piece_length(torch.zeros(100_000), 2), piece_length(torch.zeros(100_000), 4)
    (65536, 25000)
    """
    count, length = tensor.numel(), PIECE_BYTES // tensor.element_size()
    return (
        length if _all_add(count * tensor.element_size(), tops) else -(-count // (tops * -(-count // (tops * length))))
    )


def _all_add(data: int, tops: int) -> bool:
    """Whether all that cross send so many bytes to each other, and none owns them."""
    return tops <= 2 or data * (tops - 1) <= LITTLE_BYTES


class SumPiece:
    """A piece of a sum on its way. What is to come from others is asked for when it is begun."""

    def __init__(self, whole: TreeSum, part: torch.Tensor, number: int) -> None:
        self.whole, self.part, self.number = whole, part, number
        self.mine = part
        """What this worker has so far."""
        self.from_children: list[Coming] = []
        self.from_tops: list[Coming] = []
        """Parts of the others that cross, in order, without this worker's own."""
        self.total: Coming | None = None
        """Where it comes from another: the parent or the piece's owner."""


class PieceMail:
    """This worker's messages: ``send(tensor, to, tag)`` and ``receive`` start them, and what was sent is kept until
    everybody has it (`paceline.transport.small_sums.Outbox`)."""

    def __init__(self, send: Send, receive: Send, lane: int) -> None:
        self._send, self._receive, self._lane = send, receive, lane
        self._now: list[Any] = []
        self._before: list[Any] = []

    def _tag(self, piece: SumPiece) -> int:
        return TAGS * (2 + self._lane) + OWN_TAGS + piece.number % OWN_TAGS

    def send(self, data: torch.Tensor, piece: SumPiece, others: Sequence[int]) -> None:
        self._now.extend([(data, self._send(data, other, self._tag(piece))) for other in others])

    def ask(self, piece: SumPiece, other: int, form: Format | None = None) -> Coming:
        part = piece.part
        data = torch.empty_like(part) if form is None else torch.empty(form.row_bytes(part.numel()), dtype=torch.uint8)
        return data, self._receive(data, other, self._tag(piece))

    def round_is_over(self) -> None:
        if self._now:
            self._before, self._now = self._now, []

    def everybody_came(self) -> None:
        """A piece of this round is summed: all have begun it, and so have what was sent in the one before."""
        self._before = []

    def empty(self) -> list[Any]:
        held, self._before, self._now = [*self._before, *self._now], [], []
        return held


def as_sent(values: torch.Tensor, piece: SumPiece) -> torch.Tensor:
    """As they cross between places."""
    return values if piece.whole.form is None else piece.whole.form.written(values)


def as_got(sent: torch.Tensor, piece: SumPiece) -> torch.Tensor:
    """What is read of it."""
    if piece.whole.form is None:
        return sent
    return piece.whole.form.read(sent, piece.part.numel()).to(piece.part.dtype)


def added(parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """``((first + second) + third) + ...``."""
    torch.add(parts[0], parts[1], out=into)
    for part in parts[2:]:
        into.add_(part)
    return into


class SumStream:
    """The sums of one lane, piece by piece in one order, the same on every worker."""

    def __init__(self, branch: Branch, rank: int, mail: PieceMail) -> None:
        self._branch, self._rank, self.mail = branch, rank, mail
        self._crosses = branch.parent is None
        self._others = [top for top in branch.tops if top != rank] if self._crosses else []
        self._number = self._open = 0
        self._window = max(LEAST_WINDOW, WINDOW // (1 + len(branch.children)))
        self._waiting: deque[SumPiece] = deque()
        self._under_way: set[TreeSum] = set()
        self._failure: str | None = None
        self._lock = concurrency.RLock()
        self._ups: concurrency.SimpleQueue[SumPiece | None] = concurrency.SimpleQueue()
        self._crossing: concurrency.SimpleQueue[SumPiece | None] = concurrency.SimpleQueue()
        self._downs: concurrency.SimpleQueue[SumPiece | None] = concurrency.SimpleQueue()
        up, across, down = (self._ups, self._up), (self._crossing, self._across), (self._downs, self._down)
        self.threads = [
            concurrency.Thread(target=self._serve, args=up, name="paceline-sum-up", daemon=True),
            concurrency.Thread(target=self._serve, args=across, name="paceline-sum-across", daemon=True),
            concurrency.Thread(target=self._serve, args=down, name="paceline-sum-down", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def start(self, tensor: torch.Tensor, form: Format | None = None) -> TreeSum:
        whole = TreeSum(tensor, tops=len(self._branch.tops), form=form)
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if whole.parts:
                self._under_way.add(whole)
            for part in whole.parts:
                self._number += 1
                self._waiting.append(SumPiece(whole, part, self._number))
            self._begin_more()
        return whole

    def _begin_more(self) -> None:
        while self._waiting and self._open < self._window:
            self._open += 1
            self._begin(piece := self._waiting.popleft())
            self._ups.put(piece)

    def _begin(self, piece: SumPiece) -> None:
        """Ask for everything that is to come."""
        ask, form = self.mail.ask, piece.whole.form
        piece.from_children = [ask(piece, child) for child in self._branch.children]
        if self._branch.parent is not None:
            piece.total = ask(piece, self._branch.parent)
        elif self._all_add(piece) or self._owner(piece) == self._rank:
            piece.from_tops = [ask(piece, other, form) for other in self._others]
        else:
            piece.total = ask(piece, self._owner(piece), form)

    def _all_add(self, piece: SumPiece) -> bool:
        return _all_add(piece.part.numel() * piece.part.element_size(), len(self._branch.tops))

    def _owner(self, piece: SumPiece) -> int:
        return self._branch.tops[piece.number % len(self._branch.tops)]

    # -- the threads -----------------------------------------------------------------------------------------------

    def _serve(self, queue: concurrency.SimpleQueue[SumPiece | None], move: Callable[[SumPiece], None]) -> None:
        try:
            while (piece := queue.get()) is not None:
                move(piece)
        except Exception as error:  # whatever it is, nobody may wait for ever
            self.end(str(error))

    def _came(self, message: Coming) -> torch.Tensor:
        data, work = message
        work.wait(self._look)
        return data

    def _look(self) -> None:
        """Raise when the stream has ended."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _up(self, piece: SumPiece) -> None:
        if piece.from_children:
            parts = [piece.part, *map(self._came, piece.from_children)]
            piece.mine = added(parts, into=parts[1])
            piece.from_children = []
        elif self._crosses:  # the tensor is overwritten while this may still be on its way
            piece.mine = piece.part.clone()
        if self._branch.parent is not None:
            self.mail.send(piece.mine, piece, [self._branch.parent])
        elif self._all_add(piece):
            sent = as_sent(piece.mine, piece)
            self.mail.send(sent, piece, self._others)
            piece.mine = as_got(sent, piece)  # all add the same numbers
        elif self._owner(piece) != self._rank:
            self.mail.send(as_sent(piece.mine, piece), piece, [self._owner(piece)])
        owns = piece.from_tops and not self._all_add(piece)
        (self._crossing if owns else self._downs).put(piece)

    def _across(self, piece: SumPiece) -> None:
        """This worker owns the piece: the others that cross are told the total."""
        sent = as_sent(self._add_tops(piece), piece)
        self.mail.send(sent, piece, self._others)
        self._finish(piece, as_got(sent, piece))

    def _down(self, piece: SumPiece) -> None:
        if piece.total is None:
            self._finish(piece, self._add_tops(piece))
        else:
            total = self._came(piece.total)
            self._finish(piece, as_got(total, piece) if self._crosses else total)

    def _add_tops(self, piece: SumPiece) -> torch.Tensor:
        parts = [as_got(self._came(one), piece) for one in piece.from_tops]
        into = parts[0]
        place = self._branch.tops.index(self._rank)
        return added([*parts[:place], piece.mine, *parts[place:]], into=into)

    def _finish(self, piece: SumPiece, total: torch.Tensor) -> None:
        self.mail.everybody_came()
        self.mail.send(total, piece, self._branch.children)
        piece.whole.land(piece.part, total)
        with self._lock:
            if piece.whole.is_completed():
                self._under_way.discard(piece.whole)
            self._open -= 1
            self._begin_more()

    def end(self, why: str = "the group is closed") -> None:
        """What is under way fails, and the threads end."""
        with self._lock:
            self._failure = self._failure or why
            for whole in self._under_way:
                whole.fail(self._failure)
            self._under_way.clear()
            self._waiting.clear()
        for queue in (self._ups, self._crossing, self._downs):
            queue.put(None)


class TreeSums:
    """The sums of one group. Calls aside have a stream of their own, for they come in another order."""

    def __init__(self, branch: Branch, rank: int, *, send: Send, receive: Send) -> None:
        self._branch, self._rank, self._send, self._receive = branch, rank, send, receive
        self._streams: dict[int, SumStream] = {}

    def start(self, tensor: torch.Tensor, form: Format | None = None) -> TreeSum:
        lane = lane_here()
        if lane not in self._streams:
            mail = PieceMail(self._send, self._receive, lane)
            self._streams[lane] = SumStream(self._branch, self._rank, mail)
        return self._streams[lane].start(tensor, form)

    def round_is_over(self) -> None:
        if (stream := self._streams.get(lane_here())) is not None:
            stream.mail.round_is_over()

    def end(self) -> list[Any]:
        """Give up what is under way; returns the messages that may still be on their way, and the threads, which end
        once the connections are shut."""
        held: list[Any] = []
        for stream in self._streams.values():
            stream.end()
            held += [*stream.mail.empty(), *stream.threads]
        return held
