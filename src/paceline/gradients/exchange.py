"""The round of a step, which sums this worker's gradients, statistics and header over the fleet.

A bucket's sum starts as soon as the bucket is final; the round adds the rest and waits for all. When members are lost
in the round, the workers that live either hand its result to those that lack it or, where none has it, run it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.errors import GenerationOver
from paceline.gradients.accumulation import Accumulation
from paceline.gradients.buffers import BufferSnapshot, ModuleBuffers
from paceline.gradients.fleet_sums import Tensors, start_sum, sum_until_done, try_sums
from paceline.gradients.header import Header
from paceline.transport import Collective, Pending
from paceline.transport.formats import Format
from paceline.transport.group import Never, wait_for_all

Buffers = tuple[list[int], torch.Tensor]
"""The numbers of the buffers that a round gives to all workers, and their bytes."""


@dataclass
class Sum:
    """One worker's part in a round with a deadline and, after it, the fleet's sums."""

    flats: list[torch.Tensor]
    used: list[bool]
    statistics: torch.Tensor
    moved: list[int]
    finite: bool = True
    seen: BufferSnapshot | None = None
    """This worker's buffers."""
    buffers: Buffers | None = None
    """The buffers that all workers take over; None: none had changed."""

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)


class GradientExchange:
    """The sums of one step over the fleet.

    Gradients travel in ``wire_format``, all else unchanged. ``squares`` in its calls: measure the norm of this worker's
    own gradient.
    """

    def __init__(self, transport: Collective, accumulation: Accumulation, wire_format: Format | None = None) -> None:
        self._transport, self._accumulation, self._wire_format = transport, accumulation, wire_format
        self.norm = torch.full((1,), math.nan, dtype=torch.float64)
        """The norm of the mean before clipping, handed over with the mean; NaN where nobody measured it."""
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.release()
        self._extremes: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._all_finite: torch.Tensor | bool = True
        self.is_mean = False
        """Whether a worker that had the mean already handed over the round's result."""
        if self._transport.elastic:  # the last round's may still have to be handed over
            self.norm = torch.full((1,), math.nan, dtype=torch.float64)

    def release(self) -> None:
        """Forget the sums: a finished one keeps the transport's group alive."""
        self._sums: list[Pending] = []
        self._summing = 0
        """The generation in which these sums have begun."""

    # -- what this worker brings -----------------------------------------------------------------------------------

    def in_sections(self) -> bool:
        """Return whether the next sum may be that of a section: the members it is for are known from here on."""
        self._transport.deliver_members_changed()
        if not self._sums:
            self._summing = self._transport.generation
        return self._transport.sums_piecewise

    def start_sum(self, flat: torch.Tensor, *, squares: bool) -> None:
        """Unscale and measure a bucket or a section that is final, and start its sum, after `in_sections`."""
        if self._accumulation.unscale != 1.0:
            flat.mul_(self._accumulation.unscale)
        self._extremes += _extremes([flat])
        if squares:
            self._note_squares([flat])
        self._transport.deliver_members_changed()
        if self._transport.generation != self._summing:
            self._sums.append(Never(self._members_changed()))  # the others of this step are sums of other members
            return
        self._sums.append(start_sum(self._transport, flat, self._wire_format))

    def _members_changed(self) -> GenerationOver:
        return GenerationOver("members changed while sums of this step were under way", generation=self._summing)

    def start_finite_check(self) -> None:
        """Have the device find out whether this worker's own gradients are finite; `finite` returns it."""
        self._all_finite = _finite(self._extremes)

    def finite(self) -> bool:
        """Wait for the device, and return whether this worker's own gradients hold neither NaN nor infinities."""
        return bool(self._all_finite)

    def _note_squares(self, flats: Sequence[torch.Tensor]) -> None:
        self._squares += [norm.to(torch.float64).square() for norm in torch._foreach_norm(list(flats))]

    def squares(self, weight: float) -> float:
        """Return ``n_i |g_i|^2`` of this worker's own gradient, from its sum over n_i; 0 where it is not measured."""
        if not self._squares or not weight:
            return 0.0
        return float(torch.stack(self._squares).sum()) * self._accumulation.planned**2 / weight

    # -- a round that waits for everybody --------------------------------------------------------------------------

    def run(self, write: Callable[[], Header], samples: int, label: str) -> Header:
        """Run the round, again whenever members were lost in it, and return the summed header.

        ``write`` makes this worker's header for the members of the round. Afterwards the buckets hold the fleet's sums,
        or, where another worker handed the result over, the mean (`is_mean`).
        """
        while (header := self._try(write, samples, label)) is None:
            self._extremes, self._squares = [], []
            self._accumulation.buckets.restart()
        return header

    def _try(self, write: Callable[[], Header], samples: int, label: str) -> Header | None:
        accumulation, parts, headers = self._accumulation, list[torch.Tensor](), list[Header]()
        buffers: list[Buffers] = []

        def bring() -> Tensors:
            if self._sums and self._transport.generation != self._summing:  # a call of the script met the change
                raise self._members_changed()
            header = write()
            headers[:], parts[:] = [header], []
            header.used[:] = accumulation.buckets.used()
            if accumulation.counters:
                accumulation.statistics.note()
                header.counters[: accumulation.counters] = accumulation.statistics.moved
                parts.append(accumulation.statistics.payload(samples))
            if len(accumulation.buffers) and (changed := accumulation.buffers.changed()):
                if self._transport.shards > 1:
                    accumulation.buffers.refuse(changed)
                header.counters[accumulation.counters :] = accumulation.buffers.flags(changed)
            parts.append(header.tensor())
            return [*accumulation.buckets.tensors(), *parts, self.norm]

        def share_buffers(sums: list[Pending]) -> None:
            if (shared := self._share(headers[0], None, sums)) is not None:
                buffers.append(shared)

        def renew(tensors: Tensors) -> Tensors:
            for bucket in accumulation.buckets.buckets:
                bucket.renew()
            return [*accumulation.buckets.tensors(), *map(torch.empty_like, parts), self.norm]

        found = try_sums(
            self._transport,
            label,
            bring,
            start=lambda tensors: [self._transport.sum(part) for part in parts],
            under_way=self._sums,
            then=share_buffers,
            renew=renew,
        )
        if found is None:
            self.release()
            return None
        self.is_mean = found.handed_over
        if found.handed_over:
            self.release()
            buffers.clear()
        header, parts = headers[0], found.tensors[len(found.tensors) - 1 - len(parts) : -1]
        header.vector[:] = parts[-1].numpy()
        if accumulation.counters:
            self._merge(parts[0], header)
        if buffers:
            accumulation.buffers.take(*buffers[0])
        return header

    def _share(self, header: Header, seen: BufferSnapshot | None, sums: list[Pending]) -> Buffers | None:
        """Sum the buffers that have changed somewhere, once the header holds the fleet's sums.

        ``seen``: this worker's buffers, where its loop may be at work. A worker that is handed the round's result goes
        on with its own buffers until the next round, in which its header reports that they have changed.
        """
        return share(
            self._transport,
            self._accumulation.buffers,
            header,
            self._accumulation.counters,
            sums,
            seen.copies if seen else None,
        )

    def _merge(self, statistics: torch.Tensor, header: Header) -> None:
        self._accumulation.statistics.merge(
            statistics, header.total("samples"), header.counters[: self._accumulation.counters].tolist()
        )

    # -- a round with a deadline, which any thread may close -------------------------------------------------------

    def close(self, samples: int, *, squares: bool) -> Sum:
        """Return what this worker has finished, ready to be summed."""
        flats, self._squares = self._accumulation.buckets.seal(), []
        if self._accumulation.unscale != 1.0 and flats:
            torch._foreach_mul_(flats, self._accumulation.unscale)
        finite = bool(_finite(_extremes(flats)))
        if squares:
            self._note_squares(flats)
        if self._transport.elastic:  # the round may have to be run again
            flats = [flat.clone() for flat in flats]
        statistics = self._accumulation.statistics
        used, seen = self._accumulation.buckets.used(), self._accumulation.seen
        return Sum(flats, used, statistics.payload(samples), list(statistics.moved), finite, seen)

    def nothing(self) -> Sum:
        """Return the part of a worker that has finished nothing: zeros, in new tensors."""
        buckets, statistics = self._accumulation.buckets, self._accumulation.statistics
        flats = [torch.zeros_like(bucket.flat) for bucket in buckets.buckets]
        return Sum(flats, [False] * len(buckets.slots), torch.zeros_like(statistics.payload(0)), [0] * len(statistics))

    def run_in_background(self, seal: Callable[[], tuple[Header, Sum]], label: str) -> tuple[Header, Sum]:
        """Run the round on the proxy's thread, again whenever members were lost in it.

        ``seal`` makes what this worker brings, for the members of the round. Returns it with the fleet's sums in it.
        """
        sealed: list[tuple[Header, Sum]] = []

        def bring() -> Tensors:
            header, mine = seal()
            sealed[:] = [(header, mine)]
            header.used[:] = mine.used
            header.counters[: self._accumulation.counters] = mine.moved[: self._accumulation.counters]
            if mine.seen is not None and mine.seen.changed:
                header.counters[self._accumulation.counters :] = self._accumulation.buffers.flags(mine.seen.changed)
            return [*mine.flats, *([mine.statistics] if self._accumulation.counters else []), header.tensor()]

        def share_buffers(sums: list[Pending]) -> None:
            header, mine = sealed[0]
            mine.buffers = self._share(header, mine.seen, sums)

        formats = [self._wire_format] * len(self._accumulation.buckets.buckets)
        tensors = sum_until_done(self._transport, label, bring, formats=formats, then=share_buffers, background=True)
        header, mine = sealed[0]
        mine.flats = tensors[: len(mine.flats)]
        if self._accumulation.counters:
            mine.statistics = tensors[-2]
        header.vector[:] = tensors[-1].numpy()
        return header, mine

    def adopt(self, total: Sum, header: Header) -> None:
        """Copy a round's sums to where the mean is made."""
        for bucket, flat in zip(self._accumulation.buckets.buckets, total.flats, strict=True):
            if flat is not bucket.flat:
                bucket.flat.copy_(flat)
        if self._accumulation.counters:
            self._merge(total.statistics, header)
        if total.buffers is not None:
            self._accumulation.buffers.take(*total.buffers)


