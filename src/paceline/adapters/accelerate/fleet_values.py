"""Tensors and plain values of all workers: what gather, reduce and pad_across_processes need.

Every worker writes its tensors, as bytes, into a buffer for all of them that is zero elsewhere. The sum of the buffers,
as whole numbers, holds every worker's tensors bit for bit: one worker writes each byte, so nothing carries.

Accelerate's free functions (``accelerate.utils.gather``, ``reduce``, ``broadcast`` and their like) call
``torch.distributed``, whose default process group is absent in a fleet, or has other members. `serve` gives the modules
in which they stand a ``torch`` whose ``distributed`` has the fleet's collectives, and is torch's otherwise. So they are
right however the script has imported them, and before or after this adapter.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import operations, random
from accelerate.utils.operations import recursively_apply

from paceline.errors import MisuseError
from paceline.gradients.fleet_sums import sum_until_done
from paceline.training.context import TrainingContext

if TYPE_CHECKING:
    from paceline.adapters.accelerate.accelerator import Accelerator
    from paceline.adapters.accelerate.joined import JoinedFleet
    from paceline.adapters.accelerate.updates import StepUpdates


Leaves = list[torch.Tensor]
NUMBERS = "biufcSU"
"""Kinds of NumPy's types that are plain: numbers and texts."""
ALIGNED = 8
"""Bytes of a whole number, at whose multiples tensors begin in a buffer."""


class AllWorkers:
    """What all workers have at one call. ``alone`` returns whether each goes through an evaluation by itself."""

    def __init__(self, joined: JoinedFleet, updates: StepUpdates, alone: Callable[[], bool]) -> None:
        self._joined, self._updates, self._alone = joined, updates, alone

    def _check(self, call: str) -> None:
        if self._joined.left and self._joined.several:
            raise MisuseError(f"{call} after the fleet was left, by end_training(): call it before")
        self._updates.check_everybody_comes(call)

    def leaves(self, call: str, data: Any) -> list[Any]:
        """Return every worker's tensors of a nested structure, tensor by tensor."""
        self._check(call)
        own = leaves_of(data)
        if self._alone():
            return [[tensor] for tensor in own]
        return list(zip(*tensors_of_all(self._joined.context, call, own), strict=True))

    def tensors(self, call: str, tensor: torch.Tensor) -> Leaves:
        """Return every worker's tensor, by rank."""
        return list(self.leaves(call, tensor)[0])

    def objects(self, call: str, own: Any) -> list[Any]:
        """Return every worker's plain values, by rank."""
        self._check(call)
        return [own] if self._alone() else objects_of_all(self._joined.context, call, own)


def leaves_of(data: Any) -> Leaves:
    """Return the tensors of a nested structure."""
    found: Leaves = []
    recursively_apply(found.append, data, error_on_other_type=True)
    return found


