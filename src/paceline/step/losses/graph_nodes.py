"""What single nodes of autograd's graph show: shapes, where samples lie, terms of one sample or of parameters alone.

They also show whether a tensor that the script divides a loss by is a count of what the loss adds up (`is_count`). A
mean over some values is their sum divided by how many there are, or by the sum of their weights. Both are sums over
samples, so that the divisor of a whole batch is the sum of its micro-batches' divisors. A variance of the batch, a
moving average or the size of the global batch are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from math import prod
from typing import Any

import torch

LARGEST_TERM = 256
"""Nodes of one term that are looked at to see whether it has parameters alone."""
MOST_BELOW = 64
"""Nodes below a reduction that are searched for a statistic of the batch."""
NEAREST = 32
"""Nodes next to a loss by which its graph is known again."""

_NORMS = ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "FusedRmsNorm")
LAYERS = frozenset(("Addmm", "Linear", "Convolution", "Embedding", *_NORMS))
"""Operations of a model, at which the loss ends."""

Node = Any
Edge = tuple[Node, int]
"""A node and which of its outputs."""

LINEAR = "Sub Rsub Neg View UnsafeView ReshapeAlias Squeeze Unsqueeze ToCopy Clone Alias Expand Permute T NanToNum"
"""Operations that change no more of a value than its sign, shape or type."""
BENDING = "Sqrt Log Log1P Exp Expm1 Pow Abs Clamp ClampMin ClampMax Relu Softplus Sigmoid Tanh LinalgVectorNorm Norm"
"""Functions that are no multiple of what they are given."""


@cache
def stem_of(kind: Any) -> str:
    """Return the name without the suffix of autograd's generated nodes, which a user's own do not have."""
    name: str = kind.__name__
    return name[: -len("Backward0")] if name[:-1].endswith("Backward") and name[-1].isdigit() else ""


def number_of_kinds(node: Node) -> int:
    """Return a number that graphs share whose nodes between the loss and the nearest layers are of the same kinds."""
    todo, seen, kinds = [node], {node}, list[Any]()
    for node in todo:
        kinds.append(kind := node.__class__)
        if len(kinds) == NEAREST:
            break
        if stem_of(kind) not in LAYERS:
            below = [child for child, _ in node.next_functions if child is not None and child not in seen]
            seen.update(below)
            todo += below
    return hash(tuple(kinds))


# -- shapes -----------------------------------------------------------------------------------------------------------


def shape_below(node: Node) -> tuple[int, ...]:
    return shape_of(*next(pair for pair in node.next_functions if pair[0] is not None))


def shape_of(node: Node, output: int) -> tuple[int, ...]:
    """Return the shape of what a node gives."""
    return tuple(node._input_metadata[output].shape)


def dims_of(node: Node) -> tuple[int, ...] | None:
    """Return the dimensions that a reduction goes over; None for all of them."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():
        return None
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple(map(_signed, dims))


