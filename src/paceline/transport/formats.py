"""How numbers are written where fewer bytes are to cross a network than they have in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """How numbers are written: as ``kind``, each block of ``block`` times a scale of its own (0: there are none), by
    which the largest of the block becomes ``top``.

    >>> Format("int8", torch.int8, block=256, top=127.0).row_bytes(1000)
    1016
    """

    name: str
    kind: torch.dtype
    block: int = 0
    top: float = 0.0
    averages_only: bool = False
    """Too coarse for single gradients."""

    def row_bytes(self, count: int) -> int:
        """Of so many numbers; a multiple of 4."""
        blocks = -(-count // self.block) if self.block else 0
        numbers = -(-count * self.kind.itemsize // 4) * 4
        return numbers + 4 * blocks

    def _split(self, row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers and the scales of a row."""
        blocks = -(-count // self.block) if self.block else 0
        ends = row.numel() - 4 * blocks
        return row[: count * self.kind.itemsize].view(self.kind), row[ends:].view(torch.float32)

    def write(self, row: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` into a row of bytes."""
        numbers, scales = self._split(row, len(values))
        if not self.block:
            numbers.copy_(values)
            return
        blocks = _blocks(values, self.block)
        scales.copy_(blocks.abs().amax(dim=1).div_(self.top))
        scaled = blocks / scales.clamp_min(_TINY).unsqueeze(1)  # NaN and infinities stay, and spoil their block
        if not self.kind.is_floating_point:
            scaled.round_()
        numbers.copy_(scaled.view(-1)[: len(values)])

    def written(self, values: torch.Tensor) -> torch.Tensor:
        """These numbers as a row of bytes."""
        row = torch.empty(self.row_bytes(values.numel()), dtype=torch.uint8)
        self.write(row, values)
        return row

    def read(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """The ``count`` numbers of a row, in float32."""
        numbers, scales = self._split(row, count)
        values = numbers.to(torch.float32)
        if not self.block:
            return values
        blocks = _blocks(values, self.block)
        blocks.mul_(scales.clamp_min(_TINY).unsqueeze(1))
        return blocks.view(-1)[:count]


_TINY = torch.finfo(torch.float32).tiny


def _blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """As rows of ``block`` numbers in float32, the last one filled up with zeros."""
    values = values.to(torch.float32)
    missing = -len(values) % block
    filled = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return filled.view(len(filled) // block, block)


FORMATS = {
    "bf16": Format("bf16", torch.bfloat16),
    "fp16": Format("fp16", torch.float16, block=4096, top=32768.0),
    "int8": Format("int8", torch.int8, block=256, top=127.0, averages_only=True),
}
"""By name. A new one is a line here, and one in ``PARTS`` and ``HALF_STEPS`` of the verdict (observe/analysis/wire.py,
observe/words/wire.py)."""
