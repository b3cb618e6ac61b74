"""Sums over the tree of a `Topology`: up through computers and sites, once across the links between them, and down.

A worker adds its children's sums to its own part, in the order of the tree, and sends that to its parent. The ones that
cross exchange theirs: each piece of a sum is added up, in the order of sites, by one of them (its owner), who sends the
total to the others; two, or several with few bytes, send their sums to each other directly and all add them up in
that order. Each piece is so added in one order, whoever does it, and everybody has the same bits.
Each of them sends to the one after it first, so that no two fill one link while others are idle.

Sums are cut into pieces, and three threads move them on, up, across and down, so that links never wait for a worker's
additions. The engine sends and receives between two workers only; it writes into messages alone, never into tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline import concurrency
from paceline.transport.engines.contract import (
    CHECK_S,
    CLOSE_S,
    LANE_TAGS,
    SUM_TAGS,
    Check,
    Closer,
    Engine,
    EngineAround,
    EngineWork,
    Held,
)
from paceline.transport.engines.small_sums import OWN_TAGS, lane_here
from paceline.transport.formats import Format
from paceline.transport.topology import Branch

PIECE_BYTES = 1 << 18
"""A slow link takes long for it, and a computer's memory does not."""
WINDOW = 64
"""Pieces under way at a time, of all from which a worker receives."""
LEAST_WINDOW = 4
LITTLE_BYTES = 1 << 14
"""Up to here, in all that one worker sends, the number of messages in turn counts, and not what they carry."""

MESSAGE_BYTES = 1 << 12
"""Up to here small sums, which need no thread, are as good on any link: a round's header is one."""

Coming = tuple[torch.Tensor, EngineWork]
"""A message that was asked for, and the work that brings it."""


class TreeSum(EngineWork):
    """One sum under way, in pieces.

    Their number is one that the workers who cross (``tops``) can share evenly; between those the numbers travel in the
    format ``wire_format``.
    """

    def __init__(self, tensor: torch.Tensor, *, tops: int = 1, wire_format: Format | None = None) -> None:
        self.wire_format = wire_format
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
        """Store a piece's total, which has come."""
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

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, check: Check) -> None:
        while not self._over.wait(CHECK_S):
            check()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def abandon(self) -> bool:
        """Give the sum up: from now on nothing writes into its tensor."""
        with self._lock:
            self._given_up = True
        return True


