"""What a loss is a mean over, as autograd's graph shows it, and whether it couples samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.step.losses.coupling import LEAST, coupling
from paceline.step.losses.loss_graph import divisor_of_mean, read_loss
from paceline.step.losses.loss_weights import look_at_division

torch.manual_seed(0)
ROWS, CLASSES = 6, 5
NET, OTHER = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES)), nn.Linear(8, 4, bias=False)
BY_CLASS = nn.Linear(8, ROWS)
FREE, PAIR = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(2))
X, Y = torch.randn(ROWS, 8), torch.tensor([0, 1, -100, 2, -100, 3])
WEIGHT, TARGET, MASK = torch.arange(1.0, 6.0), torch.rand(ROWS, CLASSES), Y >= 0
SCALE = torch.rand(ROWS)
Loss = Callable[[], torch.Tensor]


def out() -> torch.Tensor:
    result: torch.Tensor = NET(X)
    return result


def each() -> torch.Tensor:
    return F.cross_entropy(out(), Y, reduction="none")


def each_value() -> torch.Tensor:
    return F.mse_loss(out(), TARGET, reduction="none")


def both() -> torch.Tensor:
    return torch.stack([F.cross_entropy(out(), Y), F.mse_loss(out(), TARGET)])


def samples(given: torch.Tensor) -> Any:
    return sum(F.mse_loss(given[i], TARGET[i]) for i in range(len(given)))


def hinge_of_pairs(chosen: torch.Tensor) -> torch.Tensor:
    """Every chosen sample beside every other one, as a surrogate of the area under a curve."""
    score = out()[:, 0]
    return F.relu(1 - (score[chosen][:, None] - score[~chosen][None])).mean()


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
    "rows first": (lambda: each_value().mean(0).mean(), [30]),
    "rows first, by dims": (lambda: each_value().mean(dim=0).mean(dim=0), [30]),
    "rows first, kept": (lambda: each_value().mean(0, keepdim=True).mean(), [30]),
    "turned": (lambda: each_value().t().mean(1).mean(), [30]),
    "features weighted": (lambda: (each_value().mean(0) * WEIGHT).mean(), [30]),
    "features weighted, added": (lambda: (each_value().mean(0) * WEIGHT).sum(), [6]),
    "features weighted, a product": (lambda: each_value().mean(0) @ WEIGHT, [6]),
    "features added": (lambda: each_value().mean(0).sum(), [6]),
    "features picked": (lambda: each_value().mean(0)[0] + 2 * each_value().mean(0)[1], [6, 6]),
    "a mask, rows first": (lambda: each_value()[MASK].mean(0).mean(), [20]),
    "a mask, rows of means": (lambda: each_value()[MASK].mean(1).mean(), [4]),
    "vectors of samples, stacked": (lambda: torch.stack([each(), each_value().mean(1)]).mean(1).mean(), [12]),
    "pieces joined": (lambda: torch.cat([one.square().flatten() for one in out()]).mean(), [30]),
    "tasks weighted": (lambda: (both() * torch.tensor([1.0, 2.0])).sum(), [4, 30]),
    "tasks weighted by what is learned": (lambda: (torch.exp(-PAIR) * both() + PAIR).sum(), [4, 30]),
    "tasks weighted by each that is learned": (
        lambda: sum(torch.exp(-one) * loss + one for one, loss in zip(PAIR, both())),
        [4, 30],
    ),
    "tasks weighted by parts": (
        lambda: sum(part.exp().sum() * loss for part, loss in zip(PAIR.chunk(2), both())),
        [4, 30],
    ),
    "tasks weighted by a softmax": (lambda: (PAIR.softmax(0) * both()).sum(), [4, 30]),
    "tasks divided by what is learned": (
        lambda: sum((1 / (1 + one)) * loss for one, loss in zip(PAIR, both())),
        [4, 30],
    ),
    "a mean and a mask, weighted": (
        lambda: PAIR[0].exp() * each_value().mean() + next(iter(PAIR)).exp() * (each() * MASK).sum() / MASK.sum(),
        [30, 4],
    ),
    "weights of mean 1": (lambda: (each_value().mean(1) * SCALE / SCALE.mean()).mean(), [float(SCALE.sum())]),
    "a mean of weights": (lambda: (each_value().mean(1) * SCALE).mean() / SCALE.mean(), [float(SCALE.sum())]),
    "weights of sum 1": (lambda: (each_value().mean(1) * SCALE / SCALE.sum()).sum(), [float(SCALE.sum())]),
    "a factor in a tensor": (lambda: torch.tensor(0.5) * each_value().sum() / len(X), [6]),
    "a divisor inside": (lambda: (each_value() / torch.tensor(0.5)).sum() / len(X), [6]),
    "a loss of each sample": (lambda: torch.stack([F.mse_loss(o, t) for o, t in zip(out(), TARGET)]).mean(), [6]),
    "a loss of each sample, added": (lambda: samples(out()) / len(X), [6]),
    "a forward of each sample": (lambda: sum(F.mse_loss(NET(x), t) for x, t in zip(X, TARGET)) / len(X), [6]),
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


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["tasks", "tasks / n", "each", "rows first", "rows last", "turned", "forward"])
def test_no_size_that_happens_to_be_the_number_of_samples_changes_a_reading(name: str, rows: int) -> None:
    a, b = NET(X[:rows])[:, :4], TARGET[:rows, :4]
    tasks = [F.mse_loss(a, b), F.l1_loss(a, b), F.huber_loss(a, b)]
    losses: dict[str, tuple[Any, int]] = {
        "tasks": (torch.stack(tasks).mean(), 4),
        "tasks / n": (sum(tasks) / 3, 4),
        "each": (sum(F.mse_loss(one, other) for one, other in zip(a, b)) / rows, 1),
        "rows first": ((a - b).square().mean(0).mean(), 4),
        "rows last": ((a - b).square().mean(1).mean(), 1),
        "turned": ((a - b).square().t().mean(1).mean(), 4),
        "forward": (torch.stack([F.mse_loss(NET(x[None])[:, :4], t[None]) for x, t in zip(X[:rows], b)]).mean(), 1),
    }
    loss, per_sample = losses[name]
    found = read_loss(loss, rows)
    unsure = (name, rows) == ("forward", 1)  # one sample, whose loss is also that of the micro-batch
    assert (found.unsure, found.otherwise) == ((True, 1) if unsure else (False, None))
    assert unsure or set(found.counts) == {rows * per_sample}


def test_as_many_losses_as_samples_are_unsure_unless_each_is_seen_to_be_of_one() -> None:
    views = [F.mse_loss(NET(X[:2] + n), TARGET[:2]) for n in range(2)]
    assert read_loss((views[0] + views[1]) / 2, 2).unsure
    times = [F.mse_loss(RECURRENT(X[:2, None].expand(2, 4, 8) + n), torch.zeros(2, 4, 5)) for n in range(2)]
    assert read_loss(torch.stack(times).mean(), 2).unsure
    each_one = [F.mse_loss(NET(x[None]), t[None]) for x, t in zip(X[:2], TARGET[:2])]
    assert not read_loss((each_one[0] + each_one[1]) / 2, 2).unsure
    assert not read_loss(torch.einsum("b,b->", each(), SCALE) / SCALE.sum(), ROWS).unsure


def test_a_sum_times_nothing_counts_nothing() -> None:
    found = read_loss(out().sum() * 0, ROWS)
    assert (found.nothing, found.counts, found.sum_over) == (True, [], None)
    assert read_loss(F.mse_loss(out(), TARGET) * 0, ROWS).counts == [30], "a mean times 0 is an update all the same"


def test_a_sum_of_several_values_divided_by_one_is_noted() -> None:
    one, none = torch.arange(ROWS) == 2, torch.zeros(ROWS)
    assert read_loss(each_value().sum() / none.sum().clamp(min=1), ROWS).clamped
    assert not read_loss((each() * one).sum() / one.sum(), ROWS).clamped
    assert not read_loss(torch.where(one, each(), 0.0).sum() / one.sum(), ROWS).clamped
    assert not read_loss(each()[one].sum() / one.sum(), ROWS).clamped
    assert not read_loss(each_value().sum() / torch.tensor(2), ROWS).clamped


def test_one_sample_divided_by_its_weight_counts_that_weight() -> None:
    weight = torch.tensor([0.3])
    loss = F.cross_entropy(NET(X[:1]), Y[:1], reduction="none")
    assert read_loss(torch.einsum("b,b->", weight, loss) / weight.sum(), 1).counts == pytest.approx([0.3])
    assert read_loss((weight * loss).squeeze() / weight.sum(), 1).counts == pytest.approx([0.3])


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
        (lambda: each_value().sum(0).mean(), "", None, None),
        (lambda: samples(out()), "", None, None),
        (lambda: F.cross_entropy(out(), Y, reduction="sum"), "", None, None),
        (lambda: F.mse_loss(out(), TARGET, reduction="sum") + F.mse_loss(out(), TARGET), "", None, None),
        (lambda: torch.einsum("ij,ij->", out(), TARGET), "", None, None),
        (lambda: out().sum() / 128, "128", None, None),
        (lambda: out().sum() * 0.01, "100", None, None),
        (lambda: Own.apply(out()), None, "OwnBackward", None),
        (lambda: F.mse_loss(out(), TARGET).sqrt(), None, None, "SqrtBackward0"),
        (lambda: torch.stack([F.mse_loss(out(), TARGET), each().mean()]).max(), None, None, "MaxBackward1"),
        (lambda: torch.maximum(F.mse_loss(out(), TARGET), each().mean()), None, None, "MaximumBackward0"),
        (lambda: each().median(), None, None, "MedianBackward0"),
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


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        lambda: F.mse_loss(out(), TARGET).sqrt(),
        lambda: each().topk(3).values.mean(),
        lambda: F.mse_loss(out(), TARGET) + out().std(0).mean(),
        lambda: (out() - out().mean(0)).square().mean(),
        lambda: F.relu(1 - (out()[:, :1] - out()[:, :1].t()) * TARGET[:, :1]).mean(),
        lambda: F.relu(1 - (out()[:, 0] - out()[:, 0, None])).mean(),
        lambda: each().mean() + (out()[1:] - out()[:-1]).abs().mean(),
        lambda: F.margin_ranking_loss(out()[:-1, 0], out()[1:, 0], TARGET[1:, 0].sign()),
        lambda: F.triplet_margin_loss(out(), out().roll(1, 0), out().roll(2, 0)),
        lambda: each().max(),
        lambda: each().median(),
        lambda: F.relu(torch.cdist(out(), out()).max(1).values - 1).mean(),
        lambda: F.relu(out()[:, 0] - out()[torch.arange(ROWS - 1, -1, -1), 0] + 1).mean(),
        lambda: F.relu(out()[:, 0] - out()[:, 0][torch.arange(ROWS - 1, -1, -1)] + 1).mean(),
        lambda: hinge_of_pairs(Y > 0),
        lambda: (out()[:, :1] - TARGET[:, 0]).square().mean(),
        lambda: F.mse_loss(out()[:, :1], TARGET[:, 0]),
        lambda: F.mse_loss(out()[:, 0], TARGET[:, :1]),
        lambda: F.l1_loss(out()[:, :1], TARGET[:, 0]),
        lambda: F.smooth_l1_loss(out()[:, :1], TARGET[:, 0]),
        lambda: F.cross_entropy(out() @ TARGET.T, torch.arange(ROWS)),
        lambda: (TARGET[:, :1] - out()[:, 0]).abs().mean(),
        lambda: (out()[:, :1].tanh() * TARGET[:, 0]).mean(),
        lambda: hinge_of_pairs(Y == 0),
        lambda: F.relu(1 - (out()[:2, 0, None] - out()[2:, 0])).mean(),
        lambda: each()[each().argsort()[:4]].mean(),
        lambda: F.cross_entropy(out()[each().argsort()[:4]], CLASS[:4]),
        lambda: F.cross_entropy(out().index_select(0, torch.tensor([4, 0, 2])), CLASS[:3]),
    ],
)
def test_losses_that_couple_samples_are_seen(loss: Loss) -> None:
    made = loss()
    assert float(coupling(made, ROWS)) > LEAST
    made.backward()  # the graph is still there


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.gru(x)[0])
        return result


RECURRENT, CENTRES = Recurrent(), nn.Parameter(torch.randn(6, 5))
CLUSTERS = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [4, 12])


def regularised(tokens: int) -> torch.Tensor:
    """Return the loss of a language model with its vocabulary in clusters, and penalties on what recurs."""
    words = torch.arange(6 * tokens).reshape(6, tokens) * 7 % 20
    hidden = RECURRENT.gru(X[:, None].expand(6, tokens, 8))[0]
    loss: torch.Tensor = CLUSTERS(hidden.reshape(-1, 6), words.flatten()).loss
    return loss + hidden.square().mean() + (hidden[:, 1:] - hidden[:, :-1]).square().mean()


def turned() -> torch.Tensor:
    """Return a loss of a recurrence over packed texts, whose samples are sorted by their length."""
    lengths = torch.tensor([3, 5, 2, 5, 4, 1])
    packed = nn.utils.rnn.pack_padded_sequence(X[:, None].expand(6, 5, 8), lengths, True, enforce_sorted=False)
    hidden = RECURRENT.gru(packed)[1][0]
    return F.cross_entropy(RECURRENT.head(hidden), CLASS) + hidden.square().mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.mse_loss(RECURRENT.gru(X[:, None].expand(6, 4, 8))[0], torch.zeros(6, 4, 6)),
        lambda: F.mse_loss(RECURRENT.gru(X[:, None].expand(6, 6, 8))[0], torch.zeros(6, 6, 6)),
        lambda: F.mse_loss(RECURRENT(X[:, None].expand(6, 4, 8)), torch.zeros(6, 4, 5)),
        lambda: each().mean() + CENTRES.norm() + NET[0].weight.norm(),
        lambda: (out() - CENTRES[Y.clamp(min=0)]).square().sum(1).mean(),
        lambda: F.pairwise_distance(*NET(torch.cat([X, X + 1])).chunk(2)).mean(),
        lambda: (out()[:, None] - CENTRES[None]).abs().mean(),
        lambda: out().max(1).values.mean(),
        lambda: each().mean() + CENTRES.abs().max() + (CENTRES @ CENTRES.T - torch.eye(6)).square().sum(),
        lambda: torch.cdist(out(), CENTRES).min(1).values.mean(),
        lambda: (out()[torch.arange(ROWS), Y.clamp(min=0)] - out()[:, 0]).abs().mean(),
        lambda: F.relu(1 - out()[MASK][:, :, None] - CENTRES.T[None]).mean(),
        lambda: (X[:, :ROWS] - out()[:, :1]).square().mean(),
        lambda: (X[:, :ROWS] * out()[:, :1]).mean(),
        lambda: F.mse_loss(out()[:, :1], X[:, :ROWS]),
        lambda: F.mse_loss(out()[:, :1].expand(ROWS, ROWS), X[0, :ROWS, None].expand(ROWS, ROWS)),
        lambda: F.cross_entropy(out() @ TARGET.T, Y.clamp(min=0)),
        lambda: regularised(4),
        lambda: regularised(6),
        turned,
        lambda: each()[MASK].mean() + each()[torch.tensor([0, 2, 3])].mean(),
        lambda: F.cross_entropy(NET(X[torch.tensor([3, 0, 5, 1, 2, 4])]), CLASS),
        lambda: F.cross_entropy(NET(X) @ CENTRES.T, torch.arange(ROWS)),
        lambda: F.cross_entropy(BY_CLASS(X) / 0.1, torch.arange(ROWS)),
        lambda: F.cross_entropy(BY_CLASS(NET[0](X)[:, :1].expand(ROWS, 8)), torch.arange(ROWS)),
    ],
    ids=[
        "gru",
        "as many times",
        "rnn and head",
        "a norm",
        "centres",
        "twins",
        "prototypes",
        "largest class",
        "penalties",
        "nearest prototype",
        "picked classes",
        "picked samples beside prototypes",
        "as many values as samples",
        "as many factors as samples",
        "as many targets as samples",
        "a target of each sample, expanded",
        "as many classes as samples",
        "clusters of words and what recurs",
        "as many words as samples",
        "packed texts",
        "a mask",
        "all samples in another order",
        "one sample of each class, and a product",
        "one sample of each class, below it no gradient",
        "one sample of each class",
    ],
)
def test_what_goes_on_within_a_sample_is_no_coupling(loss: Loss) -> None:
    assert float(coupling(loss(), ROWS)) <= LEAST


CLASS = Y.clamp(min=0)


def by_class() -> torch.Tensor:
    return torch.zeros(4)


def test_nodes_of_a_graph_that_are_picked_by_their_numbers_are_the_samples() -> None:
    nodes, edges = torch.randn(24, 8), torch.rand(24, 24)
    numbers = torch.tensor([7, 1, 20, 4, 9, 13])
    given = edges @ NET(edges @ nodes)
    for picked in (given[numbers], given.index_select(0, numbers)):
        assert float(coupling(F.cross_entropy(picked, CLASS), ROWS)) > LEAST
        assert float(coupling(F.cross_entropy(picked, CLASS), ROWS, numbered=True)) == 0.0
        assert float(coupling(F.cross_entropy(picked - picked.mean(0), CLASS), ROWS, numbered=True)) > LEAST
        assert float(coupling(F.cross_entropy(picked.softmax(0), CLASS), ROWS, numbered=True)) > LEAST


def test_a_function_of_a_statistic_of_the_batch_is_coupling_and_no_sum() -> None:
    for loss, name in (
        (-(out().softmax(1).mean(0) * out().softmax(1).mean(0).log()).sum(), "MeanBackward1"),
        (F.relu(1 - out().var(0)).mean(), "VarBackward0"),
        (by_class().scatter_reduce(0, CLASS, each(), "mean").mean(), "ScatterReduceBackward0"),
        ((by_class().scatter_add(0, CLASS, each()) / CLASS.bincount(minlength=4).clamp(min=1)).mean(), "ScatterAddBa"),
    ):
        found = read_loss(loss, ROWS)
        assert (found.couples or "").startswith(name)
        assert (found.counts, found.sum_over) == ([], None)
    for loss in (by_class().scatter_reduce(0, CLASS, each(), "sum"), by_class().scatter_add(0, CLASS, each())):
        assert read_loss(loss.sum() / ROWS, ROWS).counts == [6]


def test_what_a_mean_is_multiplied_by_is_noted_unless_it_is_its_count() -> None:
    def factor(loss: torch.Tensor) -> float:
        return float(read_loss(loss, ROWS).factor)

    mean = F.mse_loss(out(), TARGET)
    assert factor(mean) == factor(mean / mean.detach()) == 0.0
    assert factor(mean * 0.5) == factor(mean * 0.5) != factor(mean * 0.25)
    total = each_value().sum()
    four = F.mse_loss(NET(X[:4]), TARGET[:4], reduction="sum")
    assert float(read_loss(four * 0.25 / 4, 4).factor) == factor(total * 0.25 / 6), "0.25 is a count here, too"
    assert factor(mean * torch.tensor(2.0)) != factor(mean * torch.tensor(3.0))
    masked = (each() * MASK).sum() / MASK.sum()
    assert factor(masked) == 0.0
    assert factor(masked * 6) == factor(masked * 6) != factor(masked * 4)
    assert factor((each() * MASK / MASK.sum()).sum() * 6) != factor((each() * MASK / MASK.sum()).sum() * 4)
    assert factor(each_value().mean(0) @ WEIGHT) == factor(each_value().mean(0) @ WEIGHT)
    assert factor((each_value().mean(0) * WEIGHT).sum()) != factor((each_value().mean(0) * WEIGHT.flip(0)).sum())


def test_a_picked_parameter_is_no_picked_sample() -> None:
    pair = nn.Linear(8, CLASSES)
    loss = torch.exp(-PAIR[0]) * F.cross_entropy(pair(X[:2]), Y[:2].clamp(min=0)) + PAIR[0]
    found = read_loss(loss, 2)
    assert (found.sum_over, found.counts) == (None, [2.0])
    losses = [F.cross_entropy(pair(X[:2]), Y[:2].clamp(min=0)), F.mse_loss(pair(X[:2]), TARGET[:2])]
    found = read_loss(sum(s.exp() * loss for s, loss in zip(PAIR, losses)), 2)
    assert (found.sum_over, found.counts) == (None, [2.0, 10])
    both_losses = torch.stack(losses)
    found = read_loss(both_losses[0] + both_losses[1], 2)
    assert (found.sum_over, set(found.counts)) == (None, {2.0, 10})


def test_a_penalty_divided_by_the_micro_batchs_samples_is_seen() -> None:
    assert read_loss(each().mean() + 0.1 * penalty() / ROWS, ROWS).penalty
    assert read_loss((each().sum() + 0.1 * penalty()) / ROWS, ROWS).penalty
    assert not read_loss(each().mean() + 0.1 * penalty() * (1 / ROWS), ROWS).penalty, "a factor may be any number"
    first, second = ((each() * MASK).mean() + 0.1 * penalty() / torch.tensor(number) for number in (3, 4))
    assert read_loss(first, ROWS).divisor != read_loss(second, ROWS).divisor
    assert read_loss((each() * MASK).mean() + 0.1 * penalty(), ROWS).divisor == 0.0
    assert not read_loss(each().mean() + 0.1 * penalty() / 64, ROWS).penalty
    assert not read_loss(each().sum() / ROWS + 0.1 * penalty(), ROWS).penalty


def test_a_mean_divided_by_a_whole_number_is_seen() -> None:
    divided = {
        4: [lambda: F.cross_entropy(out(), Y) / 4, lambda: each_value().mean() / 4],
        0: [
            lambda: F.cross_entropy(out(), Y),
            lambda: F.cross_entropy(out(), Y) * 0.25,
            lambda: F.mse_loss(out(), TARGET) / 2.5,
            lambda: both().sum() / 2,
            lambda: (F.cross_entropy(out(), Y) + F.mse_loss(out(), TARGET)) / 2,
            lambda: each().sum() / ROWS,
            lambda: each_value().sum() / 4,
        ],
    }
    for number, losses in divided.items():
        assert [divisor_of_mean(loss(), ROWS) for loss in losses] == [number] * len(losses)
        assert [bool(look_at_division(loss(), ROWS)) for loss in losses] == [number > 0] * len(losses)


def test_the_square_of_a_norm_is_a_sum_of_squares() -> None:
    assert read_loss((out() - TARGET).norm() ** 2 / TARGET.numel(), ROWS).counts == [30]
    assert read_loss(torch.dist(out(), TARGET) ** 2 / ROWS, ROWS).counts == [6]
    assert read_loss(torch.linalg.vector_norm(out() - TARGET).square() / ROWS, ROWS).counts == [6]
    assert read_loss((out() - TARGET).norm() ** 3 / ROWS, ROWS).bends == "PowBackward0"


def test_a_factor_inside_a_mean_is_noted_like_one_outside() -> None:
    factors = [read_loss((each() * value).mean(), ROWS).factor for value in (0.5, 0.5, 0.25, torch.tensor(0.25))]
    assert factors[0] == factors[1] != factors[2]
    assert factors[3] not in (0.0, factors[0])


def test_a_loss_of_ones_own_function_is_not_gone_through_twice() -> None:
    assert coupling(Own.apply(out()), ROWS) == 0.0
