"""What a loss is a mean over, read from autograd's graph.

A micro-batch's loss L = S / d is a sum over something (samples, tokens, pixels, class weights) divided by how much
there is of it. The mean over the whole batch is ``sum(d * L) / sum(d)``, so d is the micro-batch's weight. It stands
in the graph: in the node of a mean, in that of a loss function, or in a division of a sum. No device is waited for: d
is a number where the graph holds a number or a tensor of the CPU, else a tensor of the device.

Every path from the loss down to the samples passes reductions, and the last of them that goes over samples ends it.
What the path was divided by up to there is d, up to a factor that is the same in every micro-batch:
``l.mean(0).mean()`` is divided by the features and by the rows, ``l.mean(1).mean()`` by the rows. Numbers of the script
change nothing beside a mean (``loss / 4``), and are a sum's divisor. A tensor that the path is divided by counts in
both (``(l * w).mean() / w.mean()``).

Terms add up: each has its d. A term of parameters alone (a penalty) has none, and needs none: its weighted mean is
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from math import prod
from operator import mul
from typing import Any

import torch

from paceline.step.losses.graph_nodes import (
    BENDING,
    LINEAR,
    Edge,
    Node,
    added_terms,
    any_meet,
    dim_of_samples,
    dims_of,
    is_constant,
    is_count,
    is_equal,
    is_mean_weight,
    is_plain,
    is_single,
    number_of_terms,
    placed_number,
    reach_of,
    shape_below,
    shape_of,
    statistic_below,
    stem_of,
)

GROUPING = frozenset(("ScatterReduce", "IndexReduce", "SegmentReduce", "ScatterAdd", "IndexAdd"))
"""Operations that put values together by group."""
LARGEST_LOSS = 2048
"""Nodes between a loss and its reductions that are looked at."""


@dataclass
class LossReading:
    """What was found in one loss's graph."""

    counts: list[Any] = field(default_factory=list)
    """d of each mean: a number, or a tensor of a device."""
    kinds: set[str] = field(default_factory=set)
    """The operations that give these means and sums."""
    by_tensor: bool = False
    """Whether a sum was divided by a tensor, which the script made: a count of what a mask leaves."""
    sum_over: str | None = None
    """What the first sum without a count of its terms is divided by, in words; empty: by nothing."""
    unread: str | None = None
    """The first operation that cannot be read."""
    bends: str | None = None
    """The first operation that makes the loss another thing than a sum over samples, such as the root of a mean."""
    couples: str | None = None
    """The first statistic of the batch that the loss is a function of."""
    factor: Any = 0.0
    """A number of what means are multiplied by, besides their counts: the same where that is; on CUDA a tensor."""
    nothing: bool = False
    """Whether a sum was multiplied by 0: it counts nothing."""
    unsure: bool = False
    """Whether two readings were possible: which dimension has the samples, or whether a list has one loss of each."""
    otherwise: int | None = None
    """The count in the other reading, where there is one."""
    unlikely: Any = False
    """Whether a sum was divided by a tensor that is neither a number of its values nor the sum of their weights; on
    CUDA a tensor."""
    divisor: Any = 0.0
    """A number of the tensors by which means are divided and that are no means of weights; on CUDA a tensor."""
    clamped: Any = False
    """Whether a sum of several values was divided by exactly 1, which may be a count of nothing made 1; on CUDA a
    tensor."""
    penalty: bool = False
    """Whether a term of parameters alone was divided by the number of samples."""
    sums: int = 0
    """How many of the counts are sums that the script divided by the number of samples."""


@dataclass(frozen=True, eq=False)
class _Factor:
    """A value of the script that a path is divided or multiplied by."""

    value: Any
    divides: bool


@dataclass(frozen=True, eq=False)
class _Reduction:
    """A sum or mean on a path from the loss to the samples."""

    node: Node
    count: Any
    """What a mean divides by; None for a sum."""
    shape: tuple[int, ...] | None
    """The shape of what is reduced; None: unknown."""
    over_samples: bool = True


Path = tuple[_Factor | _Reduction, ...]
"""From the loss to a node, outermost first."""
Weights = tuple[list[torch.Tensor], tuple[Node, ...]]
"""Tensors by which values are multiplied, and nodes that may have weights of their own."""


