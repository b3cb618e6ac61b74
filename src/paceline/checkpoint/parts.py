"""A state in parts: its structure with all small values, and the memory of each large tensor, which is not copied.

`take_apart` gives the parts to send and `put_together` reads them. Nothing in them is executed. As in a file of
``torch.save``, tensors that share memory share it again afterwards.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint.content import unpack
from paceline.checkpoint.shards import mapped

LEAST = 1 << 16
"""Bytes of memory from which on a tensor is a part of its own."""


def take_apart(content: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return a state as tensors of bytes: its structure, then the memory of the large tensors.

    That memory is the state's own: it must not change until it was sent.
    """
    parts = _Parts(_tensors(content))
    structure = parts.without_large(dict(content))
    buffer = io.BytesIO()
    torch.save({"structure": structure, "places": parts.places}, buffer)
    return [torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), *map(_bytes_in, parts.storages)]


class _Parts:
    """The large tensors of a state, by the memory that they lie in."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        together: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for tensor in tensors:
            if (key := _memory(tensor)) is not None:
                together.setdefault(key, []).append(tensor)
        large = {key: sharing for key, sharing in together.items() if all(map(_is_large, sharing))}
        self._numbers = {key: number for number, key in enumerate(large)}
        self.storages = [sharing[0].untyped_storage() for sharing in large.values()]
        self.places: list[tuple[int, int] | None] = []
        """Part of each tensor on the meta device in the structure, in order, and the byte at which it begins there.

        None: the tensor was on that device before.
        """

    def without_large(self, value: Any) -> Any:
        """Return the same structure with tensors without content in place of the large ones."""
        if not isinstance(value, torch.Tensor):
            return mapped(lambda item, _: self.without_large(item), value)
        key = _memory(value)
        if key in self._numbers:
            self.places.append((self._numbers[key], int(value.storage_offset())))
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if value.is_meta:
            self.places.append(None)
        return value


def put_together(parts: Sequence[torch.Tensor], *, device: torch.device) -> dict[str, Any]:
    """Return the state that `take_apart` took apart, on ``device``; its tensors lie in the memory of ``parts``."""
    head = unpack(parts[0], device=device)
    try:
        places = iter(head["places"])
        memory = [part.to(device) for part in parts[1:]]
        return dict(_with_large(head["structure"], places, memory))
    except (KeyError, IndexError, TypeError, RuntimeError, StopIteration) as error:
        raise ValueError(f"a peer's state cannot be read: its parts do not fit together ({error!r})") from None


def _with_large(value: Any, places: Iterator[tuple[int, int] | None], memory: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return mapped(lambda item, _: _with_large(item, places, memory), value)
    place = next(places) if value.is_meta else None
    if place is None:
        return value
    part, offset = memory[place[0]], place[1]
    last = offset + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    if offset < 0 or (last + 1) * value.element_size() > part.numel():
        raise IndexError(f"a tensor goes beyond its memory of {part.numel()} bytes")
    made = torch.empty(0, dtype=value.dtype, device=part.device)
    return made.set_(part.untyped_storage(), offset, value.shape, value.stride())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """Return what is equal for tensors that share memory; None where a tensor has no memory of its own."""
    if tensor.is_meta or tensor.layout is not torch.strided or not hasattr(tensor, "untyped_storage"):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


def _is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's content may travel apart; all that is not plain memory stays in the structure."""
    plain = type(tensor) is torch.Tensor and not tensor.requires_grad and not tensor.is_quantized
    return (
        plain
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= LEAST
    )


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
