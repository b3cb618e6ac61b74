"""Whether a loss couples the samples of a batch (contrastive losses, the largest losses of a batch, a root of a mean).

Such a loss of a whole batch is no sum over its samples, so a step depends on how they are dealt, as with DDP. Seen from
one graph: with z what the last layers give, one row or several per sample, and L = sum_i l(z_i) / d, the derivatives
``d2 L / dz_i dz_j`` between two halves of the rows are all zero. They are taken once, at a loop's first micro-batch,
through the loss alone and not through the model. Choosing the largest of a batch has no such derivative, and is found
by its name.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from paceline.loop.loss_graph import is_constant, stem_of

if TYPE_CHECKING:
    from paceline.loop.context import LoopContext

_NORMS = ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm")
LAYERS = frozenset(("Addmm", "Linear", "Convolution", "Embedding", *_NORMS))
"""Operations of a model, at which the loss ends."""
CHOOSING = frozenset(("Topk", "Sort", "Kthvalue", "Median", "Cummax"))
MOST_NODES, MOST_NUMBERS = 400, 1 << 20
"""A loss with more operations, or with more numbers in z, is not looked at."""
LEAST = 1e-6
"""Of the derivatives within a half: those between halves that count as some."""


COUPLED = (
    "the loss couples the samples of a micro-batch (a contrastive loss, the largest losses of a batch, a statistic "
    "over it), so the step depends on how samples are dealt, as with DDP: it is not that of one process with the whole "
    "batch"
)


def look_for_coupling(loop: LoopContext, loss: torch.Tensor, rows: int) -> None:
    """Look once a loop, on the leader, at the first micro-batch of two samples or more."""
    if rows > 1 or loop.transport.rank:
        loop.looks_for_coupling = False
    if rows > 1 and not loop.transport.rank and loop.transport.shards == 1:
        loop.coupling = coupling(loss, rows)


def warn_of_coupling(loop: LoopContext) -> None:
    """After the round, which has waited for the device anyway."""
    found, loop.coupling = loop.coupling, 0.0
    if (isinstance(found, torch.Tensor) or found) and float(found) > LEAST:
        loop.warn_once(COUPLED)


def coupling(loss: torch.Tensor, rows: int) -> Any:
    """By how much the two halves of a micro-batch are coupled: 0 where they are not, where that cannot be said, or
    where looking would be too much. On CUDA a tensor, without synchronising."""
    found = _outputs(loss.grad_fn, rows) if rows > 1 and loss.grad_fn is not None else None
    if found is None:
        return 0.0
    edges, chooses = found
    if chooses or not edges:
        return 1.0 if chooses else 0.0
    try:
        return _between_halves(loss, edges)
    except RuntimeError:  # an operation without a second derivative, or too little memory
        return 0.0


def _between_halves(loss: torch.Tensor, edges: list[GradientEdge]) -> Any:
    first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
    probes = [(part[: len(part) // 2] * _signs(part[: len(part) // 2])).sum() for part in first if part is not None]
    probe = torch.stack([one.to(loss.dtype) for one in probes]).sum()
    if not probe.requires_grad:
        return 0.0
    second = torch.autograd.grad(probe, edges, retain_graph=True, allow_unused=True)
    own = [part[: len(part) // 2].abs().amax() for part in second if part is not None]
    other = [part[len(part) // 2 :].abs().amax() for part in second if part is not None]
    if not own:
        return 0.0
    return torch.stack(other).amax().detach() / (torch.stack(own).amax().detach() + torch.finfo(loss.dtype).tiny)


def _signs(like: torch.Tensor) -> torch.Tensor:
    """Plus and minus one by turns of unequal length, so that nothing cancels; drawn from no generator of the user's."""
    steps = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    return (steps * steps % 7 < 3).to(like.dtype) * 2 - 1


def _outputs(root: Any, rows: int) -> tuple[list[GradientEdge], bool] | None:
    """What the layers nearest to the loss give, and whether the loss chooses among the rows. None: it is too large."""
    todo, seen, numbers = deque([(root, 0)]), {root}, 0
    edges: dict[tuple[Any, int], GradientEdge] = {}
    while todo:
        node, output = todo.popleft()
        stem, shape = stem_of(node.__class__), tuple(node._input_metadata[output].shape)
        by_rows = len(shape) > 0 and shape[0] >= 2 and shape[0] % rows == 0
        if not stem and not by_rows and node.__class__.__name__ != "AccumulateGrad":
            return None  # a function of the user's own, which may not be gone through twice
        if stem in CHOOSING and _over_rows(node, rows):
            return [], True
        if by_rows and (stem in LAYERS or stem == "" or _of_parameters(node)):
            edges[node, output] = GradientEdge(node, output)
            numbers += torch.Size(shape).numel()
            continue
        if len(seen) > MOST_NODES or numbers > MOST_NUMBERS:
            return None
        for child, number in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append((child, number))
    return list(edges.values()), False


def _over_rows(node: Any, rows: int) -> bool:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    dim = getattr(node, "_saved_dim", 0)
    if sizes is None:
        return False
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    return bool(sizes) and dim in (0, -len(sizes)) and sizes[0] >= 2 and sizes[0] % rows == 0


def _of_parameters(node: Any) -> bool:
    """A product with a matrix of parameters: a layer without a bias."""
    children = [child for child, _ in node.next_functions if child is not None]
    return stem_of(node.__class__) == "Mm" and any(map(is_constant, children))