def _key(last: _Reduction, tensors: Iterable[_Factor]) -> Any:
    """Return what names a reduction and what it is divided by."""
    return (last.node, *map(id, tensors))


def _is_reduced(path: Path) -> bool:
    return any(isinstance(part, _Reduction) for part in path)


Handler = Callable[["_Reader", Node, int, Path], None]


def read_loss(loss: torch.Tensor, rows: int) -> LossReading:
    """Return what the loss of a micro-batch of ``rows`` samples is a mean over.

    >>> logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([1, -100, 4])
    >>> read_loss(torch.nn.functional.cross_entropy(logits, labels), 3).counts
    [2.0]
    >>> read_loss(logits.square().mean(0).mean(), 3).counts
    [15]
    >>> read_loss(logits.square().sum(), 3).sum_over
    ''
    """
    return _Reader(rows).read(loss)


def divisor_of_mean(loss: torch.Tensor, rows: int) -> int:
    """Return the whole number that a loss, which is a mean, was divided by at last; 0: none.

    >>> logits = torch.randn(3, 5, requires_grad=True)
    >>> divisor_of_mean(logits.square().mean() / 4, 3), divisor_of_mean(logits.square().sum() / 15, 3)
    (4, 0)
    """
    node: Node = loss.grad_fn
    if node is None or stem_of(node.__class__) != "Div" or len([one for one, _ in node.next_functions if one]) != 1:
        return 0
    try:
        value = node._saved_other
    except RuntimeError:  # the graph was freed, and backward will raise
        return 0
    child = node.next_functions[0][0]
    if child is None or not is_plain(value) or float(value) < 2 or not float(value).is_integer() or value == rows:
        return 0
    while stem_of(child.__class__) in ("View", "Squeeze", "ToCopy", "Clone", "Alias"):
        child = child.next_functions[0][0]
    is_mean = stem_of(child.__class__) == "Mean" or getattr(child, "_saved_reduction", None) == 1
    return int(value) if is_mean else 0


