"""Predictions of a whole dataset in its order, each sample once: for figures that are no sums (AUC, F1, mAP).

Every worker predicts its part and writes it, as bytes, into a buffer for the whole set that is zero elsewhere. The sum
of the buffers, as whole numbers, is then every worker's part in its place, bit for bit: each byte is written by one
worker, so nothing carries. The buffer's first word counts rows; when a worker was lost with its rows the count is
short, and those left predict again among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.combine.gradients.exchange import summed
from paceline.errors import FleetError
from paceline.feed import total
from paceline.training.evaluate import PlacedBatches, called
from paceline.transport import Transport

LABEL = "fleet.gather()"
SUM = "the rows of fleet.gather()"
ATTEMPTS = 10
"""Workers that may be lost, one after another, while predictions are gathered."""
ALIGNED = 16
"""Bytes: where a tensor of any type may begin in a buffer."""


@dataclass(frozen=True)
class Form:
    """What the user's function returns, less the rows: kind, names, and each tensor's trailing shape and type."""

    kind: str
    """"tensor", "tuple", "list" or "dict"."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def to_json(self) -> list[Any]:
        return [self.kind, list(self.names), [list(shape) for shape in self.shapes], list(self.dtypes)]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Form:
        kind, names, shapes, dtypes = said
        return cls(kind, tuple(names), tuple(tuple(shape) for shape in shapes), tuple(dtypes))

    def types(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.dtypes]

    def build(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The tensors as the user's function would have returned them."""
        if self.kind == "tensor":
            return leaves[0]
        if self.kind == "dict":
            return dict(zip(self.names, leaves, strict=True))
        return list(leaves) if self.kind == "list" else tuple(leaves)


@dataclass
class Part:
    """What one worker predicted: ``form`` is None when it had no samples, ``problem`` says why it cannot be used."""

    form: Form | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    """With ``rows`` rows each."""
    start: int = 0
    rows: int = 0
    problem: str | None = None

    def to_json(self) -> list[Any]:
        """What the others need to know before rows are summed: the problem and the form."""
        return [self.problem, self.form.to_json() if self.form is not None else None]


def own_part(predict: Callable[..., Any], batches: PlacedBatches) -> Part:
    """Run ``predict`` over this worker's part of the data, and put the rows together."""
    part, rows = Part(), list[list[torch.Tensor]]()
    for piece, batch in batches:
        predicted = called(predict, batch)
        if not piece:  # beside the other processes of the worker
            continue
        try:
            form, leaves = read(predicted, samples=total(piece))
            part.form = form if part.form is None else same(part.form, form, "for another batch")
        except ValueError as error:
            return Part(problem=str(error))
        part.start = part.start if rows else piece[0][0]
        part.rows += total(piece)
        rows.append(leaves)
    part.leaves = [torch.cat(column) for column in zip(*rows, strict=True)]
    return part


def read(predicted: Any, *, samples: int) -> tuple[Form, list[torch.Tensor]]:
    """What the user's function returned for a batch, on the CPU; ValueError unless it has one row a sample."""
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
    return Form(kind, names, shapes, tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)), leaves


def _rows(label: str, value: Any, samples: int) -> torch.Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise ValueError(
            f"{LABEL}: the function must return a tensor with one row a sample, or a tuple or dict of such; {label} is "
            f"a {type(value).__name__}; predictions of unlike sizes are padded to one size and stacked"
        )
    if not value.dim() or len(value) != samples:
        raise ValueError(
            f"{LABEL}: {label} has the shape {tuple(value.shape)} for a batch of {samples} samples, and must have one "
            "row a sample; for sums over a batch call fleet.evaluate"
        )
    return value.detach().to("cpu", copy=True).contiguous()  # a copy: the function may use its own again


def same(form: Form, other: Form, where: str) -> Form:
    """``form``; ValueError when it is not the other's too."""
    if form == other:
        return form
    if (form.kind, form.names, len(form.shapes)) != (other.kind, other.names, len(other.shapes)):
        ones, others = (f"{one.kind} of {list(one.names) or len(one.shapes)}" for one in (form, other))
        raise ValueError(f"{LABEL}: the function returned a {ones} for one batch and a {others} {where}")
    ones, others = (
        ", ".join(f"{dtype} {list(shape)}" for dtype, shape in zip(one.dtypes, one.shapes, strict=True))
        for one in (form, other)
    )
    raise ValueError(
        f"{LABEL}: a sample's prediction is {ones} for one batch and {others} {where}: pad it to one size, for "
        "instance to the longest of the whole set, and keep one type"
    )


