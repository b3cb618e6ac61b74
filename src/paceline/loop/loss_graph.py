"""What a loss is a mean over, read from autograd's graph.

A micro-batch's loss L = S / d is a sum over something (samples, tokens, pixels, class weights) divided by how much
there is of it. The mean over the whole batch is ``sum(d * L) / sum(d)``, so d is the micro-batch's weight. It stands
in the graph: in the node of a mean, in that of a loss function, or in a division of a sum. No device is waited for: d
is a number where the graph holds a number or a tensor of the CPU, else a tensor of the device.

Terms add up: each has its d. A term of parameters alone (a penalty) has none, and needs none: its weighted mean is
itself. A factor of a mean changes nothing (``loss / 4``), and one of a sum is part of its divisor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, reduce
from math import prod
from operator import mul
from typing import Any

import torch

LARGEST_TERM = 256
"""Nodes of one term that are looked at to see whether it has parameters alone."""


@dataclass
class LossReading:
    """What was found in one loss's graph."""

    counts: list[Any] = field(default_factory=list)
    """d of each mean: a number, or a tensor of a device."""
    by_tensor: bool = False
    """Whether a sum was divided by a tensor, which the script made: a count of what a mask leaves."""
    sum_over: str | None = None
    """What the first sum without a count of its terms is divided by, in words; empty: by nothing."""
    unread: str | None = None
    """The first operation that cannot be read."""
    bends: str | None = None
    """The first operation that makes the loss another thing than a sum over samples, such as the root of a mean."""


Node = Any
Pending = tuple[tuple[Any, bool], ...]
"""What a term is divided (True) or multiplied by, on the way to it."""
Handler = Callable[["_Reader", Node, Pending], None]


def read_loss(loss: torch.Tensor, rows: int) -> LossReading:
    """What the loss of a micro-batch of so many samples is a mean over.

    >>> logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([1, -100, 4])
    >>> read_loss(torch.nn.functional.cross_entropy(logits, labels), 3).counts
    [2.0]
    >>> read_loss(logits.square().sum(), 3).sum_over
    ''
    """
    return _Reader(rows).read(loss)


class _Reader:
    """One walk from the loss down to its terms."""

    def __init__(self, rows: int) -> None:
        self.rows, self.found, self.todo = rows, LossReading(), list[tuple[Node, Pending]]()
        self._several = False

    def read(self, loss: torch.Tensor) -> LossReading:
        node: Node = loss.grad_fn
        if node is None:
            self.found.unread = "a loss without a graph"
            return self.found
        self.todo.append((node, ()))
        try:
            while self.todo:
                node, pending = self.todo.pop()
                _handler(node.__class__)(self, node, pending)
        except RuntimeError:  # the graph was freed, and backward will say so
            self.found.unread = "a graph that was freed"
        return self.found

    def below(self, node: Node, pending: Pending) -> None:
        """Go on with everything that a node was made of."""
        children = [(child, pending) for child, _ in node.next_functions if child is not None]
        self._several = self._several or len(children) > 1
        self.todo += children[::-1]

    # -- what a term may be ------------------------------------------------------------------------------------------

    def mean(self, node: Node, count: Any) -> None:
        if not (self._several and is_constant(node)):
            self.found.counts.append(_number(count))

    def sum(self, node: Node, shape: tuple[int, ...] | None, pending: Pending) -> None:
        """A sum, and what it is divided by: a count of its terms, or a number that is none."""
        if self._several and is_constant(node):
            return
        tensors = [(value, divides) for value, divides in pending if not _is_plain(value)]
        if tensors:
            factors = [value if divides else value.reciprocal() for value, divides in tensors]
            self.found.counts.append(_number(reduce(mul, factors)))
            self.found.by_tensor = True
            return
        counts = {self.rows, *(prod(shape[: n + 1]) for n in range(len(shape)))} if shape else {self.rows}
        plain = [(float(value), divides) for value, divides in pending]
        for value, divides in plain:
            divisor = value if divides else 1 / value if value else 0.0
            if count := next((one for one in counts if abs(divisor - one) <= 1e-9 * one), 0):
                self.found.counts.append(count)
                return
        if self.found.sum_over is None and not is_constant(node):
            by = prod(value if divides else 1 / value if value else float("inf") for value, divides in plain)
            self.found.sum_over = f"{by:g}" if plain else ""

    def is_one_value(self, node: Node) -> bool:
        """Whether a node that is no reduction gives the value of the one sample there is."""
        return self.rows == 1 and bool(_shape(node, 0)) and not is_constant(node)

    def unread(self, node: Node) -> None:
        if self.is_one_value(node):
            self.found.counts.append(1)
        elif self.found.unread is None and not is_constant(node):
            self.found.unread = str(node.name())


