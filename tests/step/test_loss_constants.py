"""Values of the script in a loss's graph: those that differ between micro-batches are seen, and sizes are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.step.losses.loss_constants import any_apart, constants_of, divides_penalty

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5)).double()
X, Y, R = torch.randn(12, 8).double(), torch.randint(0, 5, (12,)), torch.randn(12, 5).double()
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

VALUES: dict[str, Loss] = {
    "a temperature": lambda o, y, r, v: F.cross_entropy(o / v, y),
    "a temperature in a tensor": lambda o, y, r, v: F.cross_entropy(o / torch.tensor(v), y),
    "an exponent": lambda o, y, r, v: ((o - r).abs() ** v).mean(),
    "a bound": lambda o, y, r, v: F.cross_entropy(o, y, reduction="none").clamp(max=v).mean(),
    "a bound of Huber's": lambda o, y, r, v: F.huber_loss(o, r, delta=v),
    "class weights": lambda o, y, r, v: F.cross_entropy(o, y, weight=torch.tensor([1.0, v, 2, 3, 1]).double()),
    "weights of positives": lambda o, y, r, v: F.binary_cross_entropy_with_logits(
        o, r.sigmoid(), pos_weight=torch.tensor([1.0, v, 2, 3, 1]).double()
    ),
}


def seen(loss: Loss, values: tuple[float, float], rows: tuple[int, int] = (4, 3)) -> bool:
    found = [constants_of(loss(NET(X[:n]), Y[:n], R[:n], v), n) for v, n in zip(values, rows, strict=True)]
    return any_apart([one for one in found if one is not None], 1e-9)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_differs_between_micro_batches_is_seen(name: str) -> None:
    assert seen(VALUES[name], (1.7, 1.6))
    for same in (1.7, 2.0, 3.0, 4.0, 5.0, 0.25):
        for rows in ((4, 3), (3, 5), (2, 4), (5, 1)):
            assert not seen(VALUES[name], (same, same), rows), (same, rows)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y, r, v: (o.tanh() / len(o)).sum().exp().log(),
        lambda o, y, r, v: F.cross_entropy(o * len(o) ** -0.5, y),
        lambda o, y, r, v: F.mse_loss(o, r) + sum((p * 3.0).square().sum() for p in NET.parameters()),
        lambda o, y, r, v: torch.stack([(one / (2 + n)).log_softmax(0)[0] for n, one in enumerate(o)]).mean(),
        lambda o, y, r, v: F.cross_entropy(o, y) + (o.abs() if v > 2 else o.square() * v).mean(),
    ],
    ids=["samples", "a root of samples", "a penalty", "a loop over samples", "another branch"],
)
def test_what_may_differ_is_not(loss: Loss) -> None:
    assert not seen(loss, (3.0, 3.0))
    assert not seen(loss, (3.0, 1.0))


def divergence() -> torch.Tensor:
    """The difference of two densities at weights that are drawn, as Bayes by backprop takes it."""
    total = torch.zeros((), dtype=torch.float64)
    for mean in NET.parameters():
        deviation = F.softplus(mean - 3)
        weight = mean + deviation * torch.randn_like(mean)
        total = total + torch.distributions.Normal(mean, deviation).log_prob(weight).sum()
        total = total - torch.distributions.Normal(0.0, 1.0).log_prob(weight).sum()
    return total


def test_a_penalty_divided_by_a_number_is_seen() -> None:
    mean = F.cross_entropy(NET(X), Y)
    for penalty in (NET[0].weight.square().sum(), divergence()):
        for divided in (penalty / 24, penalty * (1 / 24), 0.1 * (penalty / 24)):
            assert divides_penalty(mean + divided, 24)
            assert not divides_penalty(mean + divided, 6)
        assert not divides_penalty(mean + penalty * 0.01, 100), "a number of the script's own"
        assert not divides_penalty(mean + penalty / 2, 2)
    assert not divides_penalty(F.mse_loss(NET(X), R, reduction="sum") / 12 + NET[0].weight.square().sum(), 12)
