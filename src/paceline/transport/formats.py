"""Wire formats: how numbers are written where fewer bytes are to cross a network than they have in memory.

A format is one class with its name, its bytes, its error and its words; `register` makes it known:

    @register
    class Mine(Format):
        name = "mine"
        ...

From then on ``paceline.join(comm_dtype="mine")``, ``--comm-dtype``, the plan's table, the simulator and the reports
have it. This module imports torch only to encode and decode: commands that print tables do without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

PLAIN = "float32"
"""The usual wire: numbers are sent as they are, in float32 mostly."""
PLAIN_BYTES = 4
SMALLEST = 1 << 16
"""Bytes up to which a tensor is sent as it is: together with the round's header, in one message."""
SCALE_BYTES = 4


class Format(ABC):
    """How numbers are written on the wire."""

    name: str
    """What ``comm_dtype=`` and ``--comm-dtype`` call it."""
    bytes_per_value: float
    """Bytes that a number takes in a long row, scales included."""
    error: str
    """The largest error of a number that was rounded once, in words for the report."""
    averages_only: bool = False
    """Whether it is too coarse for single gradients."""
    planned: bool = True
    """Whether `paceline plan` has a column for it: not for a format that costs as much as another one."""

    @property
    def part(self) -> float:
        """Bytes over float32's."""
        return self.bytes_per_value / PLAIN_BYTES

    @abstractmethod
    def row_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` numbers; a multiple of 4."""

    @abstractmethod
    def encode(self, values: torch.Tensor, row: torch.Tensor) -> None:
        """Write ``values`` into a row of bytes. NaN and infinities must still be such when they are decoded."""

    @abstractmethod
    def decode(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """Return the ``count`` numbers of a row, in float32."""

    def encoded(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as a row of bytes."""
        import torch

        row = torch.empty(self.row_bytes(values.numel()), dtype=torch.uint8)
        self.encode(values, row)
        return row

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is sent in this format: it is large, and of larger numbers."""
        return (
            tensor.is_floating_point()
            and tensor.element_size() > self.bytes_per_value
            and tensor.numel() * tensor.element_size() > SMALLEST
        )


Kind = TypeVar("Kind", bound=Format)
_FORMATS: dict[str, Format] = {}
FORMATS: Mapping[str, Format] = MappingProxyType(_FORMATS)
"""All formats by name, in the order in which they were registered."""


def register(kind: type[Kind]) -> type[Kind]:
    """Make a format known by its ``name``; returns the class, so that this is a decorator too."""
    name = getattr(kind, "name", "")
    if not name or name == PLAIN or type(_FORMATS.get(name, kind())) is not kind:
        raise ValueError(f"a wire format has a name that no other has, and {kind.__name__} has {name!r}")
    _FORMATS[name] = kind()
    return kind


def names() -> tuple[str, ...]:
    """Return the names of all wires."""
    return PLAIN, *FORMATS


def format_of(wire: str) -> Format | None:
    """Return the format of a wire's name, None for the plain one; ValueError for a name that nobody registered."""
    if wire not in names():
        raise ValueError(f"unknown comm_dtype {wire!r}; known: {', '.join(names())}")
    return FORMATS.get(wire)


def part_of(wire: str) -> float:
    """Return the bytes of a wire over float32's; 1 for one that is not known here, as in a log of another program.

    >>> part_of("bf16"), part_of("int8"), part_of("float32")
    (0.5, 0.25390625, 1.0)
    """
    return FORMATS[wire].part if wire in FORMATS else 1.0


def for_gradients() -> list[str]:
    """Return the names of the formats that are exact enough for single gradients."""
    return [name for name, one in FORMATS.items() if not one.averages_only]


def for_averages() -> list[str]:
    """Return the names of the formats that averages alone can have."""
    return [name for name, one in FORMATS.items() if one.averages_only]


def planned(wires: list[str]) -> list[str]:
    """Return the plain wire and those of ``wires`` that plans and advice compare with it."""
    return [PLAIN, *(name for name in wires if FORMATS[name].planned)]


def choice_text() -> str:
    """Return the names for a help text.

    >>> choice_text()
    'float32, bf16, fp16, or int8 with averages'
    """
    return f"{', '.join([PLAIN, *for_gradients()])}, or {' or '.join(for_averages())} with averages"


# -- the formats ---------------------------------------------------------------------------------------------------


@register
class BFloat16(Format):
    """Half the bytes and float32's range."""

    name = "bf16"
    bytes_per_value = 2.0
    error = "0.4 % of itself"

    def row_bytes(self, count: int) -> int:
        return _padded(2 * count)

    def encode(self, values: torch.Tensor, row: torch.Tensor) -> None:
        import torch

        row[: 2 * len(values)].view(torch.bfloat16).copy_(values)

    def decode(self, row: torch.Tensor, count: int) -> torch.Tensor:
        import torch

        return row[: 2 * count].view(torch.bfloat16).to(torch.float32)


class BlockScaled(Format):
    """Numbers of the type ``kind``, each block of ``block`` times a scale by which its largest becomes ``top``."""

    kind: str
    """The name of torch's type."""
    itemsize: int
    block: int
    top: float

    def row_bytes(self, count: int) -> int:
        return _padded(self.itemsize * count) + SCALE_BYTES * -(-count // self.block)

    def encode(self, values: torch.Tensor, row: torch.Tensor) -> None:
        numbers, scales = self._split(row, len(values))
        blocks = in_blocks(values, self.block)
        scales.copy_(blocks.abs().amax(dim=1).div_(self.top))
        scaled = blocks / scales.clamp_min(TINY).unsqueeze(1)  # NaN and infinities stay, and spoil their block
        if not numbers.dtype.is_floating_point:
            scaled.round_()
        numbers.copy_(scaled.view(-1)[: len(values)])

    def decode(self, row: torch.Tensor, count: int) -> torch.Tensor:
        numbers, scales = self._split(row, count)
        blocks = in_blocks(numbers, self.block)
        return (blocks * scales.clamp_min(TINY).unsqueeze(1)).view(-1)[:count]

    def _split(self, row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers and the scales of a row."""
        import torch

        ends = row.numel() - SCALE_BYTES * -(-count // self.block)
        return row[: count * self.itemsize].view(getattr(torch, self.kind)), row[ends:].view(torch.float32)


@register
class Float16(BlockScaled):
    """Half the bytes and three more bits than bf16; scales keep numbers in its range."""

    name, kind, itemsize, block, top = "fp16", "float16", 2, 4096, 32768.0
    bytes_per_value = 2 + SCALE_BYTES / block
    error = "0.05 % of itself"
    planned = False


@register
class Int8(BlockScaled):
    """A quarter of the bytes."""

    name, kind, itemsize, block, top = "int8", "int8", 1, 256, 127.0
    bytes_per_value = 1 + SCALE_BYTES / block
    error = "0.4 % of its block's largest"
    averages_only = True


TINY = 2.0**-126
"""The smallest normal number in float32: the least scale."""


def _padded(count: int) -> int:
    return -(-count // 4) * 4


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``values`` as rows of ``block`` numbers in float32, the last one filled up with zeros."""
    import torch

    values = values.to(torch.float32)
    missing = -len(values) % block
    filled = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return filled.view(len(filled) // block, block)
