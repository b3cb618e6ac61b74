"""The round of a step: this worker's gradients, statistics and header are summed over the fleet.

A bucket's sum starts as soon as the bucket is final; the round adds the rest and waits for all. When members are lost
in the round, the workers that live either hand its result to those that lack it or, where none has it, run it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from paceline.combine.gradients.accumulation import Accumulation
from paceline.combine.gradients.buffers import ModuleBuffers, SeenBuffers
from paceline.combine.header import Header
from paceline.combine.wire import start_sum, wait_for_sums
from paceline.errors import GenerationOver
from paceline.transport import Collective, Pending
from paceline.transport.base import Keeps
from paceline.transport.formats import Format

Buffers = tuple[list[int], torch.Tensor]
"""Which buffers a round gives to all workers, and their bytes."""


@dataclass
class Sum:
    """What one worker brings to a round with a deadline and, after it, what the round gave."""

    flats: list[torch.Tensor]
    used: list[bool]
    statistics: torch.Tensor
    moved: list[int]
    finite: bool = True
    seen: SeenBuffers | None = None
    """This worker's buffers."""
    buffers: Buffers | None = None
    """Those that all workers take over; None: none had changed."""

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)


class GradientExchange:
    """One step's sums over the fleet: of gradients in the format ``form``, of all else as it is. ``squares`` in its
    calls: the norm of this worker's own gradient is measured."""

    def __init__(self, transport: Collective, work: Accumulation, form: Format | None = None) -> None:
        self._transport, self._work, self.form = transport, work, form
        self.norm = torch.full((1,), math.nan, dtype=torch.float64)
        """Of the mean before clipping, handed over with the mean; NaN where nobody measured it."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.release()
        self._extremes: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._all_finite: torch.Tensor | bool = True
        self.is_mean = False
        """The round's result was handed over by a worker that had the mean already."""
        if self._transport.elastic:  # the last round's may still have to be handed over
            self.norm = torch.full((1,), math.nan, dtype=torch.float64)

    def release(self) -> None:
        """Forget the sums: a finished one keeps the transport's group alive."""
        self._sums: list[Pending] = []

    # -- what this worker brings -----------------------------------------------------------------------------------

    def start_sum(self, flat: torch.Tensor, *, squares: bool) -> None:
        """A bucket is final: unscale and measure it, and start its sum."""
        if self._work.unscale != 1.0:
            flat.mul_(self._work.unscale)
        self._extremes += _extremes([flat])
        if squares:
            self._note_squares([flat])
        self._sums.append(start_sum(self._transport, flat, self.form))

    def look(self) -> None:
        """Have the device find out whether this worker's own gradients are finite; `finite` tells."""
        self._all_finite = _finite(self._extremes)

    def finite(self) -> bool:
        """Whether they hold neither NaN nor infinities; waits for the device."""
        return bool(self._all_finite)

    def _note_squares(self, flats: Sequence[torch.Tensor]) -> None:
        self._squares += [norm.to(torch.float64).square() for norm in torch._foreach_norm(list(flats))]

    def squares(self, weight: float) -> float:
        """``n_i |g_i|^2`` of this worker's own gradient, from its sum over n_i; 0 where nobody asks."""
        if not self._squares or not weight:
            return 0.0
        return float(torch.stack(self._squares).sum()) * self._work.planned**2 / weight

    # -- a round that waits for everybody --------------------------------------------------------------------------

    def run(self, write: Callable[[], Header], samples: int, label: str) -> Header | None:
        """Run the round with the header that ``write`` makes for its members. When it returns a header, this and the
        gradients hold the fleet's sums; None: the members changed in the round, which is to be run again."""
        work, parts, header = self._work, list[torch.Tensor](), list[Header]()
        buffers: Buffers | None = None

        def keeps() -> list[torch.Tensor]:
            header.append(write())
            header[0].used[:] = work.buckets.used()
            if work.counters:
                work.statistics.note()
                header[0].counters[: work.counters] = work.statistics.moved
                parts.append(work.statistics.payload(samples))
            if len(work.buffers) and (changed := work.buffers.changed()):
                if self._transport.shards > 1:
                    work.buffers.refuse(changed)
                header[0].counters[work.counters :] = work.buffers.flags(changed)
            parts.append(header[0].tensor())
            return [*work.buckets.tensors(), *parts, self.norm]

        try:
            with self._transport.round(label, keeps=keeps):
                self._sums += [self._transport.sum(part) for part in parts]
                wait_for_sums(self._sums)
                buffers = self._share(header[0], None, self._sums)
        except GenerationOver as over:
            given = self.re_form(over, parts)
            if given is None:
                return None
            parts = given
            header[0].vector[:] = parts[-1].numpy()
        if work.counters:
            self._merge(parts[0], header[0])
        if buffers is not None:
            work.buffers.take(*buffers)
        return header[0]

    def _share(self, header: Header, seen: SeenBuffers | None, sums: list[Pending]) -> Buffers | None:
        """Once the header holds the fleet's sums, sum the buffers that have changed somewhere. ``seen``: this worker's,
        where its loop may be at work. A worker that is handed the round's result goes on with its own until the next
        round, in which it says that they have changed."""
        return share(
            self._transport, self._work.buffers, header, self._work.counters, sums, seen.copies if seen else None
        )

    def re_form(self, over: GenerationOver, parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor] | None:
        """Re-form the group among the workers that live. What ``parts`` should have held, when some of these workers
        had finished the round and gave its result; None: all sums are started again."""
        transport = self._transport
        buckets = self._work.buckets
        if not broken_off(transport, over, self._sums):
            parts = [torch.empty_like(part) for part in parts]
            for bucket in buckets.buckets:
                bucket.renew()
        transport.re_form_after(over)
        self.is_mean = transport.given([*buckets.tensors(), *parts, self.norm])
        self.release()
        if self.is_mean:
            return list(parts)
        self._extremes, self._squares = [], []
        buckets.restart()
        return None

    def _merge(self, statistics: torch.Tensor, header: Header) -> None:
        self._work.statistics.merge(
            statistics, header.total("samples"), header.counters[: self._work.counters].tolist()
        )

    # -- a round with a deadline, which any thread may close -------------------------------------------------------

    def close(self, samples: int, *, squares: bool) -> Sum:
        """What this worker has finished, ready to be summed."""
        flats, self._squares = self._work.buckets.seal(), []
        if self._work.unscale != 1.0 and flats:
            torch._foreach_mul_(flats, self._work.unscale)
        finite = bool(_finite(_extremes(flats)))
        if squares:
            self._note_squares(flats)
        if self._transport.elastic:  # the round may have to be run again
            flats = [flat.clone() for flat in flats]
        statistics = self._work.statistics
        used, seen = self._work.buckets.used(), self._work.seen
        return Sum(flats, used, statistics.payload(samples), list(statistics.moved), finite, seen)

    def nothing(self) -> Sum:
        """The same of a worker that has finished nothing, in tensors of its own."""
        buckets, statistics = self._work.buckets, self._work.statistics
        flats = [torch.zeros_like(bucket.flat) for bucket in buckets.buckets]
        return Sum(flats, [False] * len(buckets.slots), torch.zeros_like(statistics.payload(0)), [0] * len(statistics))

    def run_aside(self, seal: Callable[[], tuple[Header, Sum]], label: str) -> tuple[Header, Sum] | None:
        """Run the round with what ``seal`` makes for its members, and return that with the fleet's sums in it. None:
        the members changed in the round, which is to be run again."""
        sealed: list[tuple[Header, Sum]] = []

        def parts() -> list[torch.Tensor]:
            header, mine = seal()
            sealed.append((header, mine))
            header.used[:] = mine.used
            header.counters[: self._work.counters] = mine.moved[: self._work.counters]
            if mine.seen is not None and mine.seen.changed:
                header.counters[self._work.counters :] = self._work.buffers.flags(mine.seen.changed)
            return [*mine.flats, *([mine.statistics] if self._work.counters else []), header.tensor()]

        def buffers(sums: list[Pending]) -> None:
            header, mine = sealed[0]
            mine.buffers = self._share(header, mine.seen, sums)

        forms = [self.form] * len(self._work.buckets.buckets)
        given = summed(self._transport, label, parts, aside=True, forms=forms, then=buffers)
        if given is None:
            return None
        header, mine = sealed[0]
        mine.flats = given[: len(mine.flats)]
        if self._work.counters:
            mine.statistics = given[-2]
        header.vector[:] = given[-1].numpy()
        return header, mine

    def adopt(self, total: Sum, header: Header) -> None:
        """Copy a round's sums to where the mean is made."""
        for bucket, flat in zip(self._work.buckets.buckets, total.flats, strict=True):
            if flat is not bucket.flat:
                bucket.flat.copy_(flat)
        if self._work.counters:
            self._merge(total.statistics, header)
        if total.buffers is not None:
            self._work.buffers.take(*total.buffers)