def piece_length(tensor: torch.Tensor, tops: int) -> int:
    """Return the elements of a piece, `PIECE_BYTES` at most; pieces with owners are a multiple of ``tops`` in number.

    >>> piece_length(torch.zeros(100_000), 2), piece_length(torch.zeros(100_000), 4)
    (65536, 25000)
    """
    count, length = tensor.numel(), PIECE_BYTES // tensor.element_size()
    return (
        length if _all_add(count * tensor.element_size(), tops) else -(-count // (tops * -(-count // (tops * length))))
    )


def _all_add(data: int, tops: int) -> bool:
    """Return whether all that cross send ``data`` bytes to each other, and none owns them."""
    return tops <= 2 or data * (tops - 1) <= LITTLE_BYTES


class SumPiece:
    """A piece of a sum on its way. What is to come from others is asked for when it is begun."""

    def __init__(self, tree_sum: TreeSum, part: torch.Tensor, number: int) -> None:
        self.tree_sum, self.part, self.number = tree_sum, part, number
        self.mine = part
        """What this worker has so far."""
        self.from_children: list[Coming] = []
        self.from_tops: list[Coming] = []
        """Parts of the others that cross, in order, without this worker's own."""
        self.total: Coming | None = None
        """The total, where it comes from another: the parent or the piece's owner."""


class PieceMail:
    """This worker's messages, which are kept until everybody has them (`paceline.transport.engines.small_sums`)."""

    def __init__(self, engine: Engine, lane: int) -> None:
        self._engine, self._lane = engine, lane
        self._now: list[Coming] = []
        self._before: list[Coming] = []

    def _tag(self, piece: SumPiece) -> int:
        return SUM_TAGS + self._lane * LANE_TAGS + OWN_TAGS + piece.number % OWN_TAGS

    def send(self, data: torch.Tensor, piece: SumPiece, others: Sequence[int]) -> None:
        self._now.extend([(data, self._engine.send(data, other, self._tag(piece))) for other in others])

    def ask(self, piece: SumPiece, other: int, wire_format: Format | None = None) -> Coming:
        part = piece.part
        data = (
            torch.empty_like(part)
            if wire_format is None
            else torch.empty(wire_format.row_bytes(part.numel()), dtype=torch.uint8)
        )
        return data, self._engine.receive(data, other, self._tag(piece))

    def round_is_over(self) -> None:
        if self._now:
            self._before, self._now = self._now, []

    def everybody_came(self) -> None:
        """Note that a piece of this round is summed: all have begun it, and have what was sent in the one before."""
        self._before = []

    def empty(self) -> list[Coming]:
        held, self._before, self._now = [*self._before, *self._now], [], []
        return held


def as_sent(values: torch.Tensor, piece: SumPiece) -> torch.Tensor:
    """Return ``values`` as they cross between places."""
    return values if piece.tree_sum.wire_format is None else piece.tree_sum.wire_format.encoded(values)


def as_got(sent: torch.Tensor, piece: SumPiece) -> torch.Tensor:
    """Return the numbers of a message that crossed between places."""
    if piece.tree_sum.wire_format is None:
        return sent
    return piece.tree_sum.wire_format.decode(sent, piece.part.numel()).to(piece.part.dtype)


def added(parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Return ``((first + second) + third) + ...``."""
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
        here = branch.tops.index(rank) if self._crosses else 0
        self._after = [*branch.tops[here + 1 :], *branch.tops[:here]] if self._crosses else []
        """The others in the order in which this one sends to them: no two that cross begin with the same one."""
        self._number = self._open = 0
        self._window = max(LEAST_WINDOW, WINDOW // (1 + len(branch.children)))
        self._waiting: deque[list[SumPiece]] = deque()
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

    def start(self, tensor: torch.Tensor, wire_format: Format | None = None) -> TreeSum:
        tree_sum = TreeSum(tensor, tops=len(self._branch.tops), wire_format=wire_format)
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if tree_sum.parts:
                self._under_way.add(tree_sum)
            pieces = [SumPiece(tree_sum, part, self._number + n) for n, part in enumerate(tree_sum.parts, start=1)]
            self._number += len(pieces)
            tops = len(self._branch.tops)
            self._waiting += [pieces[first : first + tops] for first in range(0, len(pieces), tops)]
            self._begin_more()
        return tree_sum

    def _begin_more(self) -> None:
        while self._waiting and self._open < self._window:
            pieces = self._waiting.popleft()
            self._open += len(pieces)
            for piece in pieces:
                self._begin(piece)
            for piece in sorted(pieces, key=self._turn):
                self._ups.put(piece)

    def _turn(self, piece: SumPiece) -> int:
        """Return when this worker sends its part of a piece, among one piece per owner: its own comes last."""
        owner = self._owner(piece)
        return self._after.index(owner) if owner in self._after else len(self._after)

    def _begin(self, piece: SumPiece) -> None:
        """Ask for everything that is to come."""
        ask, wire_format = self.mail.ask, piece.tree_sum.wire_format
        piece.from_children = [ask(piece, child) for child in self._branch.children]
        if self._branch.parent is not None:
            piece.total = ask(piece, self._branch.parent)
        elif self._all_add(piece) or self._owner(piece) == self._rank:
            piece.from_tops = [ask(piece, other, wire_format) for other in self._others]
        else:
            piece.total = ask(piece, self._owner(piece), wire_format)

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
        work.wait(self._check)
        return data

    def _check(self) -> None:
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
            self.mail.send(sent, piece, self._after)
            piece.mine = as_got(sent, piece)  # all add the same numbers
        elif self._owner(piece) != self._rank:
            self.mail.send(as_sent(piece.mine, piece), piece, [self._owner(piece)])
        owns = piece.from_tops and not self._all_add(piece)
        (self._crossing if owns else self._downs).put(piece)

    def _across(self, piece: SumPiece) -> None:
        """Add up a piece that this worker owns, and send the total to the others that cross."""
        sent = as_sent(self._add_tops(piece), piece)
        self.mail.send(sent, piece, self._after)
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
        position = self._branch.tops.index(self._rank)
        return added([*parts[:position], piece.mine, *parts[position:]], into=into)

    def _finish(self, piece: SumPiece, total: torch.Tensor) -> None:
        self.mail.everybody_came()
        self.mail.send(total, piece, self._branch.children)
        piece.tree_sum.land(piece.part, total)
        with self._lock:
            if piece.tree_sum.done:
                self._under_way.discard(piece.tree_sum)
            self._open -= 1
            self._begin_more()

    def end(self, why: str = "the group is closed") -> None:
        """Fail what is under way, and end the threads."""
        with self._lock:
            self._failure = self._failure or why
            for tree_sum in self._under_way:
                tree_sum.fail(self._failure)
            self._under_way.clear()
            self._waiting.clear()
        for queue in (self._ups, self._crossing, self._downs):
            queue.put(None)


class TreeSums(EngineAround):
    """An engine that sums over a tree, all but short messages.

    Background rounds have a stream of their own, for they come in another order.
    """

    def __init__(self, inner: Engine, branch: Branch, rank: int) -> None:
        super().__init__(inner)
        self._branch, self._rank = branch, rank
        self._streams: dict[int, SumStream] = {}

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        if self.inner.takes(tensor) or tensor.numel() * tensor.element_size() <= MESSAGE_BYTES:
            return self.inner.sum(tensor)
        return self.start(tensor)

    def sum_in(self, tensor: torch.Tensor, wire_format: Format) -> TreeSum:
        return self.start(tensor, wire_format)

    def start(self, tensor: torch.Tensor, wire_format: Format | None = None) -> TreeSum:
        """Start a sum over the tree, of any size."""
        lane = lane_here()
        if lane not in self._streams:
            self._streams[lane] = SumStream(self._branch, self._rank, PieceMail(self.inner, lane))
        return self._streams[lane].start(tensor, wire_format)

    def round_is_over(self) -> None:
        if (stream := self._streams.get(lane_here())) is not None:
            stream.mail.round_is_over()
        self.inner.round_is_over()

    def _close_own(self) -> list[Closer]:
        """Give up what is under way: messages may still be on their way, and threads end once connections are shut."""
        held: list[Closer] = []
        for stream in self._streams.values():
            stream.end()
            held += [Held(*stream.mail.empty()), *(partial(thread.join, CLOSE_S) for thread in stream.threads)]
        return held
