"""Predictions of a whole dataset in its order, each sample once: for figures that are no sums (AUC, F1, mAP).

Every worker predicts its part and writes it, as bytes, into a buffer for the whole set that is zero elsewhere. The sum
of the buffers, as whole numbers, then holds every worker's part at its position, bit for bit: each byte is written by
one worker, so nothing carries. The buffer's first word counts rows; when a worker was lost with its rows the count is
short, and those left predict again among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.errors import FleetError
from paceline.feed import total
from paceline.gradients.fleet_sums import sum_until_done
from paceline.training.evaluate import PlacedBatches, called
from paceline.transport import Transport

LABEL = "fleet.predict()"
SUM = "the rows of fleet.predict()"
ATTEMPTS = 10
"""Workers that may be lost, one after another, while predictions are gathered."""
ALIGNED = 16
"""Alignment of tensors in a buffer, in bytes."""


@dataclass(frozen=True)
class RowLayout:
    """Structure of what the user's function returns: kind, names, and each tensor's shape per row and type."""

    kind: str
    """One of "tensor", "tuple", "list" and "dict"."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def to_json(self) -> list[Any]:
        return [self.kind, list(self.names), [list(shape) for shape in self.shapes], list(self.dtypes)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> RowLayout:
        kind, names, shapes, dtypes = data
        return cls(kind, tuple(names), tuple(tuple(shape) for shape in shapes), tuple(dtypes))

    def types(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.dtypes]

    def build(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Return the tensors as the user's function would have returned them."""
        if self.kind == "tensor":
            return leaves[0]
        if self.kind == "dict":
            return dict(zip(self.names, leaves, strict=True))
        return list(leaves) if self.kind == "list" else tuple(leaves)


@dataclass
class Part:
    """One worker's predictions: ``layout`` is None without samples, ``problem`` is set when they are unusable."""

    layout: RowLayout | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    """Tensors with ``rows`` rows each."""
    start: int = 0
    rows: int = 0
    problem: str | None = None

    def to_json(self) -> list[Any]:
        """Return what the other workers need before rows are summed: the problem and the layout."""
        return [self.problem, self.layout.to_json() if self.layout is not None else None]


def own_part(predict: Callable[..., Any], batches: PlacedBatches) -> Part:
    """Run ``predict`` over this worker's part of the data, and join the rows."""
    part, rows = Part(), list[list[torch.Tensor]]()
    for piece, batch in batches:
        predicted = called(predict, batch)
        if not piece:  # only to go through the model beside the worker's other processes
            continue
        try:
            layout, leaves = read(predicted, samples=total(piece))
            part.layout = layout if part.layout is None else same(part.layout, layout, "for another batch")
        except ValueError as error:
            return Part(problem=str(error))
        part.start = part.start if rows else piece[0][0]
        part.rows += total(piece)
        rows.append(leaves)
    part.leaves = [torch.cat(column) for column in zip(*rows, strict=True)]
    return part


def read(predicted: Any, *, samples: int) -> tuple[RowLayout, list[torch.Tensor]]:
    """Return what the user's function returned for a batch, on the CPU; raise ValueError without a row per sample."""
    if isinstance(predicted, Mapping):
        kind, names, values = "dict", tuple(predicted), list(predicted.values())
    elif isinstance(predicted, (tuple, list)):
        kind, names, values = "list" if isinstance(predicted, list) else "tuple", (), list(predicted)
    else:
        kind, names, values = "tensor", (), [predicted]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{LABEL}: the names of a dict of predictions must be strings, got {list(names)}")
    labels = [repr(name) for name in names] or [
        f"part {n}" if len(values) > 1 else "the tensor" for n in range(len(values))
    ]
    leaves = [_rows(label, value, samples) for label, value in zip(labels, values, strict=True)]
    if not leaves:
        raise ValueError(f"{LABEL}: the function returned nothing for a batch")
    shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves)
    return RowLayout(kind, names, shapes, tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)), leaves


def _rows(label: str, value: Any, samples: int) -> torch.Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise ValueError(
            f"{LABEL}: the function must return a tensor with one row per sample, or a tuple or dict of such; {label} "
            f"is a {type(value).__name__}; predictions of unlike sizes are padded to one size and stacked"
        )
    if not value.dim() or len(value) != samples:
        raise ValueError(
            f"{LABEL}: {label} has the shape {tuple(value.shape)} for a batch of {samples} samples, and must have one "
            "row per sample; for sums over a batch call fleet.evaluate"
        )
    return value.detach().to("cpu", copy=True).contiguous()  # a copy: the function may reuse its tensor