def share(
    transport: Collective,
    buffers: ModuleBuffers,
    header: Header,
    first: int,
    sums: list[Pending],
    copies: dict[int, torch.Tensor] | None = None,
) -> Buffers | None:
    """Sum the bytes of the buffers that a summed header names, from its counter ``first`` on; None: it names none. They
    are those of the first worker that did something. The sum is noted in ``sums`` when it starts."""
    if not len(buffers) or not (flags := header.counters[first:]).any():
        return None
    chosen = np.flatnonzero(flags).tolist()
    giver = int(np.argmax(header.column("samples") > 0))
    message = buffers.message(chosen, mine=giver == transport.rank, copies=copies)
    sums.append(transport.sum(message))
    wait_for_sums(sums[-1:])
    return chosen, message


def _extremes(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One read of memory finds NaN and infinities, so that the worker behind them can be named."""
    return [extreme for flat in flats for extreme in torch.aminmax(flat)]


def _finite(extremes: Sequence[torch.Tensor]) -> torch.Tensor | bool:
    """Whether all are finite; of a GPU's, where they are: nobody has waited for it yet."""
    if all(one.is_cpu for one in extremes):
        return all(map(math.isfinite, extremes))
    dtype = torch.float64 if any(one.dtype is torch.float64 for one in extremes) else torch.float32
    return torch.stack([one.to(dtype) for one in extremes]).isfinite().all()


def summed(
    transport: Collective,
    label: str,
    keeps: Keeps,
    *,
    aside: bool = False,
    forms: Sequence[Format | None] = (),
    then: Callable[[list[Pending]], None] = lambda sums: None,
) -> list[torch.Tensor] | None:
    """The fleet's sums, in the tensors that ``keeps`` makes for the round's members or in others like them; ``aside``:
    on the thread of rounds with a deadline. ``forms``: the formats on the wire of the first tensors. ``then`` starts
    further sums when these are over, notes them and waits for them. None: the members changed, and nothing came of the
    round."""
    sums: list[Pending] = []
    tensors: Sequence[torch.Tensor] = ()
    try:
        with transport.round(label, aside=aside, keeps=keeps) as tensors:
            sums += [start_sum(transport, tensor, form) for tensor, form in zip_longest(tensors, forms)]
            wait_for_sums(sums)
            then(sums)
    except GenerationOver as over:
        return re_formed(transport, over, sums, tensors, aside=aside)
    return list(tensors)


def re_formed(
    transport: Collective,
    over: GenerationOver,
    sums: Sequence[Pending] = (),
    tensors: Sequence[torch.Tensor] = (),
    *,
    aside: bool = True,
) -> list[torch.Tensor] | None:
    """Re-form the group among the workers that live. What ``tensors`` should have held, when some of these workers had
    finished the round and gave its result; else None."""
    if not broken_off(transport, over, sums):
        tensors = [torch.empty_like(tensor) for tensor in tensors]
    transport.re_form_after(over)
    return list(tensors) if transport.given(tensors, aside=aside) else None


def broken_off(transport: Collective, over: GenerationOver, sums: Sequence[Pending]) -> bool:
    """End the sums under way. False: some may still write into their tensors, which are then not to be used again."""
    transport.cut(over)
    ended = [pending.abandon() for pending in sums]
    return all(ended)
