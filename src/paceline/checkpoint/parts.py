"""A state in parts: its structure with all small values, and the memory of each large tensor, which is not copied.

`take_apart` gives the parts to send and `put_together` reads them. Nothing in them is executed. As in a file of
``torch.save``, tensors that share memory share it again afterwards. A part that the receiver holds is left out: its
digest, which covers its place in the state, stands for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from paceline.checkpoint.content import unpack
from paceline.checkpoint.shards import mapped

LEAST = 1 << 16
"""Bytes of memory from which on a tensor is a part of its own."""


Path = tuple[Any, ...]
"""The keys that lead to a value in a state."""


class StatePart:
    """The memory of some large tensors of a state: of one, unless several share it."""

    def __init__(self, tensors: Sequence[tuple[Path, torch.Tensor]]) -> None:
        self._tensors = tensors

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self._tensors]

    @cached_property
    def memory(self) -> torch.Tensor:
        """The bytes, where they lie."""
        storage = self._tensors[0][1].untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    @cached_property
    def layout(self) -> str:
        """The places of its tensors in the state and in the memory, with their types and shapes."""
        places = [(path, t.dtype, *t.shape, t.stride(), t.storage_offset()) for path, t in self._tensors]
        return repr((self.memory.numel(), places))


def take_apart(content: Mapping[str, Any], *, held: Callable[[StatePart], str] = lambda part: "") -> list[torch.Tensor]:
    """Return a state as tensors of bytes: its structure, then the memory of the large tensors.

    That memory is the state's own: it must not change until it was sent. ``held`` returns the digest of a part that the
    receiver holds, which is then empty here, and else nothing.
    """
    parts = _Parts(content)
    structure = parts.without_large(dict(content))
    digests = [held(part) for part in parts.large]
    buffer = io.BytesIO()
    torch.save({"structure": structure, "places": parts.places, "held": digests}, buffer)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = [nothing if digest else part.memory for part, digest in zip(parts.large, digests, strict=True)]
    return [torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), *memory]


def large_parts(content: Mapping[str, Any]) -> list[StatePart]:
    """Return the parts that travel apart from a state's structure."""
    return _Parts(content).large


class _Parts:
    """The large tensors of a state, by the memory that they lie in."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        together: dict[tuple[torch.device, int], list[tuple[Path, torch.Tensor]]] = {}
        for path, tensor in _tensors(content):
            if (key := _memory(tensor)) is not None:
                together.setdefault(key, []).append((path, tensor))
        large = {key: sharing for key, sharing in together.items() if all(_is_large(tensor) for _, tensor in sharing)}
        self._numbers = {key: number for number, key in enumerate(large)}
        self.large = [StatePart(sharing) for sharing in large.values()]
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


def put_together(
    parts: Sequence[torch.Tensor], *, device: torch.device, own: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the state that `take_apart` took apart, on ``device``; its tensors lie in the memory of ``parts``.

    Those of a part that was left out lie in what this worker holds: ``own`` has its parts by digest.
    """
    head = unpack(parts[0], device=device)
    try:
        places = iter(head["places"])
        memory = [part.to(device) for part in _with_own(parts, head["held"], own)]
        return dict(_with_large(head["structure"], places, memory))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, StopIteration) as error:
        raise ValueError(f"a peer's state cannot be read: its parts do not fit together ({error!r})") from None


def fill(parts: list[torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Put copies of what this worker holds in the place of parts that were left out: it may change what it holds."""
    digests = unpack(parts[0], device=torch.device("cpu"))["held"]
    copies = {digest: own[digest].clone() for digest in digests if digest in own}
    parts[1:] = _with_own(parts, digests, copies)


def _with_own(
    parts: Sequence[torch.Tensor], digests: Sequence[str], own: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    return [part if part.numel() else own[digest] for part, digest in zip(parts[1:], digests, strict=True)]


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


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, (list, tuple, set)):
        for number, item in enumerate(value):
            yield from _tensors(item, (*path, number))


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