class _Reader:
    """One walk from the loss down to its terms."""

    def __init__(self, rows: int) -> None:
        self.rows, self.found = rows, LossReading()
        self.todo: list[tuple[Node, int, Path]] = []
        self._seen: set[tuple[Node, int, int]] = set()
        self._paths: list[Path] = []  # keeps them alive, so that no two have one id
        self.several = False
        self._noted: set[Any] = set()
        self._divided: dict[Any, tuple[Any, Any]] = {}
        """The tensor that each sum is divided by, and whether that is a count of what is summed."""
        self.class_weights: list[Any] = []
        """The sums of the weights of classes, in the loss's terms that are losses of class numbers."""
        self._terms = 0
        self.terms_of: dict[Node, int] = {}
        """The number of terms of each addition in a chain."""

    def read(self, loss: torch.Tensor) -> LossReading:
        node: Node = loss.grad_fn
        if node is None:
            self.found.unread = "a loss without a graph"
            return self.found
        self.follow((node, 0), ())
        try:
            while self.todo:
                node, output, path = self.todo.pop()
                _handler(node.__class__)(self, node, output, path)
        except RuntimeError:  # the graph was freed, and backward will raise
            self.found.unread = "a graph that was freed"
        self._look_at_divisors()
        return self.found

    def follow(self, edge: Edge, path: Path) -> None:
        """Go on with a node, unless the same path has led to it before."""
        key = (*edge, id(path))
        if key in self._seen:
            return
        self._paths.append(path)
        self._seen.add(key)
        if len(self._seen) > LARGEST_LOSS:
            self.found.unread = self.found.unread or "a loss of very many operations"
        else:
            self.todo.append((*edge, path))

    def below(self, node: Node, path: Path) -> None:
        """Go on with everything that a node was made of."""
        children = [pair for pair in node.next_functions if pair[0] is not None]
        self.several = self.several or len(children) > 1
        for edge in children[::-1]:
            self.follow(edge, path)

    # -- where a path ends -------------------------------------------------------------------------------------------

    def end(self, node: Node, path: Path) -> None:
        """Note what the path was divided by; ``node``: the first that no reduction of the loss's lies below."""
        reductions = [part for part in path if isinstance(part, _Reduction)]
        last = next((part for part in reversed(reductions) if part.over_samples), None)
        if last is None:
            self.one_value(path) if self.rows == 1 else self.unread(node, path)
            return
        if self.several and (is_constant(last.node) or (_without_data(path) and is_constant(node))):
            self.penalty(path)
            return
        statistic = "" if node is last.node else statistic_below(node, self.rows)
        if statistic or self._averages_groups(node, path[path.index(last) :]):
            self.found.couples = self.found.couples or statistic or str(node.name())
            return
        factors = [part for part in path if isinstance(part, _Factor)]
        if last.count is None:
            inner = [part for part in path[path.index(last) :] if isinstance(part, _Factor)]
            self._sum(last, [part for part in factors if part not in inner], inner, _weights(path, last, node))
            return
        outer = [part.count for part in reductions[: reductions.index(last)] if part.count is not None]
        divisors = [_number(part.value.abs()) for part in _tensors(factors) if part.divides]
        outside = [part for part in path[: path.index(last)] if isinstance(part, _Factor)]
        inside = [part for part in factors if part not in outside]
        single = [part for part in inside if is_plain(part.value) or (not part.divides and part.value.dim() == 0)]
        outside = [part for part in outside if is_plain(part.value) or not part.divides or part.value.dim()]
        self._note_factor([*outside, *single])
        if self._is_new(last, _tensors(factors)):
            self.found.counts.append(reduce(mul, [_number(last.count), *outer, *divisors]))
            if divisors:
                self._look_at_mean_divisor(last, reduce(mul, divisors), _weights(path, last, node))

    def _averages_groups(self, node: Node, below: Path) -> bool:
        """Return whether a node has a mean (or a bound) of each group of samples, such as those of one class.

        ``below``: what is between the reduction and the node.
        """
        stem, shape = stem_of(node.__class__), shape_of(node, 0)
        if stem not in GROUPING or len(shape) != 1 or self.rows < 2 or shape[0] % self.rows == 0:
            return False
        divided = any(isinstance(part, _Factor) and part.divides and not is_plain(part.value) for part in below)
        return divided if stem in ("ScatterAdd", "IndexAdd") else getattr(node, "_saved_reduce", "") != "sum"

    def penalty(self, path: Path) -> None:
        """Note what a term of parameters alone was divided by: it is to be the same in every micro-batch."""
        for part in path:
            if not isinstance(part, _Factor) or not part.divides:
                continue
            if is_plain(part.value):
                self.found.penalty |= self.rows > 2 and float(part.value) == self.rows
            elif part.value.dim() == 0:
                self._terms += 1
                self._note_divisor(_number(part.value))

    def _is_new(self, last: _Reduction, tensors: Iterable[_Factor]) -> bool:
        """Note a path to a reduction; return False where another one, divided by the same, was noted before."""
        self.found.kinds.add(stem_of(last.node.__class__))
        key = _key(last, tensors)
        known = len(self._noted)
        self._noted.add(key)
        return len(self._noted) > known

    def _sum(self, last: _Reduction, outer: list[_Factor], inner: list[_Factor], weights: Weights) -> None:
        """Read a sum, and what it or its terms are divided by: a count of the terms, or a number that is none."""
        plain, times = ([part for part in parts if is_plain(part.value)] for parts in ((*outer, *inner), outer))
        if any(not part.divides and float(part.value) == 0 for part in plain):
            self.found.nothing = True
            return
        outer, inner = _tensors(outer), [part for part in _tensors(inner) if part.divides]
        divisors, matching = [_divisor(part) for part in plain], self._matching(last.shape, plain)
        if any(part.divides for part in outer):
            self._divided_by_tensors(last, outer, weights, times=times)
        elif matching:
            count = next(part for part in plain if abs(_divisor(part) - matching) <= 1e-9 * matching)
            self._note_factor([*outer, *(part for part in plain if part is not count)])
            if self._is_new(last, ()):
                self.found.counts.append(matching)
                self.found.sums += matching == self.rows
        elif outer or inner:
            self._divided_by_tensors(last, outer or inner, weights, times=times)
        elif self.found.sum_over is None and not is_constant(last.node):
            self.found.sum_over = f"{prod(divisors):g}" if divisors else ""

    def _note_factor(self, parts: Iterable[_Factor]) -> None:
        """Note what a term is multiplied by, in a number that depends on the term's place."""
        self._terms += 1
        values = [
            _divisor(part) if is_plain(part.value) else placed_number(part.value, divides=part.divides)
            for part in parts
        ]
        if values:
            self.found.factor = self.found.factor + math.sqrt(2 * self._terms + 1) * reduce(mul, values)

    def _matching(self, shape: tuple[int, ...] | None, plain: Iterable[_Factor]) -> int:
        """Return the count of samples or values that a number of the script divides by; 0 where none does."""
        counts = {self.rows, *(prod(shape[: n + 1]) for n in range(len(shape)))} if shape else {self.rows}
        pairs = ((count, _divisor(part)) for part in plain for count in counts)
        return next((count for count, divisor in pairs if abs(divisor - count) <= 1e-9 * count), 0)

    def _divided_by_tensors(
        self, last: _Reduction, tensors: list[_Factor], weights: Weights, *, times: Sequence[_Factor]
    ) -> None:
        """Read a sum that is divided by tensors; ``times``: numbers by which the quotient is multiplied."""
        factors = [part.value if part.divides else part.value.reciprocal() for part in tensors]
        count = _number(reduce(mul, factors))
        if self._is_new(last, tensors):
            self.found.counts.append(count)
            self.found.by_tensor = True
            self._note_factor(times)
            self._look_for_clamp(last, count)
        if last.shape is not None:
            _, counted = self._divided.get(_key(last, tensors), (count, False))
            self._divided[_key(last, tensors)] = count, counted | is_count(count, last.shape, *weights)

    def _look_at_divisors(self) -> None:
        """Note a tensor that a sum is divided by and that is no count of what is summed, nor that of another term."""
        for count, counted in self._divided.values():
            for total in self.class_weights:
                counted = counted | is_equal(count, total)
            self.found.unlikely = self.found.unlikely | (~counted if isinstance(counted, torch.Tensor) else not counted)

    def _look_at_mean_divisor(self, last: _Reduction, divisor: Any, weights: Weights) -> None:
        """Note a tensor that a mean is divided by and that is no mean of weights: it must be the same everywhere."""
        counted = is_mean_weight(divisor, last.shape or (), *weights)
        if isinstance(counted, torch.Tensor):
            divisor = torch.where(counted, torch.ones_like(counted, dtype=torch.float64), divisor)
        elif counted:
            return
        self._note_divisor(divisor)

    def _note_divisor(self, divisor: Any) -> None:
        """Add what a term is divided by, in a number that depends on the term's place."""
        self.found.divisor = self.found.divisor + math.sqrt(2 * self._terms + 1) * divisor

    def _look_for_clamp(self, last: _Reduction, count: Any) -> None:
        """Note a sum of several values that was divided by exactly 1."""
        values = _number(_values_summed(last))
        if isinstance(count, torch.Tensor) or isinstance(values, torch.Tensor):
            device = (count if isinstance(count, torch.Tensor) else values).device
            is_one = torch.as_tensor(count, device=device).abs() == 1
            self.found.clamped = self.found.clamped | (is_one & (torch.as_tensor(values, device=device) > 1))
        else:
            self.found.clamped = self.found.clamped | (abs(count) == 1 and values > 1)

    def is_one_value(self, node: Node) -> bool:
        """Return whether a node that is no reduction gives the value of the one sample there is."""
        return self.rows == 1 and bool(shape_of(node, 0)) and not is_constant(node)

    def one_value(self, path: Path) -> None:
        """Note the value of the one sample there is; it may be divided by its weight."""
        divisors = [part for part in _tensors(part for part in path if isinstance(part, _Factor)) if part.divides]
        self.found.counts.append(reduce(mul, [_number(part.value.abs()) for part in divisors], 1))
        self.found.by_tensor = self.found.by_tensor or bool(divisors)

    def unread(self, node: Node, path: Path) -> None:
        if self.is_one_value(node):
            self.one_value(path)
        elif self.found.unread is None and not is_constant(node):
            self.found.unread = str(node.name())

    # -- reductions --------------------------------------------------------------------------------------------------

    def reduced(self, node: Node, path: Path, shape: tuple[int, ...], *, mean: bool) -> None:
        """Pass a sum or mean over some dimensions, or all, of what the node's first child gives."""
        dims = dims_of(node)
        edge = next(pair for pair in node.next_functions if pair[0] is not None)
        over = set(range(len(shape))) if dims is None else {dim % len(shape) for dim in dims}
        count = prod(shape[dim] for dim in over)
        over_samples = len(over) == len(shape)
        if not over_samples:
            dim, sure = dim_of_samples(edge, self.rows, over=frozenset(over))
            over_samples = dim in over
            self.found.unsure = self.found.unsure or not sure
        step = _Reduction(node, count if mean else None, shape, over_samples)
        self.follow(edge, (*path, step))

    def single_losses(self, node: Node, children: Sequence[tuple[Node, int]], path: Path) -> bool:
        """Return whether a node joins single numbers: each a loss of the whole micro-batch, or each of one sample."""
        if any(child is not None and not is_single(child, output) for child, output in children):
            return False
        last = next((part for part in reversed(path) if isinstance(part, _Reduction)), None)
        if last is None or not last.over_samples:
            return False
        kept = tuple(part for part in path if part is not last)
        given = [child for child, _ in children if child is not None]
        if len(given) == len(children) == self.rows and self.one_of_each_sample(given):
            self.end(last.node, (*kept, replace(last, shape=(self.rows,), count=last.count and self.rows)))
        else:  # how many losses there are is the script's own number
            self.below(node, kept)
        return True

    def one_of_each_sample(self, terms: Sequence[Node]) -> bool:
        """Return whether there is one loss for each sample.

        They may also be that many losses of the whole micro-batch (views, chunks, tasks): the graph shows it where they
        meet or are of unlike kinds, and it is taken for granted where their layers give equally many rows.
        """
        reach = [reach_of(term, self.rows) for term in terms]
        if any(one.whole for one in reach) and (any_meet(reach) or len({one.kind for one in reach}) > 1):
            return False
        if all(one.selects or (one.single and self.rows > 1) for one in reach):
            return True
        self.found.unsure = True
        if all(one.whole and one.extent == reach[0].extent for one in reach):
            self.found.otherwise = self.rows
            return False
        return True

    def are_picked(self, terms: Sequence[Node]) -> bool:
        """Return whether these are losses of single samples, one for each sample of the micro-batch."""
        return len(terms) == self.rows and all(reach_of(term, self.rows).selects for term in terms)