def _signed(dim: int) -> int:
    """Return a dimension that autograd's nodes hold as if it had no sign."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


_RESHAPING = ("View", "Unsqueeze")
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")


def is_single(node: Node, output: int) -> bool:
    """Return whether a node gives a number without dimensions, or one that was given some."""
    if not shape_of(node, output):
        return True
    return stem_of(node.__class__) in _RESHAPING and not shape_below(node)


def dim_of_samples(
    edge: Edge, rows: int, most: int = MOST_BELOW, *, over: frozenset[int] = frozenset()
) -> tuple[int, bool]:
    """Return the dimension of a tensor that its samples lie along, and whether that is sure.

    The graph shows it where the tensor was picked, stacked, turned or made by a layer; else sizes do, and where several
    fit it is the first: those that are the number of samples, or, where none is, multiples of it. ``most``: nodes that
    are looked at. ``over``: it is enough to know whether the dimension is one of these.
    """
    node, shape = edge[0], shape_of(*edge)
    if len(shape) < 2:
        return 0, True
    stem = stem_of(node.__class__)
    pairs = [pair for pair in node.next_functions if pair[0] is not None]
    if stem in ("Addmm", "Mm", "Convolution", "NllLoss", "NllLoss2D", "MaskedSelect"):
        return 0, True
    if stem == "Index" and node._saved_indices[0] is not None:
        return 0, True
    if stem in ("Stack", "Permute", "Transpose", "T") and pairs and most:
        dim, sure = dim_of_samples(pairs[0], rows, most - 1)
        return _moved(node, stem, dim, len(shape)), sure
    if stem in _VIEWS and pairs and shape_of(*pairs[0])[:1] == shape[:1] and most:
        dim, sure = dim_of_samples(pairs[0], rows, most - 1)
        if dim == 0 and sure:  # the first dimension stays what it is where its size does
            return dim, sure
    if stem in ("Slice", "Cat", "Gather", "Narrow"):  # the same dimensions, of another size
        same = pairs[0] if pairs else None
    else:
        same = next((pair for pair in pairs if shape_of(*pair) == shape), None) if stem not in LAYERS else None
    if same is not None and most:
        return dim_of_samples(same, rows, most - 1, over=over)
    fitting = [dim for dim, size in enumerate(shape) if size == rows]
    fitting = fitting or [dim for dim, size in enumerate(shape) if size % rows == 0]
    dim = 0 if not fitting or 0 in fitting else fitting[0]
    apart = dim == 0 and bool(over) and over.isdisjoint(fitting)
    return dim, apart or (dim == 0 and len(fitting) < 2)


def _moved(node: Node, stem: str, dim: int, dims: int) -> int:
    """Return where a stack or a turn has put a dimension."""
    if stem == "Stack":
        return dim + 1 if dim >= _signed(node._saved_dim) % dims else dim
    if stem == "Permute":
        return [_signed(value) % dims for value in node._saved_dims].index(dim)
    one, other = (0, 1) if stem == "T" else (_signed(node._saved_dim0) % dims, _signed(node._saved_dim1) % dims)
    return other if dim == one else one if dim == other else dim


_STATISTICS = frozenset(("Mean", "Sum", "Var", "Std", "VarMean", "StdMean", "Prod", "Logsumexp", "LinalgVectorNorm"))


def statistic_below(node: Node, rows: int) -> str:
    """Return the name of a reduction over samples below a node that is no multiple of it; empty where there is none."""
    todo, seen = [node], {node}
    while todo and len(seen) <= MOST_BELOW:
        node = todo.pop()
        stem = stem_of(node.__class__)
        if stem in LAYERS or not stem:
            continue
        if stem in _STATISTICS and _over_samples(node, rows) and not is_constant(node):
            return str(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return ""


def _over_samples(node: Node, rows: int) -> bool:
    edge = next(pair for pair in node.next_functions if pair[0] is not None)
    shape, dims = shape_of(*edge), dims_of(node)
    if dims is None or len(dims) == len(shape):
        return bool(shape) and rows > 1
    dim, sure = dim_of_samples(edge, rows)
    return sure and dim in {one % len(shape) for one in dims}


# -- values of the script ---------------------------------------------------------------------------------------------

_SMALL_INT, _SMALL_FLOAT = torch.zeros((), dtype=torch.uint8), torch.zeros((), dtype=torch.float16)


def is_plain(value: Any) -> bool:
    """Return whether a value was a number in the script, and no tensor: torch gives it the other operand's type."""
    if not isinstance(value, torch.Tensor):
        return True
    if not value.is_cpu or value.dtype not in (torch.int64, torch.float64) or value.dim():
        return False
    small = _SMALL_FLOAT if value.is_floating_point() else _SMALL_INT
    return torch.result_type(value, small) == small.dtype


def placed_number(values: torch.Tensor, *, divides: bool = False) -> Any:
    """Return a number of all values of a tensor and their places; on CUDA a tensor."""
    values = values.detach().reshape(-1)
    if values.is_complex() or not values.numel():
        return 1.0
    values = values.to(torch.float64) if values.device.type != "mps" else values.float()
    if divides:
        values = values.reciprocal()
    places = torch.arange(2, 2 + values.numel(), device=values.device, dtype=values.dtype).sqrt()
    total = (values * places).sum()
    return float(total.item()) if total.is_cpu else total


# -- one loss of each sample ------------------------------------------------------------------------------------------


@dataclass
class TermReach:
    """What one of several losses is made of, as far as it was looked at."""

    selects: bool = False
    """Whether it picks one sample of the micro-batch."""
    whole: bool = False
    """Whether a layer nearest to it has an output that may be that of all samples."""
    single: bool = False
    """Whether it has layers, and the nearest have no such output."""
    extent: int = 0
    """Rows of the output of its first layer."""
    nodes: set[Node] = field(default_factory=set)
    kind: Any = None
    """What makes it of single values."""