def share(
    transport: Collective,
    buffers: ModuleBuffers,
    header: Header,
    first: int,
    sums: list[Pending],
    copies: dict[int, torch.Tensor] | None = None,
) -> Buffers | None:
    """Sum the bytes of the buffers that a summed header names, from its counter ``first`` on; None: it names none.

    The first worker that did something gives its buffers. The sum is added to ``sums`` when it starts.
    """
    if not len(buffers) or not (flags := header.counters[first:]).any():
        return None
    chosen = np.flatnonzero(flags).tolist()
    giver = int(np.argmax(header.column("samples") > 0))
    message = buffers.message(chosen, mine=giver == transport.rank, copies=copies)
    sums.append(transport.sum(message))
    wait_for_all(sums[-1:])
    return chosen, message


def _extremes(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the extremes of each tensor: one read of memory finds NaN and infinities, so their worker can be named."""
    return [extreme for flat in flats for extreme in torch.aminmax(flat)]


def _finite(extremes: Sequence[torch.Tensor]) -> torch.Tensor | bool:
    """Return whether all are finite; on CUDA, as a device tensor without synchronising."""
    if all(one.is_cpu for one in extremes):
        return all(map(math.isfinite, extremes))
    dtype = torch.float64 if any(one.dtype is torch.float64 for one in extremes) else torch.float32
    return torch.stack([one.to(dtype) for one in extremes]).isfinite().all()
