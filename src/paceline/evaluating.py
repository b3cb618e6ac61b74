"""Evaluation: the test set is dealt once over the fleet, and its sums are exact whatever the shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.feed import Feed, Source, split


def own_sums(
    score: Callable[..., Any], source: Source, *, shares: Sequence[int], rank: int, batch_size: int
) -> dict[str, Any]:
    """Run ``score`` over this worker's part of the data and add up what it returns, in float64."""
    assert source.length is not None
    feed = Feed(source.length, workers=len(shares), shuffle=False)
    feed.deal(shares)
    sums: dict[str, Any] = {}
    pieces = [(piece, feed.indices(piece)) for piece in split(feed.queue(rank), batch_size)]
    if source.ahead:
        source.expect(0, pieces)
    for piece, indices in pieces:
        batch = source.take(0, piece, indices)
        figures = score(*batch) if isinstance(batch, (list, tuple)) else score(batch)
        for name, value in _named(figures).items():
            sums[name] = sums.get(name, 0.0) + _number(name, value)
    return {name: value.tolist() for name, value in sums.items()} | {"count": sum(len(i) for _, i in pieces)}


def total(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the workers' sums; a worker that had no samples knows no names. Numbers stay numbers, tables tensors."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {
        name: sum(torch.tensor(part[name], dtype=torch.float64) for part in parts if name in part) for name in names
    }
    result = {name: value.item() if value.dim() == 0 else value for name, value in sums.items()}  # type: ignore[union-attr]
    return result | {"count": int(result["count"])}


def _number(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value).detach().to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"fleet.evaluate: {name!r} must be a number or a tensor, got {value!r}") from None


def _named(figures: Any) -> dict[str, Any]:
    if not isinstance(figures, Mapping):
        raise ValueError(
            "the function given to fleet.evaluate must return a dict of sums over the batch, such as "
            f'{{"correct": n, "loss": total}}; got {type(figures).__name__}'
        )
    if "count" in figures:
        raise ValueError('fleet.evaluate counts the samples itself: "count" is its own name')
    return dict(figures)


@contextmanager
def evaluation_mode(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """No gradients and no training behaviour inside; every module is as before afterwards."""
    were = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in were:
            module.training = training