def agreed_form(said: Sequence[Sequence[Any]]) -> Form:
    """The form that all workers with samples gave; ValueError with the first worker's problem, or the difference."""
    form: Form | None = None
    for rank, (problem, its) in enumerate(said):
        if problem:
            raise ValueError(f"worker {rank}: {problem}" if len(said) > 1 else problem)
        if its is not None:
            its_form = Form.from_json(its)
            form = its_form if form is None else same(form, its_form, f"on worker {rank}")
    assert form is not None, "somebody has samples"
    return form


def places(form: Form, length: int) -> tuple[list[int], int]:
    """Where each tensor of ``length`` rows begins in the buffer, and the buffer's size, in bytes."""
    at, starts = ALIGNED, []
    for shape, dtype in zip(form.shapes, form.types(), strict=True):
        starts.append(at)
        size = length * math.prod(shape) * dtype.itemsize
        at += -(-size // ALIGNED) * ALIGNED
    return starts, at


def packed(form: Form, part: Part, length: int) -> torch.Tensor:
    """The buffer with this worker's rows in their places and zeros elsewhere, as whole numbers."""
    starts, size = places(form, length)
    buffer = torch.zeros(size // 8, dtype=torch.int64)
    buffer[0] = part.rows
    raw = buffer.view(torch.uint8)
    for at, leaf in zip(starts, part.leaves):  # none, when it had no samples
        row = leaf[0].numel() * leaf.element_size()
        raw[at + part.start * row : at + (part.start + part.rows) * row] = leaf.reshape(-1).view(torch.uint8)
    return buffer


def unpacked(form: Form, buffer: torch.Tensor, length: int) -> Any:
    """The whole set's rows, as the user's function would have returned them. None: rows are missing."""
    if int(buffer[0]) != length:
        return None
    starts, _ = places(form, length)
    raw, leaves = buffer.view(torch.uint8), []
    for at, shape, dtype in zip(starts, form.shapes, form.types(), strict=True):
        size = length * math.prod(shape) * dtype.itemsize
        leaves.append(raw[at : at + size].view(dtype).view(length, *shape).clone())
    return form.build(leaves)


def gathered(transport: Transport, mine: Callable[[], Part], length: int, *, outside: bool = False) -> Any:
    """Every worker's rows, on every worker. ``mine`` is asked again when members changed. ``outside``: this worker is
    not in the fleet yet, and has all the rows."""
    part = Part()

    def described() -> list[Any]:
        nonlocal part
        part = mine()
        return _of_worker(transport.collect(LABEL, part.to_json()))

    for _ in range(ATTEMPTS):
        form = agreed_form(transport.gather(LABEL, described))
        own = transport.collect(LABEL, packed(form, part, length))
        sums = transport.once(LABEL, lambda own=own: own if outside else _sum(transport, own))  # type: ignore[misc]
        whole = unpacked(form, _added(sums), length)
        if whole is not None:
            transport.gather("the predictions of fleet.gather()", None)  # nobody may still have to be given them
            return whole
    raise FleetError(f"{LABEL}: workers were lost again and again while predictions were gathered")


def _of_worker(said: Sequence[list[Any]]) -> list[Any]:
    """What the processes of a worker said, as one worker's: the first problem, or a form that one of them has."""
    problems, formed = [one for one in said if one[0]], [one for one in said if one[1] is not None]
    return [*problems, *formed, [None, None]][0]


def _sum(transport: Transport, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum the buffers, whose size is the same whoever is there, as often as members are lost meanwhile: rows that were
    lost with one are missed in the sum, by all alike."""
    while (sums := summed(transport, SUM, lambda: [_added(own).clone()])) is None:
        pass
    return sums


def _added(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return buffers[0] if len(buffers) == 1 else torch.stack(list(buffers)).sum(0)
