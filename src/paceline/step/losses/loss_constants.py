"""Values of the script that stand in a loss's graph and must be the same in every micro-batch of a step.

Such are an exponent, a bound, a margin, class weights, and a number by which all samples are multiplied before a
function that is no multiple (a temperature). One process uses one such value for the whole batch. Where it is made from
a micro-batch (class weights of its labels) or counts micro-batches (annealing by a counter), each micro-batch has its
own, and the step is another one. Factors of means are read with the mean itself (loss_graph.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch

from paceline.gradients.header import number_of
from paceline.step.losses.graph_nodes import (
    LAYERS,
    LINEAR,
    Node,
    is_constant,
    is_plain,
    placed_number,
    shape_of,
    stem_of,
)

MOST_NODES = 400
"""A loss with more operations is not looked at."""

_SETTINGS = {
    "Pow": ("exponent",),
    "Clamp": ("min", "max"),
    "ClampMin": ("min",),
    "ClampMax": ("max",),
    "HuberLoss": ("delta",),
    "SmoothL1Loss": ("beta",),
    "Softplus": ("beta", "threshold"),
    "LeakyRelu": ("negative_slope",),
    "Elu": ("alpha",),
    "Add": ("alpha",),
    "Sub": ("alpha",),
    "NllLoss": ("weight",),
    "NllLoss2D": ("weight",),
    "MultiMarginLoss": ("margin", "weight"),
    "BinaryCrossEntropyWithLogits": ("pos_weight",),
}
"""Arguments of operations, by the operation's name."""
_STRAIGHT = frozenset(
    f"{LINEAR} Add Mul Div Mean Sum Nansum Stack Cat Select Slice Transpose NllLoss NllLoss2D".split()
)
"""Operations below which a factor still is a factor of the loss."""


class Constants(NamedTuple):
    """The script's values in one graph."""

    graph: float
    """A digest of the graph's shape."""
    number: Any
    """A number that graphs of one shape share where their values are the same; on CUDA a tensor."""
    certain: Any
    """The same without values that may differ: sizes of the micro-batch, and what may be one value per sample."""


def constants_of(loss: torch.Tensor, rows: int) -> Constants | None:
    """Return the values of the script in a loss's graph; None where there are none."""
    found: list[tuple[Any, bool]] = []
    names, singles = list[str](), 0
    for node, output, bent in _nodes(loss.grad_fn):
        stem = stem_of(node.__class__)
        names.append(node.__class__.__name__)
        if len(names) > MOST_NODES:
            return None
        values = (_saved(node, name) for name in _SETTINGS.get(stem, ()))
        found += [(value, _is_setting(value, rows)) for value in values if _is_value(value)]
        if bent and stem in ("Mul", "Div") and (factor := _factor(node, output, rows)) is not None:
            found.append(factor)
            singles += 1
    if not found:
        return None
    in_a_loop = singles >= max(rows, 2)  # one per sample
    terms = [_term(value) for value, _ in found]
    certain = [term if sure and not in_a_loop else 0.0 for term, (_, sure) in zip(terms, found, strict=True)]
    return Constants(1.0 + number_of(repr(names).encode()), _number(terms), _number(certain))


def _number(terms: Iterable[Any]) -> Any:
    return sum(math.sqrt(2 * place + 3) * term for place, term in enumerate(terms))


def any_apart(constants: Iterable[Constants], allowed: float) -> bool:
    """Return whether graphs of one shape have unlike values, by more than a part of ``allowed``.

    >>> any_apart([Constants(7.0, 3.0, 1.0), Constants(7.0, 4.0, 2.0)], 1e-9)
    True
    >>> any_apart([Constants(7.0, 3.0, 0.0), Constants(7.0, 4.0, 0.0), Constants(8.0, 1.0, 1.0)], 1e-9)
    False
    """
    first: dict[float, Constants] = {}
    return any(
        _is_apart(one.number, first[one.graph].number, allowed)
        and _is_apart(one.certain, first[one.graph].certain, allowed)
        for one in constants
        if first.setdefault(one.graph, one) is not one
    )


