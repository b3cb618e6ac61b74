"""Fewer bytes a round: what is summed crosses the network in a smaller format than it is computed in.

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
from paceline.transport.formats import FORMATS, Format
from paceline.transport.pending import wait_for_all

PLAIN = "float32"
"""The usual wire: numbers are sent as they are, in float32 mostly."""
SMALLEST = 1 << 16
"""Bytes up to which a tensor is sent as it is: together with the round's header, in one message."""


def names() -> tuple[str, ...]:
    """Of all wires."""
    return PLAIN, *FORMATS


def format_of(wire: str) -> Format | None:
    """How numbers cross this wire; None: as they are."""
    if wire not in names():
        raise ValueError(f"unknown wire {wire!r}; known: {', '.join(names())}")
    return FORMATS.get(wire)


def written(form: Format | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor is sent in this format: it is large, and of larger numbers."""
    return (
        form is not None
        and tensor.is_floating_point()
        and tensor.element_size() > form.kind.itemsize
        and tensor.numel() * tensor.element_size() > SMALLEST
    )


class WireSum:
    """The fleet's sum of one flat tensor, under way in a format. The tensor itself is not touched before the end."""

    def __init__(self, transport: Collective, flat: torch.Tensor, form: Format) -> None:
        self._transport, self._flat, self._form = transport, flat, form
        self._size, self._whole = transport.size, transport.size == 2
        self._part = flat.numel() if self._whole else -(-flat.numel() // transport.size)
        """Numbers that one worker adds up."""
        self._forwarded = self._over = False
        values = flat.detach().view(-1)
        self._send([values] if self._whole else self._parts(values))

    def _parts(self, values: torch.Tensor) -> list[torch.Tensor]:
        """One for each worker; the last ones may be short or empty."""
        starts = [min(rank * self._part, len(values)) for rank in range(self._size + 1)]
        return [values[begin:end] for begin, end in pairwise(starts)]

    @torch.no_grad()
    def _send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send worker i part i, or all of them the only part."""
        sent = torch.zeros(self._size, self._form.row_bytes(self._part), dtype=torch.uint8, device=parts[0].device)
        for row, part in zip(sent, parts, strict=False):
            self._form.write(
                row, torch.nn.functional.pad(part, (0, missing)) if (missing := self._part - len(part)) else part
            )
        sent[len(parts) :] = sent[0]
        sent = sent.cpu()
        self._got = torch.empty_like(sent)
        self._pending: Pending = self._transport.all_to_all(sent, self._got)

    def _rows(self) -> Iterator[torch.Tensor]:
        """What each worker has sent."""
        return (self._form.read(row, self._part) for row in self._got)

    @torch.no_grad()
    def _added(self) -> torch.Tensor:
        """The sum of what all have sent, in order."""
        rows = self._rows()
        total = next(rows)
        for row in rows:
            total.add_(row)
        return total

    def forward(self) -> None:
        """Wait for the others' parts, and send off their sum: before anybody waits for its end."""
        if self._forwarded or self._whole:
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
        if self._whole:
            values.copy_(self._added())
        else:
            for part, row in zip(self._parts(values), self._rows(), strict=True):
                part.copy_(row[: len(part)])
        self._over = True

    def abandon(self) -> bool:
        """What may still be written is the engine's own memory."""
        self._pending.abandon()
        return True


def start_sum(transport: Collective, tensor: torch.Tensor, form: Format | None) -> Pending:
    """Start summing ``tensor`` over the fleet in place, in this format where it is worth it."""
    transport.deliver_members_changed()
    if form is not None and written(form, tensor) and transport.size > 1:
        return transport.written_sum(tensor, form) or WireSum(transport, tensor, form)
    return transport.sum(tensor)


def wait_for_sums(pendings: Sequence[Pending]) -> None:
    """Wait for the sums of one round, the same on every worker."""
    for one in pendings:
        if isinstance(one, WireSum):
            one.forward()
    wait_for_all(pendings)


def bytes_on_wire(tensors: Sequence[torch.Tensor], form: Format | None) -> int:
    """Of these tensors, each once."""
    return sum(
        form.row_bytes(one.numel()) if form is not None and written(form, one) else one.numel() * one.element_size()
        for one in tensors
    )
