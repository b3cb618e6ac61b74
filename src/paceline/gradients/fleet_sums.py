"""Sums over the fleet that survive the loss of a member, and flat tensors for such sums.

A round sums a few tensors in one collective call. When a member is lost in it, the workers that live re-form their
group. Either one of them had the result already, and hands it to those that lack it, or the sums count for nothing and
the round is run again, with tensors made for the members of the new round.

`Flats` packs many tensors into one flat tensor per kind of number, so that there is one sum instead of one per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from paceline.errors import GenerationOver
from paceline.gradients.wire_sums import start_sum
from paceline.transport import Collective, Pending
from paceline.transport.base import Renew, RoundTensors, empty_ones
from paceline.transport.formats import Format
from paceline.transport.pending import wait_for_all

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