# -- nodes ------------------------------------------------------------------------------------------------------------


def _linear(reader: _Reader, node: Node, output: int, path: Path) -> None:
    reader.below(node, path)


def _add(reader: _Reader, node: Node, output: int, path: Path) -> None:
    """Read a sum of terms, which may be one of each sample: ``sum(losses) / len(x)``."""
    plain = [part for part in path if isinstance(part, _Factor) and is_plain(part.value)]
    if reader.rows in map(_divisor, plain) and not shape_of(node, output) and not _is_reduced(path):
        terms, numbers = added_terms(node)
        if len(terms) == reader.rows and (len(terms) > 1 or numbers) and reader.one_of_each_sample(terms):
            reader.found.counts.append(reader.rows)
            return
    elif (
        not path
        and reader.rows > 1
        and number_of_terms(node, reader.terms_of) == reader.rows
        and reader.are_picked(added_terms(node)[0])
    ):
        reader.found.sum_over = ""
        return
    reader.below(node, path)


def _leaf(reader: _Reader, node: Node, output: int, path: Path) -> None:
    if _is_reduced(path):
        reader.end(node, path)
    elif not isinstance(node.variable, torch.nn.Parameter):
        reader.found.unread = reader.found.unread or "a loss that is data itself"


def _times(reader: _Reader, node: Node, output: int, path: Path) -> None:
    """Read a product: with a value of the script, or of terms of which one is of parameters alone."""
    children = list(node.next_functions)
    if len(children) == 1:  # with a number
        reader.follow(children[0], (*path, _Factor(node._saved_other, False)))
    elif children[0][0] is None or children[1][0] is None:
        value = node._saved_other if children[1][0] is None else node._saved_self
        pair = children[0] if children[1][0] is None else children[1]
        reader.follow(pair, (*path, _Factor(value, False)))
    else:
        _product(reader, node, children, path)