def same(layout: RowLayout, other: RowLayout, where: str) -> RowLayout:
    """Return ``layout``; raise ValueError when the other differs."""
    if layout == other:
        return layout
    if (layout.kind, layout.names, len(layout.shapes)) != (other.kind, other.names, len(other.shapes)):
        ones, others = (f"{one.kind} of {list(one.names) or len(one.shapes)}" for one in (layout, other))
        raise ValueError(f"{LABEL}: the function returned a {ones} for one batch and a {others} {where}")
    ones, others = (
        ", ".join(f"{dtype} {list(shape)}" for dtype, shape in zip(one.dtypes, one.shapes, strict=True))
        for one in (layout, other)
    )
    raise ValueError(
        f"{LABEL}: a sample's prediction is {ones} for one batch and {others} {where}: pad it to one size, for "
        "instance to the longest of the whole set, and keep one type"
    )


def agreed_layout(answers: Sequence[Sequence[Any]]) -> RowLayout:
    """Return the layout of all workers with samples; raise ValueError with the first problem, or the difference."""
    layout: RowLayout | None = None
    for rank, (problem, its) in enumerate(answers):
        if problem:
            raise ValueError(f"worker {rank}: {problem}" if len(answers) > 1 else problem)
        if its is not None:
            its_layout = RowLayout.from_json(its)
            layout = its_layout if layout is None else same(layout, its_layout, f"on worker {rank}")
    assert layout is not None, "somebody has samples"
    return layout


def offsets(layout: RowLayout, length: int) -> tuple[list[int], int]:
    """Return the offset of each tensor of ``length`` rows in the buffer, and the buffer's size, in bytes."""
    at, starts = ALIGNED, []
    for shape, dtype in zip(layout.shapes, layout.types(), strict=True):
        starts.append(at)
        size = length * math.prod(shape) * dtype.itemsize
        at += -(-size // ALIGNED) * ALIGNED
    return starts, at


def packed(layout: RowLayout, part: Part, length: int) -> torch.Tensor:
    """Return the buffer with this worker's rows at their offsets and zeros elsewhere, as whole numbers."""
    starts, size = offsets(layout, length)
    buffer = torch.zeros(size // 8, dtype=torch.int64)
    buffer[0] = part.rows
    raw = buffer.view(torch.uint8)
    for at, leaf in zip(starts, part.leaves):  # none, when it had no samples
        row = leaf[0].numel() * leaf.element_size()
        raw[at + part.start * row : at + (part.start + part.rows) * row] = leaf.reshape(-1).view(torch.uint8)
    return buffer


def unpacked(layout: RowLayout, buffer: torch.Tensor, length: int) -> Any:
    """Return the whole set's rows, as the user's function would have returned them; None when rows are missing."""
    if int(buffer[0]) != length:
        return None
    starts, _ = offsets(layout, length)
    raw, leaves = buffer.view(torch.uint8), []
    for at, shape, dtype in zip(starts, layout.shapes, layout.types(), strict=True):
        size = length * math.prod(shape) * dtype.itemsize
        leaves.append(raw[at : at + size].view(dtype).view(length, *shape).clone())
    return layout.build(leaves)


def gathered(transport: Transport, mine: Callable[[], Part], length: int, *, outside: bool = False) -> Any:
    """Return every worker's rows, on every worker.

    Args:
        transport: connects the workers.
        mine: returns this worker's part; called again when members changed.
        length: samples in all.
        outside: whether this worker is not in the fleet yet, and has all the rows.
    """
    part = Part()

    def described() -> list[Any]:
        nonlocal part
        part = mine()
        return _of_processes(transport.collect(LABEL, part.to_json()))

    for _ in range(ATTEMPTS):
        layout = agreed_layout(transport.gather(LABEL, described))
        own = transport.collect(LABEL, packed(layout, part, length))
        sums = transport.once(LABEL, lambda own=own: own if outside else _sum(transport, own))  # type: ignore[misc]
        rows = unpacked(layout, _added(sums), length)
        if rows is not None:
            transport.gather("the predictions of fleet.predict()", None)  # leave only when every worker has them
            return rows
    raise FleetError(f"{LABEL}: workers were lost again and again while predictions were gathered")


def _of_processes(answers: Sequence[list[Any]]) -> list[Any]:
    """Return the answers of a worker's processes as one: the first problem, or a layout that one of them has."""
    problems, layouts = [one for one in answers if one[0]], [one for one in answers if one[1] is not None]
    return [*problems, *layouts, [None, None]][0]


def _sum(transport: Transport, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum the buffers, again whenever members are lost meanwhile.

    Their size does not depend on the members; rows that were lost with one are missing in the sum on all workers alike.
    """
    return sum_until_done(transport, SUM, lambda: [_added(own).clone()])


def _added(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return buffers[0] if len(buffers) == 1 else torch.stack(list(buffers)).sum(0)
