"""Whether a loss, or a model, couples the samples of a batch.

A loss does that is contrastive, or one of a batch's largest losses, or a root of a mean. Such a loss of a whole batch
is no sum over its samples, so a step depends on how they are dealt, as with DDP. Seen from one graph: with z what the
last layers give, one row or several per sample, and L = sum_i l(z_i) / d, the derivatives ``d2 L / dz_i dz_j`` between
two halves of the samples are all zero. They are taken through the loss alone and not through the model, at the first
micro-batch of a loop whose graph has a shape that was not looked at before. Choosing the largest of a batch, and
differences of pairs under a hinge, have no such derivative, and are found by the shape of the graph.

Several rows per sample lie sample by sample, or (a recurrence, two views put together) round by round, outputs of
unlike shapes in unlike orders: a loss couples samples only where it does so in all of them. Rows that were picked (the
tokens of one cluster) have no such order: what they were picked from is looked at instead.

Below its last layer a model mixes samples by a mean over the batch taken by hand, or an LSTM that runs along the
samples because ``batch_first`` was forgotten (`mixing`). With h the first tensors of the model's graph that have one
row per sample and z its last layers' outputs, the derivative of z of the second half of the samples by h of the first
half is zero where no sample reads another. One backward from z to h shows it, which runs no forward, draws no random
numbers and adds to no gradient. (The second half, as a recurrence along the samples reads only those before.)

Batch norm is known to mix samples: graphs with it are passed over, as are those with functions of the user's own, which
may not be gone through twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from paceline.step.losses.graph_nodes import (
    LAYERS,
    Edge,
    Node,
    dims_of,
    is_constant,
    number_of_kinds,
    shape_below,
    shape_of,
    stem_of,
)

if TYPE_CHECKING:
    from paceline.step.context import LoopContext

CHOOSING = frozenset(("Topk", "Sort", "Kthvalue", "Median", "Cummax", "Max", "Min", "Amax", "Amin"))
PAIRING = frozenset(("Sub", "Add", "Mul", "Div", "Maximum", "Minimum"))
PICKING = frozenset(("Index", "IndexSelect", "MaskedSelect", "Slice", "Split", "SplitWithSizes"))
DISTANCES = frozenset(("Cdist", "EuclideanDist"))
"""Distances between all rows of one tensor and all of another, which have no second derivative."""
SPREADING = frozenset(("MseLoss", "SmoothL1Loss", "HuberLoss"))
"""Loss functions that take a target of another shape, and put every output beside every target."""
MOST_NODES, MOST_NUMBERS = 400, 1 << 20
"""A loss with more operations, or with more numbers in z, is not looked at."""
MOST_STEPS = 8
"""Operations on a tensor that are followed down to where its samples were picked."""
MOST_ORDERS = 4
"""Shapes of outputs with several rows per sample that may each have an order of its own; beyond, all have one."""
MOST_LOOKS = 8
"""Shapes of a loop's losses that are looked at."""
LEAST = 1e-6
"""The least derivative between halves that counts as some, of those within a half."""
CERTAIN = float("inf")
"""Stands for a coupling that the shape of the graph shows."""


COUPLED = (
    "the loss couples the samples of a micro-batch (a contrastive loss, pairs of samples, the largest losses of a "
    "batch, a statistic over it), so the step depends on how samples are dealt, as with DDP: it is not that of one "
    "process with the whole batch"
)


def is_to_be_looked_at(loop: LoopContext, loss: torch.Tensor, rows: int) -> bool:
    """Return whether a loss's graph has a new shape, which is looked at once."""
    script = loop.script
    if rows < 2 or loop.transport.shards > 1 or loss.grad_fn is None or len(script.looked_at) >= MOST_LOOKS:
        return False
    known = len(script.looked_at)
    script.looked_at.add(number_of_kinds(loss.grad_fn))
    return len(script.looked_at) > known


def ignore_graph_of(loop: LoopContext, loss: torch.Tensor) -> None:
    """Skip graphs of this shape from now on: another warning was logged about them."""
    if loss.grad_fn is not None:
        loop.script.looked_at.add(number_of_kinds(loss.grad_fn))