def _over(reader: _Reader, node: Node, output: int, path: Path) -> None:
    children = list(node.next_functions)
    if len(children) == 1 or children[1][0] is None:
        reader.follow(children[0], (*path, _Factor(node._saved_other, True)))
    elif children[0][0] is None:
        _bends(reader, node, output, path)
    else:
        _product(reader, node, children, path, divides=True)


def _product(reader: _Reader, node: Node, children: list[Any], path: Path, *, divides: bool = False) -> None:
    constant = [is_constant(child) for child, _ in children]
    if constant[1]:
        reader.follow(children[0], path)
    elif constant[0] and not divides:
        reader.follow(children[1], path)
    elif _is_reduced(path):
        reader.end(node, path)
    else:
        reader.found.bends = reader.found.bends or str(node.name())


def _bends(reader: _Reader, node: Node, output: int, path: Path, *, chooses: bool = False) -> None:
    """Read a function that is no multiple, or that chooses one: of samples, below a reduction; else of a mean."""
    if _is_reduced(path):
        reader.end(node, path)
    elif reader.is_one_value(node):
        reader.one_value(path)
    elif not is_constant(node):
        reader.found.bends = reader.found.bends or str(node.name())
        if not chooses:
            reader.below(node, path)


_NORMS = {"LinalgVectorNorm": "ord", "Dist": "p"}
"""Norms, and what their exponent is called."""


