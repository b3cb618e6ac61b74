"""What a loss is a mean over, as autograd's graph shows it, and whether it couples samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.loop.coupling import LEAST, coupling
from paceline.loop.loss_graph import read_loss

torch.manual_seed(0)
ROWS, CLASSES = 6, 5
NET, OTHER = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES)), nn.Linear(8, 4, bias=False)
FREE = nn.Parameter(torch.tensor(0.5))
X, Y = torch.randn(ROWS, 8), torch.tensor([0, 1, -100, 2, -100, 3])
WEIGHT, TARGET, MASK = torch.arange(1.0, 6.0), torch.rand(ROWS, CLASSES), Y >= 0
Loss = Callable[[], torch.Tensor]


def out() -> torch.Tensor:
    result: torch.Tensor = NET(X)
    return result


def each() -> torch.Tensor:
    return F.cross_entropy(out(), Y, reduction="none")


def penalty() -> Any:
    return sum(p.square().sum() for p in NET.parameters())


MEANS: dict[str, tuple[Loss, list[float]]] = {
    "ignored": (lambda: F.cross_entropy(out(), Y), [4]),
    "class weights": (lambda: F.cross_entropy(out(), Y, weight=WEIGHT), [10]),
    "smoothed": (lambda: F.cross_entropy(out(), Y, weight=WEIGHT, label_smoothing=0.1), [10, 10]),
    "probabilities": (lambda: F.cross_entropy(out(), TARGET, weight=WEIGHT), [6]),
    "pixels": (lambda: F.cross_entropy(out()[:, :, None].expand(6, 5, 3), Y[:, None].expand(6, 3)), [12]),
    "mse": (lambda: F.mse_loss(out(), TARGET), [30]),
    "l1": (lambda: F.l1_loss(out(), TARGET), [30]),
    "huber": (lambda: F.huber_loss(out(), TARGET), [30]),
    "smooth l1": (lambda: F.smooth_l1_loss(out(), TARGET), [30]),
    "bce": (lambda: F.binary_cross_entropy(out().sigmoid(), TARGET), [30]),
    "pos_weight": (lambda: F.binary_cross_entropy_with_logits(out(), TARGET, pos_weight=WEIGHT), [30]),
    "batchmean": (lambda: F.kl_div(out().log_softmax(1), TARGET, reduction="batchmean"), [6]),
    "multi margin": (lambda: F.multi_margin_loss(out(), Y.clamp(min=0)), [6]),
    "weighted mse": (lambda: F.mse_loss(out(), TARGET, weight=TARGET), [float(TARGET.sum())]),
    "rows of means": (lambda: out().mean(1).mean(), [6]),
    "dims": (lambda: out().mean((0, 1)), [30]),
    "a mask": (lambda: (each() * MASK).sum() / MASK.sum(), [4]),
    "a mask, times its inverse": (lambda: (each() * MASK).sum() * (1 / MASK.sum()), [4]),
    "by samples": (lambda: out().square().sum() / len(X), [6]),
    "by samples, times": (lambda: out().square().sum() * (1 / len(X)), [6]),
    "by all": (lambda: 0.5 * out().square().sum() / TARGET.numel(), [30]),
    "sums": (lambda: (out().square().sum() + out().abs().sum()) / len(X), [6, 6]),
    "accumulation": (lambda: F.cross_entropy(out(), Y) / 8, [4]),
    "minus": (lambda: 1.0 - (-F.cross_entropy(out(), Y)).double().view(1), [4]),
    "a weight that is learned": (lambda: torch.exp(-FREE) * F.cross_entropy(out(), Y) + FREE, [4]),
    "a penalty": (lambda: F.cross_entropy(out(), Y) + 1e-3 * penalty() + NET[0].weight.abs().mean(), [4]),
    "elastic": (
        lambda: F.cross_entropy(out(), Y) + (torch.rand(7, 8) * (NET[0].weight - torch.rand(7, 8)) ** 2).sum(),
        [4],
    ),
    "a stack": (lambda: torch.stack([F.cross_entropy(out(), Y), F.mse_loss(out(), TARGET)]).mean(), [4, 30]),
    "a penalty alone": (penalty, []),
}


@pytest.mark.parametrize("name", MEANS)
def test_the_count_of_a_mean_is_read(name: str) -> None:
    loss, counts = MEANS[name]
    found = read_loss(loss(), ROWS)
    assert found.counts == pytest.approx(counts)
    assert (found.sum_over, found.unread, found.bends) == (None, None, None)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: NET(x).square().mean(1).mean(),
        lambda x: (NET(x).square().mean(1) * 1.0).sum() / torch.tensor(1),
        lambda x: NET(x).square().mean(1).sum() / len(x),
        lambda x: NET(x)[:, :1].square().squeeze(),
        lambda x: (NET(x)[:, 0] - 1).abs(),
        lambda x: F.cross_entropy(NET(x), Y[:1], reduction="none").mean(),
    ],
)
def test_one_sample_counts_one(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = read_loss(loss(X[:1]), 1)
    assert (found.counts, found.unread, found.bends, found.sum_over) == ([1], None, None, None)


def test_what_a_mask_leaves_is_a_mean_also_when_it_is_one_value() -> None:
    only = torch.tensor([False, True, False, False, False, False])
    assert read_loss(each()[only].mean(), ROWS).counts == [1]
    assert read_loss(F.cross_entropy(out(), Y).view(1).mean(), ROWS).counts == [4]
    assert read_loss(torch.cat([F.cross_entropy(out(), Y)[None], F.mse_loss(out(), TARGET)[None]]).sum(), 6).counts == [
        4,
        30,
    ]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].expand(ROWS, CLASSES) / 30


@pytest.mark.parametrize(
    ("loss", "sum_over", "unread", "bends"),
    [
        (lambda: out().sum(), "", None, None),
        (lambda: F.cross_entropy(out(), Y, reduction="sum"), "", None, None),
        (lambda: F.mse_loss(out(), TARGET, reduction="sum") + F.mse_loss(out(), TARGET), "", None, None),
        (lambda: torch.einsum("ij,ij->", out(), TARGET), "", None, None),
        (lambda: out().sum() / 128, "128", None, None),
        (lambda: out().sum() * 0.01, "100", None, None),
        (lambda: Own.apply(out()), None, "OwnBackward", None),
        (lambda: F.mse_loss(out(), TARGET).sqrt(), None, None, "SqrtBackward0"),
        (lambda: (F.mse_loss(out(), TARGET) - 0.1).abs() + 0.1, None, None, "AbsBackward0"),
        (lambda: F.mse_loss(out(), TARGET) * out().mean(), None, None, "MulBackward0"),
    ],
)
def test_what_is_no_mean_is_named(loss: Loss, sum_over: Any, unread: Any, bends: Any) -> None:
    found = read_loss(loss(), ROWS)
    assert (found.sum_over, found.unread, found.bends) == (sum_over, unread, bends)


def contrastive() -> torch.Tensor:
    one, other = F.normalize(NET(X)[:, :4], dim=1), F.normalize(OTHER(X), dim=1)
    return F.cross_entropy(FREE.exp() * one @ other.t(), torch.arange(ROWS))


@pytest.mark.parametrize("name", [name for name in MEANS if "penalty alone" not in name])
def test_a_mean_over_samples_couples_none(name: str) -> None:
    assert float(coupling(MEANS[name][0](), ROWS)) == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        lambda: F.mse_loss(out(), TARGET).sqrt(),
        lambda: each().topk(3).values.mean(),
        lambda: F.mse_loss(out(), TARGET) + out().std(0).mean(),
        lambda: (out() - out().mean(0)).square().mean(),
    ],
)
def test_losses_that_couple_samples_are_seen(loss: Loss) -> None:
    made = loss()
    assert float(coupling(made, ROWS)) > LEAST
    made.backward()  # the graph is still there


def test_a_loss_of_ones_own_function_is_not_gone_through_twice() -> None:
    assert coupling(Own.apply(out()), ROWS) == 0.0