def _is_apart(one: float, other: float, allowed: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) > allowed * max(abs(one), abs(other))


LARGEST_PENALTY = 5_000
"""Nodes of a term that are looked at to see whether it has parameters alone, where something else points to that."""
FIRST_LENGTH, DIGITS = 3, 8
"""The least length of a loader that is looked for, and the most characters of a factor that a script may have chosen
itself (0.001)."""


def divides_penalty(loss: torch.Tensor, number: int) -> bool:
    """Return whether a term of parameters alone is divided by this number, or multiplied by 1 over it.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> divides_penalty(weight.square().sum() / 7, 7), divides_penalty(weight.square().sum() / 6, 7)
    (True, False)
    """
    if number < FIRST_LENGTH:
        return False
    for node, output, _ in islice(_nodes(loss.grad_fn), MOST_NODES):
        if prod(shape_of(node, output)) == 1 and _single_divisor(node) == number:
            child = next((child for child, _ in node.next_functions if child is not None), None)
            if child is not None and is_constant(child, LARGEST_PENALTY):
                return True
    return False


def _single_divisor(node: Node) -> int:
    """Return the whole number that a node divides by; 0 where there is none."""
    stem = stem_of(node.__class__)
    if stem not in ("Div", "Mul") or sum(child is not None for child, _ in node.next_functions) != 1:
        return 0
    value = _saved(node, "other")
    if value is None or not is_plain(value) or not _is_value(value) or not float(value):
        return 0
    if stem == "Mul" and len(repr(float(value))) <= DIGITS:
        return 0
    divisor = float(value) if stem == "Div" else 1 / float(value)
    return round(divisor) if abs(divisor - round(divisor)) <= 1e-12 * abs(divisor) else 0


def _nodes(root: Node | None) -> Iterator[tuple[Node, int, bool]]:
    """Yield the nodes from a loss down to its layers, and whether a function that is no multiple lies above each."""
    todo, seen = deque([(root, 0, False)] if root is not None else []), {root}
    while todo:
        node, output, bent = todo.popleft()
        stem = stem_of(node.__class__)
        if stem in LAYERS or node.__class__.__name__ == "AccumulateGrad":
            continue
        yield node, output, bent
        for child, number in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append((child, number, bent or stem not in _STRAIGHT))


def _saved(node: Node, name: str) -> Any:
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the graph was freed, and backward will say so
        return None


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_complex() and value.numel() > 0
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_setting(value: Any, rows: int) -> bool:
    """Return whether a value is one for all samples, and not one of each."""
    return not isinstance(value, torch.Tensor) or (value.dim() < 2 and value.shape[:1] != (rows,))


def _factor(node: Node, output: int, rows: int) -> tuple[Any, bool] | None:
    """Return the one number that a node multiplies by, and whether it is one for all samples, and no size of theirs."""
    children = node.next_functions
    constant = [child is None for child, _ in children]
    if len(children) > 1 and not any(constant):
        return None
    value, shape = _saved(node, "self" if constant[0] else "other"), shape_of(node, output)
    if not _is_value(value) or (isinstance(value, torch.Tensor) and value.dim()):
        return None
    for_all = rows > 1 and bool(shape) and shape[0] % rows == 0
    if not is_plain(value):
        return value, for_all
    number = abs(float(value))
    sizes = {rows, *shape, *(prod(shape[: end + 1]) for end in range(len(shape)))}
    forms = (number, 1 / number, number**2, number**-2) if number else ()
    return number, for_all and not any(abs(one - size) <= 1e-9 * size for one in forms for size in sizes if size)


def _term(value: Any) -> Any:
    return placed_number(value) if isinstance(value, torch.Tensor) and value.dim() else _single(value)


def _single(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return float(value.item()) if value.is_cpu else value.detach().to(torch.float64).reshape(())