def _power(reader: _Reader, node: Node, output: int, path: Path) -> None:
    """Read a power: the square of a norm of the whole is a sum of squares."""
    child = next((child for child, _ in node.next_functions if child is not None), None)
    name = _NORMS.get(stem_of(child.__class__)) if child is not None and not _is_reduced(path) else None
    if name and _saved_number(child, name) == _saved_number(node, "exponent") and not shape_of(child, 0):
        shape = shape_below(child)
        reader.end(child, (*path, _Reduction(child, None, shape)))
    else:
        _bends(reader, node, output, path)


def _saved_number(node: Node, name: str) -> float | None:
    value = getattr(node, f"_saved_{name}", None)
    return float(value) if isinstance(value, (int, float)) else None


def _joined(reader: _Reader, node: Node, output: int, path: Path) -> None:
    if not reader.single_losses(node, node.next_functions, path):
        reader.below(node, path)


def _reduction(reader: _Reader, node: Node, output: int, path: Path, *, mean: bool) -> None:
    shape = tuple(node._saved_self_sym_sizes)
    if not shape:
        reader.below(node, path)
    elif reader.several and is_constant(node):
        reader.penalty(path)
    else:
        reader.reduced(node, path, shape, mean=mean)


def _some_sum(reader: _Reader, node: Node, output: int, path: Path) -> None:
    reader.end(node, (*path, _Reduction(node, None, None)))


def _matrix_product(reader: _Reader, node: Node, output: int, path: Path) -> None:
    """Read a sum over one dimension of one factor, where the other is the script's or of parameters alone."""
    pairs = list(node.next_functions)
    constant = [child is None or is_constant(child) for child, _ in pairs]
    if all(constant) or not any(constant):  # a layer, or a product of samples
        if not shape_of(node, output) or not _is_reduced(path):
            _some_sum(reader, node, output, path)
        else:
            reader.end(node, path)
        return
    number = constant.index(False)
    edge = pairs[number]
    shape = shape_of(*edge)
    contracted = len(shape) - 1 if number == 0 or len(shape) == 1 else len(shape) - 2
    over_samples, sure = True, True
    if len(shape) > 1 and prod(shape) != shape[contracted]:
        dim, sure = dim_of_samples(edge, reader.rows)
        over_samples = dim == contracted
    reader.found.unsure = reader.found.unsure or not sure
    reader.follow(edge, (*path, _Reduction(node, None, shape, over_samples)))


def _class_loss(reader: _Reader, node: Node, output: int, path: Path) -> None:
    """Read the loss of class numbers: the mean is over the weights of their classes, without those that are ignored."""
    shape = shape_below(node)
    shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    if node._saved_reduction != 0:
        reader.class_weights.append(_number(node._saved_total_weight))
    _reduced(reader, node, shape, node._saved_total_weight, path)


def _elementwise_loss(reader: _Reader, node: Node, output: int, path: Path) -> None:
    shape = shape_below(node)
    _reduced(reader, node, shape, prod(shape), path)


def _row_loss(reader: _Reader, node: Node, output: int, path: Path) -> None:
    shape = shape_below(node)
    _reduced(reader, node, shape[:1], shape[0] if len(shape) > 1 else 1, path)


