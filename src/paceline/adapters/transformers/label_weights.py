"""The weight of a micro-batch's mean loss, and the check that the loss is a mean over what is counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline.step.losses.loss_graph import read_loss

if TYPE_CHECKING:
    from paceline.adapters.transformers.trainer import PacelineTrainer

IGNORED = -100
logger = logging.getLogger("paceline")


def label_tokens(batch: Mapping[str, Any], *, shifted: bool) -> torch.Tensor | None:
    """Return the number of labels that count: class numbers that are not -100; None where there are no such labels.

    Where the loss shifts labels, the first of each row has no prediction.

    >>> label_tokens({"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])}, shifted=True)
    tensor(1)
    >>> label_tokens({"labels": torch.tensor([0.5, 0.25])}, shifted=False) is None
    True
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def count_of(loss: torch.Tensor, rows: int) -> Any:
    """Return what the loss was divided by, if its graph shows one mean and nothing else; None otherwise."""
    found = read_loss(loss, rows)
    plain = len(found.counts) == 1 and not (found.unread or found.bends or found.sum_over is not None)
    return found.counts[0] if plain else None


class LossCheck:
    """A check, made once, of the leader's first micro-batch of two samples or more.

    Weighted as in a step, the losses of its halves must add up to that of the whole. Else the update would depend on
    how shares are cut, unseen.
    """

    def __init__(self, trainer: PacelineTrainer) -> None:
        self._trainer = trainer
        self._done = False

    def __call__(self, model: Any, batch: Any) -> None:
        if self._done or not self._trainer.fleet.is_leader or self._trainer.args.torch_compile:
            return  # a compiled model would be compiled for each size
        rows = _rows(batch)
        if rows is None or rows < 2:
            return
        self._done = True
        parts = [{k: v[cut] if torch.is_tensor(v) else v for k, v in batch.items()} for cut in _halves(rows)]
        devices = [self._trainer.args.device] if self._trainer.args.device.type == "cuda" else []
        model.eval()
        with torch.random.fork_rng(devices):
            whole, halves = self._weighted(model, dict(batch)), sum(self._weighted(model, part) for part in parts)
        model.train()
        if abs(whole - halves) > (2e-2 if self._trainer.args.bf16 else 2e-5) * abs(whole):
            name = type(self._trainer.model).__name__
            logger.warning(
                "the loss of %s is no mean over its label tokens: weighted as in a step, the losses of two halves of a "
                "micro-batch add up to %.6g, and the whole has %.6g. The update depends on how shares are cut; "
                "override PacelineTrainer.loss_weight(batch, num_items) to count what the loss is a mean over. Where "
                "compute_loss changes with every call (a counter of its own), follow self.state.global_step instead",
                name,
                halves,
                whole,
            )

    def _weighted(self, model: Any, batch: dict[str, Any]) -> float:
        trainer = self._trainer
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        loss = trainer.mean_loss(model, batch, items)
        rows = _rows(batch) or 0
        weight = count_of(loss, rows) if trainer.shows_count(loss, rows) else trainer.loss_weight(batch, items)
        count = float(rows if weight is None else weight)
        return float(loss.detach()) * count if count else 0.0


def _halves(rows: int) -> tuple[slice, slice]:
    return slice(0, rows // 2), slice(rows // 2, rows)


def _rows(batch: Any) -> int | None:
    """Return the number of samples, where all tensors have one row for each."""
    if not isinstance(batch, Mapping):
        return None
    sizes = {len(part) for part in batch.values() if torch.is_tensor(part) and part.dim()}
    have_rows = all(part.dim() for part in batch.values() if torch.is_tensor(part))
    return sizes.pop() if len(sizes) == 1 and have_rows else None