def reach_of(term: Node, rows: int) -> TermReach:
    """Look at what a loss is made of, from the loss down; ``rows``: the micro-batch's samples."""
    reach, todo, layered = TermReach(kind=term.__class__), [(term, 0, False)], False
    while todo and len(reach.nodes) < MOST_BELOW:
        node, output, in_model = todo.pop(0)
        if node in reach.nodes or node.__class__.__name__ == "AccumulateGrad":
            continue
        stem = stem_of(node.__class__)
        if not in_model and _picks_one(node, stem, rows) and not is_constant(node):
            reach.selects = True
            continue
        reach.nodes.add(node)
        if stem in LAYERS or stem in ("Mm", "Bmm"):
            shape = shape_of(node, output)
            reach.extent = reach.extent if layered else shape[0] if shape else 0
            reach.whole = reach.whole or (not in_model and len(shape) > 1 and shape[0] % rows == 0)
            layered, in_model = True, True
        todo += [(child, number, in_model) for child, number in node.next_functions if child is not None]
    reach.single = layered and not reach.whole
    return reach


def _picks_one(node: Node, stem: str, rows: int) -> bool:
    below = next((child for child, _ in node.next_functions if child is not None), None)
    if below is not None and stem_of(below.__class__) == "Stack" and len(shape_below(node)) == 1:  # of losses
        return False
    if stem == "Unbind":
        return bool(node._saved_dim == 0) and shape_below(node)[:1] == (rows,)
    if stem not in ("Select", "Slice", "Split"):
        return False
    sizes = node._saved_self_sym_sizes
    if node._saved_dim != 0 or sizes[0] != rows:
        return False
    if stem == "Slice":
        return bool(min(node._saved_end, rows) - node._saved_start == 1)
    return stem == "Select" or bool(node._saved_split_size == 1)


def any_meet(reach: Iterable[TermReach]) -> bool:
    """Return whether two of these are made of the same data, parameters apart."""
    seen: set[Node] = set()
    for one in reach:
        if seen & one.nodes:
            return True
        seen |= one.nodes
    return False


def added_terms(node: Node) -> tuple[list[Node], int]:
    """Return the terms of a chain of additions, and how many numbers of the script are among them."""
    terms, numbers, todo = [], 0, [node]
    while todo:
        node = todo.pop()
        if stem_of(node.__class__) != "Add":
            terms.append(node)
            continue
        numbers += any(child is None for child, _ in node.next_functions) or len(node.next_functions) == 1
        todo += [child for child, _ in node.next_functions if child is not None]
    return terms, numbers


def number_of_terms(node: Node, known: dict[Node, int]) -> int:
    """Return how many terms a chain of additions has; ``known`` has it of the chain's parts after the first call."""
    if node not in known:
        chain, todo = [], [node]
        while todo:
            node = todo.pop()
            if stem_of(node.__class__) == "Add" and node not in known:
                chain.append(node)
                todo += [child for child, _ in node.next_functions if child is not None]
        for part in reversed(chain):
            known[part] = sum(known.get(child, 1) for child, _ in part.next_functions if child is not None)
        node = chain[0]
    return known[node]


# -- terms of parameters alone ----------------------------------------------------------------------------------------

_PURE = frozenset(
    f"Add {LINEAR} {BENDING} Mean Sum Square Transpose Slice Select Diagonal Trace Triu Tril Max Min Logsumexp "
    "LinalgMatrixNorm LinalgSvd Mul Div Mm Bmm Mv Dot Stack Cat Unbind Split SplitWithSizes Reciprocal Rsqrt Prod "
    "Softmax LogSoftmax".split()
)
"""Operations that make a number of parameters, and, where all their arguments are, of nothing else."""


def is_constant(node: Node, most: int = LARGEST_TERM) -> bool:
    """Return whether a term has parameters alone, and no data: a penalty on weights. In doubt it has data."""
    todo, seen = [node], 0
    while todo:
        node = todo.pop()
        seen += 1
        role = _role(node.__class__)
        if role == "leaf" and isinstance(node.variable, torch.nn.Parameter):
            continue
        if role != "pure" or seen > most:
            return False
        children = [child for child, _ in node.next_functions if child is not None]
        if not children or (len(children) < len(node.next_functions) and not _keeps_shape(node)):
            return False
        todo += children
    return True


