"""A tensor that a loss is divided by: counts and sums of weights pass, statistics of the batch are noted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.step.losses.loss_graph import read_loss

torch.manual_seed(0)
ROWS = 6
NET = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5))
X, Y, R = torch.randn(ROWS, 8), torch.tensor([0, 1, -100, 2, -100, 3]), torch.randn(ROWS, 5)
W, CW, MASK = torch.rand(ROWS) + 0.1, torch.arange(1.0, 6.0) / 3, torch.rand(ROWS, 5) > 0.4
Loss = Callable[[], torch.Tensor]


def each() -> torch.Tensor:
    return F.cross_entropy(NET(X), Y, reduction="none")


def squares() -> torch.Tensor:
    return F.mse_loss(NET(X), R, reduction="none")


COUNTS: dict[str, Loss] = {
    "a mask": lambda: (squares() * MASK).sum() / MASK.sum(),
    "a mask, and a little": lambda: (squares() * MASK).sum() / (MASK.sum() + 1e-6),
    "a mask, twice": lambda: (squares() * MASK).sum() / (2 * MASK.sum()),
    "chosen values": lambda: squares()[MASK].sum() / MASK.sum(),
    "where": lambda: torch.where(MASK, squares(), torch.zeros(())).sum() / MASK.sum(),
    "weights of samples": lambda: (each() * W).sum() / W.sum(),
    "weights of rows": lambda: (squares() * W[:, None]).sum() / W.sum(),
    "weights and a mask": lambda: (squares() * W[:, None] * MASK).sum() / (W[:, None] * MASK).sum(),
    "means of weights": lambda: (each() * W).mean() / W.mean(),
    "a product": lambda: W @ each() / W.sum(),
    "class weights, summed": lambda: F.cross_entropy(NET(X), Y, weight=CW, reduction="sum") / CW[Y[Y >= 0]].sum(),
    "class weights of each": lambda: (
        F.cross_entropy(NET(X), Y, weight=CW, reduction="none").sum() / CW[Y[Y >= 0]].sum()
    ),
    "class weights, added": lambda: (
        F.cross_entropy(NET(X), Y, weight=CW, label_smoothing=0.1, reduction="none").sum() / CW[Y[Y >= 0]].sum()
    ),
    "of each row, then weighted": lambda: ((squares() * MASK).sum(1) / MASK.sum(1) * W).sum() / W.sum(),
}
NO_COUNTS: dict[str, Loss] = {
    "a variance, summed": lambda: squares().sum() / (R - R.mean(0)).square().sum(),
    "the global batch": lambda: each().sum() / torch.tensor(128.0),
    "other weights": lambda: (each() * W).sum() / W.square().sum(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_sums_of_weights_are_what_they_seem(name: str) -> None:
    found = read_loss(COUNTS[name](), ROWS)
    assert len(found.counts) == 1
    assert not found.unlikely
    assert not found.divisor


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_torchs_own_smoothed_labels_are_divided_by_the_weights_of_their_classes(reduction: str) -> None:
    loss = F.cross_entropy(NET(X), Y, weight=CW, label_smoothing=0.1, reduction=reduction)
    total = CW[Y[Y >= 0]].sum()
    found = read_loss(loss if reduction == "mean" else loss / total, ROWS)
    assert found.counts == pytest.approx([float(total)] * 2)
    assert not found.unlikely
    assert read_loss(loss + squares().sum() / R.var(), ROWS).unlikely


@pytest.mark.parametrize("name", NO_COUNTS)
def test_other_divisors_of_a_sum_are_noted(name: str) -> None:
    assert read_loss(NO_COUNTS[name](), ROWS).unlikely


def test_a_mean_may_be_divided_by_what_is_the_same_everywhere() -> None:
    def divisor(value: torch.Tensor) -> float:
        return float(read_loss(squares().mean() / value, ROWS).divisor)

    assert divisor(torch.tensor(0.7)) == divisor(torch.tensor(0.7)) != divisor(R.var())
