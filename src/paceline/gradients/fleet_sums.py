"""Sums over the fleet: in fewer bytes on the wire, and such that they survive the loss of a member.

A round sums a few tensors in one collective call. When a member is lost in it, the workers that live re-form their
group. Either one of them had the result already, and hands it to those that lack it, or the sums count for nothing and
the round is run again, with tensors made for the members of the new round (`try_sums`, `sum_until_done`).

`Flats` packs many tensors into one flat tensor per kind of number, so that there is one sum instead of one per tensor.
`WireSum` is a sum that crosses the network in a smaller format than it is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch

from paceline.errors import GenerationOver
from paceline.transport import Collective, Pending
from paceline.transport.base import Renew, RoundTensors, empty_ones
from paceline.transport.formats import Format
from paceline.transport.group import wait_for_all


class WireSum(Pending):
    """The fleet's sum of one flat tensor, under way in a format. The tensor itself is not touched before the end.

    A sum over n workers takes two exchanges. A tensor is cut into n parts; every worker sends part i, in the wire's
    format, to worker i, which adds up the parts that it got in float32, in the workers' order, and sends the sum, in
    the wire's format again, to all. So whatever n is a number is rounded twice, where a ring in bfloat16 rounds it at
    each of its ``n - 1`` hops, and since everybody reads the same bytes all hold the same bits. Two workers exchange
    the whole tensor at once: the same bytes in half the time, and rounded once. Each worker sends ``2 (n - 1) / n``
    times the tensor's size on the wire, as a ring does.

    What is left over by rounding is not kept for the next round: it would be a worker's own state, and die with it.
    """

    def __init__(self, transport: Collective, flat: torch.Tensor, wire_format: Format) -> None:
        self._transport, self._flat, self._format = transport, flat, wire_format
        self._size, self._undivided = transport.size, transport.size == 2
        self._part = flat.numel() if self._undivided else -(-flat.numel() // transport.size)
        """Numbers that one worker adds up."""
        self._forwarded = self._over = False
        values = flat.detach().view(-1)
        self._send([values] if self._undivided else self._parts(values))

    def _parts(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return one part for each worker; the last ones may be short or empty."""
        starts = [min(rank * self._part, len(values)) for rank in range(self._size + 1)]
        return [values[begin:end] for begin, end in pairwise(starts)]

    @torch.no_grad()
    def _send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send part i to worker i, or the only part to all of them."""
        sent = torch.zeros(self._size, self._format.row_bytes(self._part), dtype=torch.uint8, device=parts[0].device)
        for row, part in zip(sent, parts, strict=False):
            missing = self._part - len(part)
            self._format.encode(torch.nn.functional.pad(part, (0, missing)) if missing else part, row)
        sent[len(parts) :] = sent[0]
        sent = sent.cpu()
        self._got = torch.empty_like(sent)
        self._pending: Pending = self._transport.all_to_all(sent, self._got)

    def _rows(self) -> Iterator[torch.Tensor]:
        """Return the numbers that each worker has sent."""
        return (self._format.decode(row, self._part) for row in self._got)

    @torch.no_grad()
    def _added(self) -> torch.Tensor:
        """Return the sum of what all have sent, added in order."""
        rows = self._rows()
        total = next(rows)
        for row in rows:
            total.add_(row)
        return total

    def forward(self) -> None:
        """Wait for the others' parts, and send off their sum: before anybody waits for the end."""
        if self._forwarded or self._undivided:
            return
        self._pending.wait()
        self._forwarded = True
        self._send([self._added()])

    @torch.no_grad()
    def wait(self) -> None:
        if self._over:
            return
        self.forward()
        self._pending.wait()
        values = self._flat.view(-1)
        if self._undivided:
            values.copy_(self._added())
        else:
            for part, row in zip(self._parts(values), self._rows(), strict=True):
                part.copy_(row[: len(part)])
        self._over = True

    def abandon(self) -> bool:
        """Give the sum up; the engine may still write, but into memory of its own."""
        self._pending.abandon()
        return True


