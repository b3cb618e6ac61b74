"""Whether a model mixes the samples of a batch below its last layer.

Such are a mean over the batch taken by hand, and an LSTM that runs along the samples because ``batch_first`` was
forgotten. With h the first tensors of the model's graph that have one row per sample and z its last layers' outputs,
the derivative of z of the second half of the samples by h of the first half is zero where no sample reads another. One
backward from z to h shows it, which runs no forward, draws no random numbers and adds to no gradient. (The second half,
as a recurrence along the samples reads only those before.)

Batch norm is known to mix samples: graphs with it are passed over, as are those with functions of the user's own, which
may not be gone through twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from paceline.step.losses.coupling import CERTAIN, outputs_of, signs
from paceline.step.losses.graph_nodes import Edge, Node, is_constant, shape_of, stem_of

MOST_NODES = 10_000
"""A model with more operations is not looked at."""
MOST_FIRST = 16
"""First tensors that are looked at."""
_INPUTS = {"Addmm": slice(1, 2), "Linear": slice(0, 1), "Convolution": slice(0, 1)}
"""What a layer is given besides its weight and bias, which are of parameters, however they are made."""
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
    ends = [GradientEdge(*edge) for edge in first]
    try:
        found = torch.autograd.grad(
            [GradientEdge(*edge) for edge in last],
            ends,
            grad_outputs=[_second_half(edge, rows) for edge in last],
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError:  # a checkpoint that allows no such backward, or too little memory
        return 0.0
    halves = [(part[: rows // 2], part[rows // 2 :]) for part in found if part is not None]
    if not halves:
        return 0.0
    other = torch.stack([one.abs().amax().to(loss.dtype) for one, _ in halves]).amax()
    own = torch.stack([one.abs().amax().to(loss.dtype) for _, one in halves]).amax()
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


def _second_half(edge: Edge, rows: int) -> torch.Tensor:
    """Return ones of changing sign, so that nothing cancels, for the second half of the samples; zeros for others."""
    meta = edge[0]._input_metadata[edge[1]]
    ones = signs(torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device))
    ones[: rows // 2] = 0
    return ones