def coupling(loss: torch.Tensor, rows: int, *, numbered: bool = False) -> Any:
    """Return by how much the two halves of a micro-batch are coupled.

    It is 0 where they are not, where the graph does not show it, or where the search would take too long. On CUDA it is
    a tensor, without synchronising. ``numbered``: each sample is a number, such as that of a node in a graph.
    """
    found = outputs_of(loss.grad_fn, rows, numbered=numbered) if rows > 1 and loss.grad_fn is not None else None
    if found is None:
        return 0.0
    edges, certain = found
    if certain or not edges:
        return CERTAIN if certain else 0.0
    try:
        return torch.stack([_between_halves(loss, edges, rows, turns=turns) for turns in _orders(edges, rows)]).amin()
    except RuntimeError:  # an operation without a second derivative, or too little memory
        return 0.0


def _orders(edges: list[Edge], rows: int) -> list[list[bool]]:
    """Return the orders that rows may have: of each output, whether several rows of a sample lie round by round."""
    shapes = [shape_of(*edge) for edge in edges]
    several = sorted({shape for shape in shapes if shape[0] != rows})
    together = len(several) > MOST_ORDERS
    found = []
    for turns in product((False, True), repeat=1 if together else len(several)):
        of_shape = dict.fromkeys(several, turns[0]) if together else dict(zip(several, turns, strict=True))
        found.append([of_shape.get(shape, False) for shape in shapes])
    return found


def _between_halves(loss: torch.Tensor, edges: list[Edge], rows: int, *, turns: list[bool]) -> torch.Tensor:
    """``turns``: of each edge, whether several rows of a sample lie round by round."""
    ends = [GradientEdge(*edge) for edge in edges]
    first = torch.autograd.grad(loss, ends, create_graph=True, allow_unused=True)
    probes = []
    for part, turn in zip(first, turns, strict=True):
        if part is not None:
            own, _ = _halves(part, rows, turns=turn)
            probes.append((own * signs(own)).sum())
    probe = torch.stack([one.to(loss.dtype) for one in probes]).sum()
    nothing = torch.zeros((), dtype=loss.dtype, device=loss.device)
    if not probe.requires_grad:
        return nothing
    second = torch.autograd.grad(probe, ends, retain_graph=True, allow_unused=True)
    halves = [_halves(part, rows, turns=turn) for part, turn in zip(second, turns, strict=True) if part is not None]
    if not halves:
        return nothing
    own = torch.stack([one.abs().amax().to(loss.dtype) for one, _ in halves]).amax().detach()
    other = torch.stack([one.abs().amax().to(loss.dtype) for _, one in halves]).amax().detach()
    return other / (own + torch.finfo(loss.dtype).tiny)