@cache
def _role(kind: Any) -> str:
    return "leaf" if kind.__name__ == "AccumulateGrad" else "pure" if stem_of(kind) in _PURE else ""


def _keeps_shape(node: Node) -> bool:
    """Return whether an operation has the shape of its operands: data would have brought rows of its own."""
    shape = shape_of(node, 0)
    return all(shape_of(child, output) == shape for child, output in node.next_functions if child is not None)


_CLASSES = ("NllLoss", "NllLoss2D")
_WEIGHTED = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_FACTORS = ("self", "tensor", "vec", "mat2", "batch1", "batch2")


def is_count(divisor: Any, shape: tuple[int, ...], weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return whether a sum's divisor is a number of its values, or the sum of their weights; on CUDA a tensor.

    Args:
        divisor: a number, or a tensor of a device.
        shape: that of the values that are summed.
        weights: what they are multiplied by.
        nodes: the sum, and what lies directly below: they may have weights of their own.
    """
    values = prod(shape)
    known = is_whole(divisor, most=2 * values)
    if known is True:
        return True
    total = weight_of(weights, nodes)
    return known if total is None else known | is_multiple(divisor, total)


def is_mean_weight(divisor: Any, shape: tuple[int, ...], weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return whether a mean's divisor is the mean of the weights of its values; on CUDA a tensor."""
    total = weight_of(weights, nodes)
    return False if total is None else is_multiple(divisor * prod(shape), total)


def is_whole(divisor: Any, *, most: int) -> Any:
    """Return whether a divisor is a whole number, up to what is added so that nothing is divided by 0."""
    if isinstance(divisor, torch.Tensor):
        off = (divisor - divisor.round()).abs()
        return (off <= _ADDED * divisor.abs().clamp(min=1)) & (divisor.abs() <= most * (1 + _ADDED))
    size = abs(divisor)
    if not math.isfinite(size):  # the gradient shows it
        return True
    return abs(size - round(size)) <= _ADDED * max(1.0, size) and size <= most * (1 + _ADDED)


def is_multiple(one: Any, other: Any) -> Any:
    """Return whether one number is the other, or a whole multiple or part of it: a size that the values have more."""
    if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor):
        one, other = abs(one), abs(other)
        if not one or not other or not math.isfinite(one / other):
            return one == other
        ratio = max(one / other, other / one)
        return bool(abs(ratio - round(ratio)) <= _ADDED * ratio)
    device = (one if isinstance(one, torch.Tensor) else other).device
    one, other = (torch.as_tensor(value, device=device).double().abs() for value in (one, other))
    ratio = torch.maximum(one / other, other / one)
    return ((ratio - ratio.round()).abs() <= _ADDED * ratio) | (one == other)


def is_equal(one: Any, other: Any) -> Any:
    """Return whether two counts are equal, but for rounding; on CUDA a tensor."""
    return abs(one - other) <= _ADDED * abs(other)


_ADDED = 1e-4
"""Part of a divisor that may have been added (``mask.sum() + 1e-6``), or lost in rounding."""


def weight_of(weights: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Any:
    """Return the sum of the weights of some values, as far as the graph has them; None where it has none."""
    found = [*weights, *(weight for node in nodes if (weight := _own_weight(node)) is not None)]
    if not found:
        return None
    try:
        total = reduce(torch.mul, [weight.detach() for weight in found]).sum()
    except RuntimeError:  # shapes that meet in another way
        return None
    return float(total.item()) if total.is_cpu else total


def _own_weight(node: Node) -> torch.Tensor | None:
    """Return the weights of a loss function, or what a product sums with; None where there are none."""
    stem = stem_of(node.__class__)
    if stem in _CLASSES:
        if node._saved_reduction != 0:
            return node._saved_total_weight  # type: ignore[no-any-return]
        weight, target = node._saved_weight, node._saved_target
        kept = target != node._saved_ignore_index
        return None if weight is None else weight[target.masked_fill(~kept, 0)] * kept
    if stem in _WEIGHTED:
        return node._saved_weight  # type: ignore[no-any-return]
    if stem in ("Dot", "Mv", "Mm", "Bmm"):
        saved = (getattr(node, f"_saved_{name}", None) for name in _FACTORS)
        return next((one for one in saved if isinstance(one, torch.Tensor) and not one.requires_grad), None)
    return None