def start_sum(transport: Collective, tensor: torch.Tensor, wire_format: Format | None) -> Pending:
    """Start summing ``tensor`` over the fleet in place, in this format where it is worth it."""
    transport.deliver_members_changed()
    if wire_format is not None and wire_format.serves(tensor) and transport.size > 1:
        return transport.written_sum(tensor, wire_format) or WireSum(transport, tensor, wire_format)
    return transport.sum(tensor)


def bytes_on_wire(tensors: Sequence[torch.Tensor], wire_format: Format | None) -> int:
    """Return the bytes of these tensors on the wire, each sent once."""
    return sum(
        wire_format.row_bytes(one.numel())
        if wire_format is not None and wire_format.serves(one)
        else one.numel() * one.element_size()
        for one in tensors
    )


Tensors = Sequence[torch.Tensor]


class Summed(NamedTuple):
    """The result of a round."""

    tensors: list[torch.Tensor]
    """The tensors that hold the sums: those of the round, or others like them."""
    handed_over: bool
    """Whether another worker, which had finished the round, sent the result."""


def try_sums(
    transport: Collective,
    label: str,
    bring: RoundTensors,
    *,
    start: Callable[[Tensors], list[Pending]],
    under_way: list[Pending] | None = None,
    then: Callable[[list[Pending]], None] = lambda sums: None,
    renew: Renew = empty_ones,
    background: bool = False,
) -> Summed | None:
    """Sum over the fleet once; return None when members changed and nobody had the result.

    Args:
        transport: The workers that sum.
        label: Name of the collective call.
        bring: The tensors that this worker brings, which will hold the result, or a function that makes them for the
            round's members.
        start: Starts the sums of these tensors that are not under way yet.
        under_way: Sums of this round that have started before the call; the list grows.
        then: Called when these sums are over: may start further sums, add them to the list and wait for them.
        renew: Replaces tensors into which an abandoned sum may still write.
        background: Whether the proxy's thread runs this round, beside the calls of the user's thread.
    """
    sums: list[Pending] = [] if under_way is None else under_way
    tensors: Tensors = ()
    try:
        with transport.round(label, background=background, result=bring) as tensors:
            sums += start(tensors)
            wait_for_all(sums)
            then(sums)
    except GenerationOver as over:
        given = transport.recover(over, sums, tensors, renew=renew, background=background)
        return None if given is None else Summed(list(given), True)
    return Summed(list(tensors), False)


def sum_until_done(
    transport: Collective,
    label: str,
    bring: RoundTensors,
    *,
    formats: Sequence[Format | None] = (),
    then: Callable[[list[Pending]], None] = lambda sums: None,
    background: bool = False,
) -> list[torch.Tensor]:
    """Return everybody's tensors summed, and run the round again whenever members were lost in it.

    ``formats``: the wire formats of the first tensors; the others travel unchanged. The other arguments are those of
    `try_sums`.
    """

    def start(tensors: Tensors) -> list[Pending]:
        return [start_sum(transport, tensor, wire_format) for tensor, wire_format in zip_longest(tensors, formats)]

    while (found := try_sums(transport, label, bring, start=start, then=then, background=background)) is None:
        pass
    return found.tensors


def like_flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without memory, of the sizes that `Flats` would have."""
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [torch.empty(sum(t.numel() for t in tensors if t.dtype is k), dtype=k, device="meta") for k in kinds]


class Flats:
    """Flat tensors with room for the sum of tensors like these.

    >>> room = Flats([torch.zeros(2, 2), torch.zeros(3)])
    >>> room.fill([torch.ones(2, 2), torch.full((3,), 2.0)])
    >>> room.flats[0].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes = dict.fromkeys((tensor.dtype for tensor in like), 0)
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        rooms = {kind: torch.empty(size, dtype=kind, device=like[0].device) for kind, size in sizes.items()}
        ends = dict.fromkeys(sizes, 0)
        self.flats = list(rooms.values())
        self.views: list[torch.Tensor] = []
        """Views of the flat tensors, in the given tensors' shapes and order."""
        for tensor in like:
            begin = ends[tensor.dtype]
            ends[tensor.dtype] = begin + tensor.numel()
            self.views.append(rooms[tensor.dtype][begin : ends[tensor.dtype]].view(tensor.shape))

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.views, list(tensors))