def _halves(rows_of: torch.Tensor, rows: int, *, turns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the first half of the samples, and those of the others."""
    rounds = rows_of.shape[0] // rows
    shape = (rounds, rows) if turns else (rows, rounds)
    split = rows_of.reshape(*shape, *rows_of.shape[1:])
    split = split.transpose(0, 1) if turns else split
    return split[: rows // 2], split[rows // 2 :]


def signs(like: torch.Tensor) -> torch.Tensor:
    """Plus and minus one by turns of unequal length, so that nothing cancels; drawn from no generator of the user's."""
    steps = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    return (steps * steps % 7 < 3).to(like.dtype) * 2 - 1


def are_numbers(batch: Any) -> bool:
    """Return whether all that a micro-batch has is one whole number per sample, or several.

    >>> are_numbers([torch.arange(3), torch.ones(3, dtype=torch.bool)]), are_numbers(torch.zeros(3)), are_numbers([])
    (True, False, False)
    """
    if isinstance(batch, torch.Tensor):
        return batch.dim() == 1 and not batch.is_floating_point() and not batch.is_complex()
    parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    return bool(parts) and all(map(are_numbers, parts))


def outputs_of(root: Node, rows: int, *, numbered: bool = False) -> tuple[list[Edge], bool] | None:
    """Return what the layers nearest to the loss give, and whether its graph's shape shows a coupling.

    Where samples are ``numbered``, what is picked by their numbers is taken for a layer's: the rows of the whole table
    (all nodes of a graph) are no samples, though they may be a multiple of them.

    None: it is too large, or a function of the user's own, which may not be gone through twice.
    """
    todo, seen, numbers = deque([(root, 0)]), {root}, 0
    edges: dict[Edge, None] = {}
    while todo:
        node, output = todo.popleft()
        stem, shape = stem_of(node.__class__), shape_of(node, output)
        by_rows = len(shape) > 0 and shape[0] >= 2 and shape[0] % rows == 0
        if node.__class__.__name__ == "AccumulateGrad":
            if by_rows and not isinstance(node.variable, torch.nn.Parameter):
                edges[node, output] = None
            continue
        if not stem and not by_rows:
            return None
        if is_constant(node):  # a penalty on weights
            continue
        if (
            (stem in CHOOSING and _over_rows(node, rows))
            or (stem in PAIRING and _pairs_rows(node, shape, rows))
            or (stem in DISTANCES and _is_between_rows(node, rows))
            or (stem in ("Pow", "Abs") and _is_outer(node, rows))
            or (stem in SPREADING and _is_spread(node, rows))
            or (stem == "NllLoss" and _has_negatives(node, rows))
            or (not numbered and stem in ("Index", "IndexSelect") and _is_ranked(node, stem, rows))
        ):
            return [], True
        picked = numbered and stem in ("Index", "IndexSelect") and shape[0] == rows != shape_below(node)[0]
        layer = stem == "" or ((stem in LAYERS or _of_parameters(node)) and not _is_of_picked(node, output))
        turned = [child for child, _ in node.next_functions if child is not None and _is_reordering(child, rows)]
        if by_rows and (picked or layer or turned):
            edges[node, output] = None
            numbers += torch.Size(shape).numel()
            continue
        if len(seen) > MOST_NODES or numbers > MOST_NUMBERS:
            return None
        for child, number in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append((child, number))
    return list(edges), False


def _over_rows(node: Node, rows: int) -> bool:
    """Return whether a node chooses among samples."""
    edge = next((pair for pair in node.next_functions if pair[0] is not None), None)
    shape = shape_of(*edge) if edge is not None else ()
    dims = dims_of(node)
    over = dims is None or any(dim % max(1, len(shape)) == 0 for dim in dims)
    return over and bool(shape) and shape[0] >= 2 and shape[0] % rows == 0


def _is_ranked(node: Node, stem: str, rows: int) -> bool:
    """Return whether some samples are picked, and not in the order they have: by rank among the others, or at random.

    What a mask picks keeps its order. On a device indices are not looked at.
    """
    if shape_below(node)[:1] != (rows,) or (stem == "Index" and len(node._saved_indices) > 1):
        return False
    index = _first_index(node, stem)
    if index is None or not index.is_cpu or index.dtype is torch.bool or index.dim() != 1 or len(index) >= rows:
        return False
    return bool((index[1:] < index[:-1]).any()) and not is_constant(node)


def _pairs_rows(node: Node, shape: tuple[int, ...], rows: int) -> bool:
    """Return whether a node puts every sample beside every other, or each beside its neighbour."""
    pairs = node.next_functions
    if len(pairs) != 2 or pairs[0][0] is None or pairs[1][0] is None:
        return _meets_all_values(node, shape, rows)
    sizes = [_picked(pair, rows) or rows for pair in pairs]
    if max(sizes) > 1 and _is_crossed(shape_of(*pairs[0]), shape_of(*pairs[1]), shape, sizes):
        return not is_constant(pairs[0][0]) and not is_constant(pairs[1][0])
    one, other = (_start_of_rows(pair, rows) for pair in pairs)
    return one is not None and other is not None and one != other


def _meets_all_values(node: Node, shape: tuple[int, ...], rows: int) -> bool:
    """Return whether every sample meets every sample's value of the data: (B, 1) and (B) make B times B products."""
    if rows < 3 or shape != (rows, rows) or stem_of(node.__class__) not in ("Mul", "Div") or is_constant(node):
        return False
    first = node.next_functions[0][0] is not None
    other = getattr(node, "_saved_other" if first else "_saved_self", None)
    if not isinstance(other, torch.Tensor):
        return False
    one, two, column, row = shape_below(node), tuple(other.shape), (rows, 1), ((rows,), (1, rows))
    return (one == column and two in row) or (one in row and two == column)


def _is_outer(node: Node, rows: int) -> bool:
    """Return whether a value that a node holds is one number of each sample beside one of each, added: on a CPU."""
    child = next((child for child, _ in node.next_functions if child is not None), None)
    if rows < 3 or child is None or stem_of(child.__class__) not in ("Sub", "Rsub", "Add"):
        return False
    if shape_of(child, 0) != (rows, rows) or _shape_before_spread(child) not in ((rows, 1), (1, rows), (rows,)):
        return False
    held = node._saved_self
    if not held.is_cpu:
        return False
    apart = (held[1:] - held[:1]).detach()
    return bool(torch.allclose(apart, apart[:, :1].expand_as(apart)))


def _shape_before_spread(node: Node) -> tuple[int, ...]:
    """Return the shape of what a node is given, before it was expanded."""
    below = next(child for child, _ in node.next_functions if child is not None)
    return shape_below(below if stem_of(below.__class__) == "Expand" else node)


def _is_spread(node: Node, rows: int) -> bool:
    """Return whether outputs of shape (B, 1) meet targets of shape (B), or the reverse: B times B differences."""
    if rows < 2 or shape_below(node) != (rows, rows):
        return False
    target, before = node._saved_target, _shape_before_spread(node)
    along = {(rows, 1): 0, (rows,): 1, (1, rows): 1}.get(before)
    return along is not None and target.dim() == 2 and target.stride(along) == 0 != target.stride(1 - along)


LEAST_NEGATIVES = 4
"""Samples from which labels that number the samples are no chance."""


def _has_negatives(node: Node, rows: int) -> bool:
    """Return whether the classes are the micro-batch's samples, each its own label: negatives from the batch.

    Where they are of a frozen network, no derivative shows it. On a device labels are not looked at.
    """
    if rows < LEAST_NEGATIVES or shape_below(node) != (rows, rows):
        return False
    target = node._saved_target
    return target.is_cpu and torch.equal(target, torch.arange(rows)) and not _is_of_a_layer(node)


def _is_of_a_layer(node: Node) -> bool:
    """Return whether the scores that a node is given are a layer's, whose classes are rows of its parameters.

    Then it is chance that the labels number the samples, as in a micro-batch of one sample of each class.
    """
    for _ in range(MOST_STEPS):
        children = [child for child, _ in node.next_functions if child is not None]
        if stem_of(node.__class__) in ("Addmm", "Linear", "Mm"):
            return any(map(is_constant, children))
        of_data = [child for child in children if not is_constant(child)]
        if len(of_data) != 1:
            return False
        node = of_data[0]
    return False


def _is_between_rows(node: Node, rows: int) -> bool:
    """Return whether distances are between samples, and not between samples and what is the same for all of them."""
    children = [child for child, _ in node.next_functions if child is not None]
    shape = shape_of(node, 0)
    return (
        len(children) == 2 and shape[-1] % rows == 0 and shape[-2] % rows == 0 and not any(map(is_constant, children))
    )


def _is_crossed(one: tuple[int, ...], other: tuple[int, ...], both: tuple[int, ...], samples: Sequence[int]) -> bool:
    """Return whether two shapes have their ``samples`` in unlike dimensions of what they are broadcast to."""
    one, other = ((1,) * (len(both) - len(shape)) + shape for shape in (one, other))
    first = {dim for dim, size in enumerate(one) if size == samples[0] and other[dim] == 1}
    second = {dim for dim, size in enumerate(other) if size == samples[1] and one[dim] == 1}
    return bool(first and second and len(first | second) > 1)


def _picked(edge: Edge, rows: int) -> int:
    """Return how many samples a tensor has that were picked from all of them (``score[label == 1]``); 0: not so."""
    node, output = edge
    for _ in range(MOST_STEPS):
        pairs = [pair for pair in node.next_functions if pair[0] is not None]
        if not pairs:
            break
        shape, below = shape_of(node, output), shape_of(*pairs[0])
        if stem_of(node.__class__) in PICKING and below and below[0] % rows == 0 and shape and shape[0] < below[0]:
            return shape[0]
        if len(pairs) > 1 or torch.Size(shape).numel() != torch.Size(below).numel():
            break
        node, output = pairs[0]
    return 0


def _is_of_picked(node: Node, output: int) -> bool:
    """Return whether a layer is given rows that were picked from more or fewer ones of the data."""
    length = shape_of(node, output)[0]
    for _ in range(MOST_STEPS):
        stem = stem_of(node.__class__)
        given = node.next_functions[1 if stem == "Addmm" else 0 :]
        below = next((pair for pair in given if pair[0] is not None), None)
        if below is None or not shape_of(*below):
            return False
        if shape_of(*below)[0] != length:
            return stem in ("Index", "IndexSelect", "MaskedSelect") and not is_constant(below[0])
        node = below[0]
    return False


def _start_of_rows(edge: Edge, rows: int) -> Any:
    """Return which samples a tensor begins with, or how they were moved; None where it has none."""
    node, output = edge
    for _ in range(4):
        stem = stem_of(node.__class__)
        if stem in ("Roll", "Flip") and shape_of(node, output)[0] == rows:
            moved = node._saved_dims
            return (stem, node._saved_shifts if stem == "Roll" else ()) if 0 in moved or not moved else 0
        if stem == "Slice" and node._saved_dim == 0 and node._saved_self_sym_sizes[0] == rows:
            return node._saved_start
        if stem in ("Index", "IndexSelect") and shape_of(node, output)[:1] == shape_below(node)[:1] == (rows,):
            table = next(child for child, _ in node.next_functions if child is not None)
            index = None if is_constant(table) else _first_index(node, stem)
            return (stem, id(index)) if _is_moved(index, rows) else 0
        if stem not in ("Select", "View", "Unsqueeze", "Squeeze", "Slice", "Neg", "Mul"):
            break
        node, output = next(pair for pair in node.next_functions if pair[0] is not None)
    return 0 if shape_of(node, output)[:1] == (rows,) else None


def _is_reordering(node: Node, rows: int) -> bool:
    """Return whether a node puts all samples in another order, along whichever dimension they lie.

    On a device indices are not looked at, and may do so.
    """
    stem = stem_of(node.__class__)
    if stem not in ("Index", "IndexSelect"):
        return False
    single = stem == "IndexSelect"
    indices = {(dims_of(node) or (0,))[0]: node._saved_index} if single else dict(enumerate(node._saved_indices))
    shape = shape_below(node)
    return any(
        tuple(index.shape) == (rows,) == shape[dim:][:1] and not _is_in_order(index)
        for dim, index in indices.items()
        if index is not None and index.dtype is not torch.bool
    )


def _is_in_order(index: torch.Tensor) -> bool:
    return index.is_cpu and torch.equal(index, torch.arange(len(index), dtype=index.dtype))


def _first_index(node: Node, stem: str) -> torch.Tensor | None:
    if stem == "IndexSelect":
        return node._saved_index if node._saved_dim == 0 else None
    return node._saved_indices[0]  # type: ignore[no-any-return]


def _is_moved(index: torch.Tensor | None, rows: int) -> bool:
    """Return whether samples are picked in another order than they have; on a device that is not looked at."""
    if index is None or not index.is_cpu or index.dtype is torch.bool or index.shape != (rows,):
        return False
    return not _is_in_order(index)


def _of_parameters(node: Node) -> bool:
    """Return whether a node is a product with a matrix of parameters: a layer without a bias."""
    children = [child for child, _ in node.next_functions if child is not None]
    return stem_of(node.__class__) == "Mm" and any(map(is_constant, children))


MOST_NODES = 10_000
"""A model with more operations is not looked at."""
MOST_FIRST = 16
"""First tensors that are looked at."""
_INPUTS = {"Addmm": slice(1, 2), "Linear": slice(0, 1), "Convolution": slice(0, 1)}
"""What a layer is given besides its weight and bias, which are of parameters, however they are made."""
REORDERING = frozenset(("Index", "IndexSelect", "Gather"))
"""Operations by which samples may lie in another order."""
RECURRENT = frozenset(("CudnnRnn", "MiopenRnn", "MkldnnRnnLayer"))

MIXED_INSIDE = (
    "the model mixes the samples of a micro-batch: what it gives for one depends on others (a mean or deviation over "
    "the batch taken by hand, an nn.LSTM or nn.Transformer without batch_first=True), so the step depends on how "
    "samples are dealt and is not that of one process: write batch_first=True, or a norm of each sample (nn.LayerNorm)"
)


def mixing(loss: torch.Tensor, rows: int) -> Any:
    """Return by how much the model below a loss mixes samples, 0 where it does not or it does not show.

    On CUDA it is a tensor, without synchronising.
    """
    outputs = outputs_of(loss.grad_fn, rows) if rows > 1 and loss.grad_fn is not None else None
    last = [edge for edge in outputs[0] if _is_by_sample(shape_of(*edge), rows)] if outputs else []
    graph = _graph_of(last)
    if not graph:
        return 0.0
    if any(_is_along_samples(edge, rows) for edge in graph):
        return CERTAIN
    if any(_is_ambiguous(shape_of(*edge), rows) for edge in graph):
        return 0.0
    first = [edge for edge in _first_by_sample(graph, rows) if edge not in last]
    if not first:
        return 0.0
    ordered = not any(_reorders(edge, rows) for edge in graph)
    began = rows // 2 if ordered else rows - 1  # of samples in another order one alone shows which rows it reads
    try:
        found = torch.autograd.grad(
            [GradientEdge(*edge) for edge in last],
            [GradientEdge(*edge) for edge in first],
            grad_outputs=[_samples_from(edge, began) for edge in last],
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError:  # a checkpoint that allows no such backward, or too little memory
        return 0.0
    reached = [part.flatten(1).abs().amax(1).to(loss.dtype) for part in found if part is not None]
    if not reached:
        return 0.0
    if not ordered:
        reached = [rows_of.sort().values for rows_of in reached]
    other = torch.stack([rows_of[:began].amax() for rows_of in reached]).amax()
    own = torch.stack([rows_of[began:].amax() for rows_of in reached]).amax()
    return other / (own + torch.finfo(own.dtype).tiny)


def _is_ambiguous(shape: tuple[int, ...], rows: int) -> bool:
    """Return whether both the samples and, for example, the tokens of each may be the first dimension."""
    return len(shape) > 2 and shape[0] == rows and rows in shape[1:-1]


def _is_by_sample(shape: tuple[int, ...], rows: int) -> bool:
    """Return whether a tensor has one row per sample, and no other dimension that may be the samples."""
    return shape[:1] == (rows,) and rows not in shape[1:] and 0 not in shape


def _graph_of(last: list[Edge]) -> dict[Edge, list[Edge]] | None:
    """Return what each tensor of the model is made of; None where its graph is not to be gone through."""
    children: dict[Edge, list[Edge]] = {}
    todo = list(last)
    while todo:
        node, _ = edge = todo.pop()
        if edge in children:
            continue
        children[edge] = []
        if _is_leaf(node):
            continue
        stem = stem_of(node.__class__)
        if not stem or "BatchNorm" in stem or len(children) > MOST_NODES:
            return None
        given = node.next_functions[_INPUTS.get(stem, slice(None))]
        children[edge] = [(child, number) for child, number in given if child is not None]
        todo += children[edge]
    return children


def _first_by_sample(children: dict[Edge, list[Edge]], rows: int) -> list[Edge]:
    """Return the tensors with a row per sample that are made of no other such."""
    by_sample = (edge for edge in children if _is_by_sample(shape_of(*edge), rows))
    found = [edge for edge in by_sample if not _is_leaf(edge[0]) and not is_constant(edge[0])]
    parents: dict[Edge, list[Edge]] = {}
    for edge, below in children.items():
        for child in below:
            parents.setdefault(child, []).append(edge)
    above = {edge for one in found for edge in parents.get(one, ())}
    todo = list(above)
    while todo:
        new = set(parents.get(todo.pop(), ())) - above
        above |= new
        todo += new
    return [edge for edge in found if edge not in above][:MOST_FIRST]


def _is_leaf(node: Node) -> bool:
    return bool(node.__class__.__name__ == "AccumulateGrad")


def _is_along_samples(edge: Edge, rows: int) -> bool:
    """Return whether a recurrence, whose steps are the first dimension of what it gives, goes along the samples."""
    shape = shape_of(*edge)
    return stem_of(edge[0].__class__) in RECURRENT and len(shape) == 3 and _is_by_sample(shape, rows)


def _reorders(edge: Edge, rows: int) -> bool:
    """Return whether a tensor is made of another by picking samples: packed sequences lie by their lengths."""
    stem, shape = stem_of(edge[0].__class__), shape_of(*edge)
    return stem in REORDERING and rows in shape


def _samples_from(edge: Edge, began: int) -> torch.Tensor:
    """Return ones of changing sign, so that nothing cancels, for the samples from ``began``; zeros for others."""
    meta = edge[0]._input_metadata[edge[1]]
    ones = signs(torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device))
    ones[:began] = 0
    return ones