# -- nodes ------------------------------------------------------------------------------------------------------------


def _linear(reader: _Reader, node: Node, pending: Pending) -> None:
    reader.below(node, pending)


def _leaf(reader: _Reader, node: Node, pending: Pending) -> None:
    if not isinstance(node.variable, torch.nn.Parameter):
        reader.found.unread = reader.found.unread or "a loss that is data itself"


def _times(reader: _Reader, node: Node, pending: Pending) -> None:
    """A product: with a number, or of terms of which one is of parameters alone."""
    children = [child for child, _ in node.next_functions]
    if len(children) == 1:  # with a number
        reader.todo.append((children[0], (*pending, (node._saved_other, False))))
    elif None in children:
        value = node._saved_other if children[1] is None else node._saved_self
        reader.todo.append((children[0] or children[1], (*pending, (value, False))))
    else:
        _product(reader, node, children, pending)


def _over(reader: _Reader, node: Node, pending: Pending) -> None:
    children = [child for child, _ in node.next_functions]
    if len(children) == 1 or children[1] is None:
        reader.todo.append((children[0], (*pending, (node._saved_other, True))))
    elif children[0] is None:
        _bends(reader, node, pending)
    else:
        _product(reader, node, children, pending, divides=True)


def _product(reader: _Reader, node: Node, children: list[Node], pending: Pending, *, divides: bool = False) -> None:
    constant = [is_constant(child) for child in children]
    if constant[1]:
        reader.todo.append((children[0], pending))
    elif constant[0] and not divides:
        reader.todo.append((children[1], pending))
    else:
        reader.found.bends = reader.found.bends or str(node.name())


def _bends(reader: _Reader, node: Node, pending: Pending) -> None:
    """A function of a mean that is no multiple of it."""
    if reader.is_one_value(node):
        reader.mean(node, 1)
    elif not is_constant(node):
        reader.found.bends = reader.found.bends or str(node.name())
        reader.below(node, pending)


def _stacked(reader: _Reader, node: Node, shape: tuple[int, ...], pending: Pending) -> bool:
    """Whether a sum or mean is over single numbers, of one loss or of several put together. One value of one sample is
    none."""
    if not shape:
        reader.below(node, pending)
        return True
    below = node.next_functions[0][0]
    kind, children = stem_of(below.__class__), below.next_functions
    length = len(children) if kind in ("Stack", "Cat", *_RESHAPING) else 0
    together = length == prod(shape) and all(child is None or _is_single(child, output) for child, output in children)
    if together:
        reader.below(below, pending)
    return together


_RESHAPING = ("View", "Unsqueeze")


def _is_single(node: Node, output: int) -> bool:
    """Whether a node gives a number without dimensions, or one that was given some."""
    if not _shape(node, output):
        return True
    return stem_of(node.__class__) in _RESHAPING and not _shape_below(node)


def _mean(reader: _Reader, node: Node, pending: Pending) -> None:
    if not _stacked(reader, node, node._saved_self_sym_sizes, pending):
        reader.mean(node, node._saved_self_sym_numel)


def _sum(reader: _Reader, node: Node, pending: Pending) -> None:
    if not _stacked(reader, node, node._saved_self_sym_sizes, pending):
        reader.sum(node, node._saved_self_sym_sizes, pending)


def _some_sum(reader: _Reader, node: Node, pending: Pending) -> None:
    reader.sum(node, None, pending)


def _class_loss(reader: _Reader, node: Node, pending: Pending) -> None:
    """The loss of class numbers: the mean is over the weights of their classes, without those that are ignored."""
    if node._saved_reduction == 1:
        reader.mean(node, node._saved_total_weight)
    else:
        shape = _shape_below(node)
        shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
        _reduced(reader, node, shape, prod(shape), pending)


def _elementwise_loss(reader: _Reader, node: Node, pending: Pending) -> None:
    shape = _shape_below(node)
    _reduced(reader, node, shape, prod(shape), pending)