def rebuilt(data: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """Return the same structure with these tensors."""
    new = iter(leaves)
    return recursively_apply(lambda _: next(new), data)


def tensors_of_all(context: TrainingContext, label: str, own: Sequence[torch.Tensor]) -> list[Leaves]:
    """Return every worker's tensors by rank, on this worker's device. All workers call it with as many."""
    here: Leaves = [tensor.detach().to("cpu").contiguous() for tensor in own]
    if context.transport.solitary or context.outside:
        return [list(own)]
    with context.meet(label):
        if context.elastic is not None:  # members may change meanwhile: one call, which is made again
            rows = context.transport.gather(label, [[_outline(t), _text(t)] for t in here])
            described = [[outline for outline, _ in row] for row in rows]
            parts = [[base64.b64decode(text) for _, text in row] for row in rows]
        else:
            described = context.transport.gather(label, [_outline(tensor) for tensor in here])
            parts = []
        if len({len(row) for row in described}) > 1:
            raise MisuseError(f"{label}: workers gave unlike numbers of tensors, {[len(row) for row in described]}")
        flat = parts or _exchanged(context, label, here, described)
    return [
        [_tensor(part, *outline).to(context.device) for part, outline in zip(row, outlines, strict=True)]
        for row, outlines in zip(flat, described, strict=True)
    ]


def _exchanged(
    context: TrainingContext, label: str, own: Leaves, described: Sequence[Sequence[Any]]
) -> list[list[bytes]]:
    sizes = [[_size(*outline) for outline in row] for row in described]
    starts, at = list[list[int]](), 0
    for row in sizes:
        starts.append([])
        for size in row:
            starts[-1].append(at)
            at += -(-size // ALIGNED) * ALIGNED
    buffer = torch.zeros(max(1, at // ALIGNED), dtype=torch.int64)
    raw = buffer.view(torch.uint8)
    for start, tensor in zip(starts[context.transport.rank], own, strict=True):
        if tensor.numel():
            content = tensor.reshape(-1).view(torch.uint8)
            raw[start : start + len(content)] = content
    (summed,) = sum_until_done(context.transport, label, [buffer])
    raw = summed.view(torch.uint8)
    return [
        [raw[start : start + size].numpy().tobytes() for start, size in zip(*row, strict=True)]
        for row in zip(starts, sizes, strict=True)
    ]


def _outline(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"").decode()


def _size(shape: Sequence[int], dtype: str) -> int:
    return int(torch.Size(shape).numel()) * int(getattr(torch, dtype).itemsize)


def _tensor(content: bytes, shape: Sequence[int], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind).reshape(tuple(shape))


def joined_rows(label: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the workers' tensors one below the other; a single number is a row."""
    rows = [part[None] if part.dim() == 0 else part for part in parts]
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        shapes = [tuple(row.shape) for row in rows]
        raise ValueError(f"{label}: workers' tensors have the shapes {shapes}: call accelerator.pad_across_processes")
    return torch.cat(rows)


def reduced(label: str, parts: Sequence[torch.Tensor], rule: str) -> torch.Tensor:
    """Return the sum, mean or maximum of the workers' tensors."""
    if len({part.shape for part in parts}) > 1:
        raise ValueError(f"{label}: workers' tensors have unlike shapes, {[tuple(part.shape) for part in parts]}")
    stacked = torch.stack(list(parts))
    if rule == "sum":
        return stacked.sum(0).to(parts[0].dtype)
    if rule == "mean":
        return stacked.sum(0) / len(parts)
    if rule == "max":
        return torch.amax(stacked, 0)
    raise ValueError(f'{label}: reduction is "sum", "mean", "max" or "none", got {rule!r}')


def padded(tensor: torch.Tensor, size: int, *, dim: int, value: Any, first: bool) -> torch.Tensor:
    """Return the tensor with ``size`` entries along ``dim``, filled up with a value.

    >>> padded(torch.tensor([1, 2]), 3, dim=0, value=0, first=False)
    tensor([1, 2, 0])
    """
    own = tensor.shape[dim]
    if own == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    wide: torch.Tensor = tensor.new_zeros(shape) + value
    wide.narrow(dim, size - own if first else 0, own).copy_(tensor)
    return wide


def objects_of_all(context: TrainingContext, label: str, own: Any) -> list[Any]:
    """Return every worker's plain values, by rank."""
    if context.transport.solitary or context.outside:
        return [own]
    try:
        sent = packed(own)
    except TypeError as error:
        raise MisuseError(
            f"{label} of a {error}: workers hand each other tensors, NumPy's arrays and plain values (numbers, texts, "
            "and lists, tuples and dictionaries of them)"
        ) from None
    with context.meet(label):
        return [unpacked(one) for one in context.transport.gather(label, sent)]


def packed(value: Any) -> Any:
    """Return a plain value in a form that JSON keeps; raise TypeError with the type of what is not plain.

    >>> packed(("a", {1: float("nan")}))
    ['tuple', ['a', ['dict', [[1, ['float', 'nan']]]]]]
    >>> unpacked(packed({"a": [1, (2, None)]}))
    {'a': [1, (2, None)]}
    >>> unpacked(packed([np.float32(0.5), np.arange(2)]))
    [np.float32(0.5), array([0, 1])]
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", str(value)]
    if isinstance(value, tuple) and kind in (tuple, torch.Size):
        return ["tuple", [packed(one) for one in value]]
    if kind is list:
        return ["list", [packed(one) for one in value]]
    if kind is torch.Tensor:
        here = value.detach().to("cpu").contiguous()
        return ["tensor", [*_outline(here), _text(here), value.device.type]]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NUMBERS:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return ["array" if isinstance(value, np.ndarray) else "scalar", [value.dtype.str, list(value.shape), text]]
    if kind is dict:
        return ["dict", [[packed(key), packed(one)] for key, one in value.items()]]
    raise TypeError(kind.__name__)


def unpacked(value: Any) -> Any:
    """Return the plain value that `packed` has packed."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "float":
        return float(content)
    if kind == "tensor":
        shape, dtype, text, device = content
        return _tensor(base64.b64decode(text), shape, dtype).to(device)
    if kind in ("array", "scalar"):
        numbers, dims, text = content
        array = np.frombuffer(bytearray(base64.b64decode(text)), dtype=numbers).reshape(dims)
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {unpacked(key): unpacked(one) for key, one in content}
    ones = [unpacked(one) for one in content]
    return tuple(ones) if kind == "tuple" else ones


def each_leaf(data: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with every tensor replaced."""
    return recursively_apply(make, data)


class FleetCollectives:
    """The collectives that Accelerate's free functions call. ``current`` returns the Accelerator; None without fleet.

    Signatures are those of ``torch.distributed``.
    """

    def __init__(self, current: Callable[[], Accelerator | None]) -> None:
        self._current = current

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *others: Any) -> None:
        """Fill the list with all workers' tensors; their numbers of rows may differ."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_gather(tensor_list, tensor, *others)
            return
        tensor_list[:] = accelerator.all_workers.tensors("accelerate.utils.gather", tensor)

    def all_gather_object(self, object_list: list[Any], obj: Any, *others: Any) -> None:
        """Fill the list with all workers' plain values."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_gather_object(object_list, obj, *others)
            return
        object_list[:] = accelerator.all_workers.objects("accelerate.utils.gather_object", obj)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *others: Any) -> None:
        """Replace the tensor by the sum, or maximum, of all workers' tensors."""
        accelerator = self._current()
        if accelerator is None:
            dist.all_reduce(tensor, op, *others)
            return
        if accelerator.joined.context.elastic is not None:
            raise MisuseError(
                "accelerate.utils.reduce divides by a number of processes, and here workers come and go: use "
                "accelerator.reduce(tensor, reduction=...)"
            )
        parts = accelerator.all_workers.tensors("accelerate.utils.reduce", tensor)
        rule = "max" if op == dist.ReduceOp.MAX else "sum"
        tensor.copy_(reduced("accelerate.utils.reduce", parts, rule))

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *others: Any) -> None:
        """Replace the tensor by that of one worker."""
        accelerator = self._current()
        if accelerator is None:
            dist.broadcast(tensor, src, *others)
            return
        check_source(accelerator, "accelerate.utils.broadcast", src)
        parts = accelerator.all_workers.tensors("accelerate.utils.broadcast", tensor)
        if parts[src].shape != tensor.shape:
            raise ValueError(
                f"accelerate.utils.broadcast: the tensor of process {src} has the shape {tuple(parts[src].shape)}, and "
                f"this one {tuple(tensor.shape)}: give tensors of equal shape"
            )
        tensor.copy_(parts[src])

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, *others: Any) -> None:
        """Replace the plain values in the list by those of one worker."""
        accelerator = self._current()
        if accelerator is None:
            dist.broadcast_object_list(object_list, src, *others)
            return
        label = "accelerate.utils.broadcast_object_list"
        check_source(accelerator, label, src)
        own = list(object_list) if accelerator.process_index == src else None
        object_list[:] = accelerator.all_workers.objects(label, own)[src]


def check_source(accelerator: Accelerator, label: str, source: int) -> None:
    """Raise MisuseError where a worker's value cannot reach all others."""
    context = accelerator.joined.context
    if context.elastic is not None and (source or context.outside or accelerator.evaluation is not None):
        raise MisuseError(
            f"{label} where workers come and go: one that joins later has missed it; keep the value in an object for "
            "accelerator.register_for_checkpointing, which newcomers receive"
        )
    if not 0 <= source < accelerator.num_processes:
        raise ValueError(f"{label}: there is no process {source}, of {accelerator.num_processes}")


def serve(current: Callable[[], Accelerator | None]) -> None:
    """Have Accelerate's free functions use the fleet of the current Accelerator."""
    fleets = FleetCollectives(current)
    shown = _like(dist, {name: getattr(fleets, name) for name in vars(FleetCollectives) if not name.startswith("_")})
    for module in (operations, random):
        vars(module)["torch"] = _like(torch, {"distributed": shown})


def _like(module: ModuleType, others: dict[str, Any]) -> ModuleType:
    """Return a module with the contents of another one, except for some."""
    new = ModuleType(module.__name__)
    vars(new).update(vars(module))
    vars(new).update(others)
    return new
