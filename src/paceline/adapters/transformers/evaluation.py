"""Evaluation and prediction through the fleet: the Trainer's own batches are dealt, and each counts once.

The batches are those that one process would make, so that ``eval_loss``, a mean of the batches' means weighted by their
samples, does not depend on the members of the fleet. Predictions have unlike lengths: every worker keeps those it made,
the fleet agrees on the longest, and they are gathered padded with -100, as the Trainer pads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.fleet import Fleet

PADDING = -100
MOST_DIMENSIONS = 8
Predict = Callable[[Any], tuple[torch.Tensor | None, dict[str, torch.Tensor]]]
"""Function from a batch to its mean loss, and its predictions by name."""


class EvaluationBatches(Dataset[tuple[int, Any]]):
    """A loader's batches as samples: (number, collated batch)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if loader.batch_sampler is None or not hasattr(loader.dataset, "__getitem__"):
            raise ValueError(
                f"{type(loader.dataset).__name__} has no length: a fleet evaluates a dataset with __len__ and "
                "__getitem__, so that every sample counts once"
            )
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self.indices: list[list[int]] = [list(batch) for batch in loader.batch_sampler]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        chosen = self.indices[number]
        many = getattr(self._dataset, "__getitems__", None)
        rows = many(chosen) if callable(many) else [self._dataset[index] for index in chosen]
        return number, self._collate(rows)

    def loader(self, workers: int) -> DataLoader[Any]:
        """Return a loader of one batch at a time."""
        return DataLoader(self, batch_size=1, collate_fn=_only, num_workers=workers)


def _only(items: Sequence[Any]) -> Any:
    return items[0]


def _number(items: Sequence[int]) -> torch.Tensor:
    return torch.tensor(items)


def losses(fleet: Fleet, batches: EvaluationBatches, workers: int, predict: Predict) -> list[float] | None:
    """Return ``[mean loss]`` over all samples; None where the model gives none."""

    def score(number: int, inputs: Any) -> dict[str, float]:
        loss, _ = predict(inputs)
        size = len(batches.indices[number])
        return {"loss": 0.0 if loss is None else float(loss) * size, "samples": 0 if loss is None else size}

    sums = fleet.evaluate(score, batches.loader(workers), batch_size=1, sums=("loss", "samples"))
    return [sums["loss"] / sums["samples"]] if sums["samples"] else None


def predictions(
    fleet: Fleet, batches: EvaluationBatches, workers: int, predict: Predict
) -> tuple[np.ndarray[Any, Any] | None, dict[str, np.ndarray[Any, Any]]]:
    """Return each sample's loss, which is its batch's mean, and the predictions of all samples by name, in order."""
    made: dict[int, dict[str, torch.Tensor]] = {}

    def keep(number: int, inputs: Any) -> torch.Tensor | float:
        loss, parts = predict(inputs)
        made[number] = {name: _with_rows(part.detach()).cpu() for name, part in parts.items()}
        return float("nan") if loss is None else float(loss)

    def describe(number: int, inputs: Any) -> dict[str, torch.Tensor]:
        loss = keep(number, inputs)
        shapes = {name: torch.tensor([_shape(part)]) for name, part in made[number].items()}
        return {"": torch.tensor([loss], dtype=torch.float64), **shapes}

    shapes = fleet.predict(describe, batches.loader(workers), batch_size=1)
    losses_of = shapes.pop("").numpy()
    longest = {name: shape.amax(0).tolist() for name, shape in shapes.items()}

    def padded(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        number = int(numbers[0])
        if number not in made:  # its worker was lost, or shares have moved
            keep(number, batches[number][1])
        return {name: _padded(part, longest[name])[None] for name, part in made[number].items()}

    gathered: Mapping[str, torch.Tensor] = {}
    if shapes:
        numbers: Any = range(len(batches))
        order: DataLoader[Any] = DataLoader(numbers, batch_size=1, collate_fn=_number)
        gathered = fleet.predict(padded, order, batch_size=1)
    sizes = [len(indices) for indices in batches.indices]
    rows = {name: _rows(part, shapes[name][:, 0].tolist()) for name, part in gathered.items()}
    return None if np.isnan(losses_of).all() else np.repeat(losses_of, sizes), rows


def _with_rows(part: torch.Tensor) -> torch.Tensor:
    return part if part.dim() else part[None]


def _shape(part: torch.Tensor) -> list[int]:
    return [*part.shape, *[1] * (MOST_DIMENSIONS - part.dim())]


def _padded(part: torch.Tensor, longest: Sequence[int]) -> torch.Tensor:
    """Return a tensor with the longest's number of rows, and of columns in the second dimension."""
    shape = [*longest[: min(2, part.dim())], *part.shape[2:]]
    full = part.new_full(shape, PADDING if part.dtype != torch.bool else 0)
    full[tuple(slice(size) for size in part.shape)] = part
    return full


def _rows(part: torch.Tensor, sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    return torch.cat([batch[:size] for batch, size in zip(part, sizes, strict=True)]).numpy()


# -- nested predictions by name ----------------------------------------------------------------------------------------


def flattened(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Return a tensor, or tuples of tensors, as tensors by name.

    >>> sorted(flattened("logits", (torch.zeros(1), (torch.zeros(1),))))
    ['logits.0', 'logits.1.0']
    """
    if value is None:
        return {}
    if isinstance(value, torch.Tensor):
        return {name: value.float() if value.dtype == torch.bfloat16 else value}  # NumPy has no bfloat16
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"predictions are tensors, or tuples of tensors; got a {type(value).__name__}")
    parts: dict[str, torch.Tensor] = {}
    for number, part in enumerate(value):
        parts |= flattened(f"{name}.{number}", part)
    return parts


def nested(name: str, parts: Mapping[str, Any]) -> Any:
    """Return what `flattened` took apart; None where there is nothing."""
    if name in parts:
        return parts[name]
    numbers = sorted({int(key[len(name) + 1 :].split(".")[0]) for key in parts if key.startswith(f"{name}.")})
    return tuple(nested(f"{name}.{number}", parts) for number in numbers) or None