def _reduced(reader: _Reader, node: Node, shape: tuple[int, ...], count: Any, path: Path) -> None:
    """Read a loss function, which reduces everything or (reduction="none") nothing."""
    if node._saved_reduction == 0:
        _unread(reader, node, 0, path)
        return
    step = _Reduction(node, count if node._saved_reduction == 1 else None, shape)
    child = next(child for child, _ in node.next_functions if child is not None)
    reader.end(child, (*path, step))


def _unread(reader: _Reader, node: Node, output: int, path: Path) -> None:
    if _is_reduced(path):
        reader.end(node, path)
    else:
        reader.unread(node, path)


_PICKING = "Select Slice Transpose Unbind"
_CHOOSING = "Max Min Amax Amin Maximum Minimum Median Kthvalue Logsumexp Quantile"
_ELEMENTWISE = "MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss"
_KINDS: dict[str, Handler] = {
    **dict.fromkeys((LINEAR + " " + _PICKING).split(), _linear),
    **dict.fromkeys(BENDING.split(), _bends),
    "Pow": _power,
    **dict.fromkeys(_CHOOSING.split(), partial(_bends, chooses=True)),
    "Add": _add,
    "Mul": _times,
    "Div": _over,
    "Mean": partial(_reduction, mean=True),
    "Sum": partial(_reduction, mean=False),
    **dict.fromkeys(("Stack", "Cat"), _joined),
    **dict.fromkeys(("Dot", "Bmm", "Mm", "Mv"), _matrix_product),
    "Nansum": _some_sum,
    **dict.fromkeys(("NllLoss", "NllLoss2D"), _class_loss),
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise_loss),
    **dict.fromkeys(("MultiMarginLoss", "MultilabelMarginLoss"), _row_loss),
}


@cache
def _handler(kind: Any) -> Handler:
    """Return what reads a node of this kind."""
    return _leaf if kind.__name__ == "AccumulateGrad" else _KINDS.get(stem_of(kind), _unread)


def _values_summed(last: _Reduction) -> Any:
    """Return how many values of a sum are not masked: a number, or a tensor."""
    several = prod(last.shape) if last.shape else 2
    child = next((child for child, _ in last.node.next_functions if child is not None), None)
    while child is not None and stem_of(child.__class__) in ("Mul", "Div", "Where", "Neg", "View", "ToCopy"):
        stem = stem_of(child.__class__)
        mask = None
        if stem == "Where":
            mask = child._saved_condition
        elif stem == "Mul" and len(child.next_functions) == 2 and None in [pair[0] for pair in child.next_functions]:
            mask = child._saved_other if child.next_functions[1][0] is None else child._saved_self
        if mask is not None and not is_plain(mask) and tuple(mask.shape) == tuple(last.shape or ()):
            return torch.count_nonzero(mask)
        child = next((below for below, _ in child.next_functions if below is not None), None)
    return several


# -- numbers -----------------------------------------------------------------------------------------------------------


def _tensors(factors: Iterable[_Factor]) -> list[_Factor]:
    """Return those that are one number in a tensor, not one of each sample."""
    return [part for part in factors if not is_plain(part.value) and part.value.dim() == 0]


def _weights(path: Path, last: _Reduction, node: Node) -> Weights:
    """Return what the values of a sum or mean are multiplied by, one number of each, and nodes with such numbers."""
    weights = list[torch.Tensor]()
    for part in path[path.index(last) + 1 :]:
        if isinstance(part, _Reduction):
            return weights, (last.node,)
        if not part.divides and not is_plain(part.value) and part.value.dim():
            weights.append(part.value)
    return weights, (last.node, node)


def _without_data(path: Path) -> bool:
    return all(is_plain(part.value) or part.value.dim() == 0 for part in path if isinstance(part, _Factor))


def _divisor(factor: _Factor) -> float:
    """Return what a number of the script divides by."""
    value = float(factor.value)
    return value if factor.divides else 1 / value if value else float("inf")


def _number(count: Any) -> Any:
    """Return a number, unless looking at it would make a device wait."""
    if not isinstance(count, torch.Tensor):
        return count
    return float(count.item()) if count.is_cpu else count.detach().reshape(())