def _row_loss(reader: _Reader, node: Node, pending: Pending) -> None:
    shape = _shape_below(node)
    _reduced(reader, node, shape[:1], shape[0] if len(shape) > 1 else 1, pending)


def _reduced(reader: _Reader, node: Node, shape: tuple[int, ...], count: int, pending: Pending) -> None:
    if node._saved_reduction == 2:
        reader.sum(node, shape, pending)
    else:
        reader.mean(node, count)


def _shape_below(node: Node) -> tuple[int, ...]:
    return _shape(*next(pair for pair in node.next_functions if pair[0] is not None))


def _shape(node: Node, output: int) -> tuple[int, ...]:
    """Of what a node gives."""
    return tuple(node._input_metadata[output].shape)


def _unread(reader: _Reader, node: Node, pending: Pending) -> None:
    reader.unread(node)


_LINEAR = "Add Sub Rsub Neg View UnsafeView ReshapeAlias Squeeze Unsqueeze ToCopy Clone Alias Expand Permute T NanToNum"
_BENDING = "Sqrt Log Log1P Exp Expm1 Pow Abs Clamp ClampMin ClampMax Relu Softplus Sigmoid Tanh LinalgVectorNorm Norm"
_ELEMENTWISE = "MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss"
_KINDS: dict[str, Handler] = {
    **dict.fromkeys(_LINEAR.split(), _linear),
    **dict.fromkeys(_BENDING.split(), _bends),
    "Mul": _times,
    "Div": _over,
    "Mean": _mean,
    "Sum": _sum,
    **dict.fromkeys(("Nansum", "Dot", "Bmm", "Mm", "Mv"), _some_sum),
    **dict.fromkeys(("NllLoss", "NllLoss2D"), _class_loss),
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise_loss),
    **dict.fromkeys(("MultiMarginLoss", "MultilabelMarginLoss"), _row_loss),
}


@cache
def _handler(kind: Any) -> Handler:
    """What reads a node of this kind."""
    return _leaf if kind.__name__ == "AccumulateGrad" else _KINDS.get(stem_of(kind), _unread)


@cache
def stem_of(kind: Any) -> str:
    """The name without the suffix of autograd's generated nodes, which a user's own do not have."""
    name: str = kind.__name__
    return name[: -len("Backward0")] if name[:-1].endswith("Backward") and name[-1].isdigit() else ""


# -- terms of parameters alone ----------------------------------------------------------------------------------------

_PURE = frozenset(
    f"{_LINEAR} {_BENDING} Mean Sum Square Transpose Slice Select Diagonal Trace Triu Tril Max Min Logsumexp "
    "LinalgMatrixNorm LinalgSvd Mul Div Mm Bmm Mv Dot Stack Cat".split()
)
"""Operations that make a number of parameters, and, where all their arguments are, of nothing else."""


def is_constant(node: Node) -> bool:
    """Whether a term has parameters alone, and no data: a penalty on weights. In doubt it has data."""
    todo, seen = [node], 0
    while todo:
        node = todo.pop()
        seen += 1
        role = _role(node.__class__)
        if role == "leaf" and isinstance(node.variable, torch.nn.Parameter):
            continue
        if role != "pure" or seen > LARGEST_TERM:
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
    """Whether an operation with a number or another tensor has the shape of what it was made of: data would have
    brought rows of its own."""
    shape = _shape(node, 0)
    return all(_shape(child, output) == shape for child, output in node.next_functions if child is not None)


# -- numbers -----------------------------------------------------------------------------------------------------------

_SMALL_INT, _SMALL_FLOAT = torch.zeros((), dtype=torch.uint8), torch.zeros((), dtype=torch.float16)


def _is_plain(value: Any) -> bool:
    """Whether it was a number in the script, and no tensor: torch keeps it as one that yields to every other's type."""
    if not isinstance(value, torch.Tensor):
        return True
    if not value.is_cpu or value.dtype not in (torch.int64, torch.float64):
        return False
    small = _SMALL_FLOAT if value.is_floating_point() else _SMALL_INT
    return torch.result_type(value, small) == small.dtype


def _number(count: Any) -> Any:
    """A number, unless looking at it would make a device wait."""
    if not isinstance(count, torch.Tensor):
        return count
    return float(count.item()) if count.is_cpu else count.detach().reshape(())
