"""Sums of tensors' bits, by which copies of them are compared: equal where the tensors are, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of(tensors: Sequence[torch.Tensor], *, divided: bool = False) -> list[int]:
    """Return the sum of each tensor's bits; on a device, with one wait for all.

    ``divided``: the sums of a tensor's parts add up to it, which takes 2.5 times as long as sums of 8 bytes at a time.
    """
    sums = [_sum_of_parts(tensor) if divided else _sum_of_words(tensor) for tensor in tensors]
    there = [one for one in sums if not one.is_cpu]
    fetched = {id(one): number for one, number in zip(there, _fetched(there), strict=True)}
    return [fetched[id(one)] if id(one) in fetched else int(one) for one in sums]


def _fetched(sums: Sequence[torch.Tensor]) -> list[int]:
    if len({one.device for one in sums}) == 1:
        numbers: list[int] = torch.stack(list(sums)).tolist()
        return numbers
    return [int(one) for one in sums]


def _sum_of_parts(tensor: torch.Tensor) -> torch.Tensor:
    return _bits(tensor.detach().contiguous().reshape(-1)).sum(dtype=torch.int64)


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    per_word = max(1, 8 // flat.element_size())
    whole = flat.numel() // per_word * per_word
    words = flat[:whole]
    if words.storage_offset() % per_word:
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total if whole == flat.numel() else 31 * total + _bits(flat[whole:]).sum(dtype=torch.int64)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
