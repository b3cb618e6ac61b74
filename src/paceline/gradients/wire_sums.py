"""Sums in fewer bytes: they cross the network in a smaller format than they are computed in.

A sum over n workers takes two exchanges. A tensor is cut into n parts; every worker sends part i, in the wire's format,
to worker i, which adds up the parts that it got in float32, in the workers' order, and sends the sum, in the wire's
format again, to all. So whatever n is a number is rounded twice, where a ring in bfloat16 rounds it at each of its
``n - 1`` hops, and since everybody reads the same bytes all hold the same bits. Two workers exchange the whole tensor
at once: the same bytes in half the time, and rounded once. Each worker sends ``2 (n - 1) / n`` times the tensor's size
on the wire, as a ring does.

What is left over by rounding is not kept for the next round: it would be a worker's own state, and die with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from paceline.transport import Collective, Pending
from paceline.transport.formats import Format


class WireSum(Pending):
    """The fleet's sum of one flat tensor, under way in a format. The tensor itself is not touched before the end."""

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
