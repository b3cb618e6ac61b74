"""How much a micro-batch counts where no weight is given: what its loss was divided by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lone import flat, join
from one_process import Scripted, Worker
from paceline import MisuseError
from paceline.step.losses.loss_weights import (
    APART,
    FINE,
    GIVEN,
    ITEMS,
    ROUGH,
    SAMPLES,
    UNLIKE_ROWS,
    UNREAD,
    Tally,
    _terms_number,
    look_at_given,
    read_weight,
)

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(-1, 4, (24,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(X, torch.where(Y < 0, -100, Y))
Losses = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def net() -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(3, 4).double()


def trained(folder: Path, loss: Losses, *, micro_batch: int = 3, **backward: Any) -> tuple[torch.Tensor, list[float]]:
    """A training alone, in micro-batches: its parameters, and the weights of its steps."""
    with join(folder, device="cpu") as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = []
        for step in fleet.steps(DATA, global_batch=8, micro_batch=micro_batch, shuffle=False):
            for x, y in step:
                step.backward(loss(model, x, y), **backward)
            step.commit(optimizer)
            assert step.record is not None
            weights.append(step.record.weight)
        return flat(model), weights


def plain(loss: Losses) -> torch.Tensor:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in torch.arange(24).split(8):
        optimizer.zero_grad()
        loss(model, *(tensor[part] for tensor in DATA.tensors)).backward()
        optimizer.step()
    return flat(model)


def test_ignored_labels_do_not_count_and_a_micro_batch_of_them_counts_nothing(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    ours, weights = trained(tmp_path, loss, micro_batch=1)
    assert torch.allclose(ours, plain(loss), rtol=0, atol=1e-14)
    assert weights == [float((part >= 0).sum()) for part in Y.split(8)]


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y >= 0
    return (model(x).square().mean(1) * kept).sum() / kept.sum().clamp(min=1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: F.cross_entropy(model(x), y),
        lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
        masked,
    ],
    ids=["ignored", "smoothed", "a mask"],
)
def test_counts_that_stay_on_a_device_weigh_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Losses
) -> None:
    kept = lambda count: count.detach().reshape(()) if isinstance(count, torch.Tensor) else count  # noqa: E731
    monkeypatch.setattr("paceline.step.losses.loss_graph._number", kept)
    ours, weights = trained(tmp_path, loss, micro_batch=1)
    assert torch.allclose(ours, plain(loss), rtol=0, atol=1e-14)
    assert weights == [float((part >= 0).sum()) for part in Y.split(8)]


def test_means_over_features_count_by_samples_and_whole_batches_are_torchs_to_the_bit(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x)[:, :3], x)

    ours, weights = trained(tmp_path, loss, micro_batch=8)
    assert weights == [8.0] * 3
    assert torch.equal(ours, plain(loss))


def test_a_weight_that_is_given_counts_whatever_the_graph_says(tmp_path: Path) -> None:
    ours, weights = trained(tmp_path, lambda model, x, y: model(x).square().sum(), weight=2)
    assert weights == [6.0] * 3
    third = trained(tmp_path / "third", lambda model, x, y: model(x).square().sum() / 3, weight=5)[0]
    assert not torch.allclose(ours, third)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x, y: model(x).square().sum(), "the loss is a sum over the micro-batch and not a mean.*len"),
        (lambda model, x, y: model(x).square().sum() / 8, r"a sum divided by 8, which is neither .*samples \(3\)"),
    ],
)
def test_a_sum_is_refused(tmp_path: Path, loss: Losses, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        trained(tmp_path, loss)


def times(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """A sum of each time step, as many as the micro-batch's longest sample has."""
    lengths, out = 2 + (x[:, :2] > 0).sum(1), model(x)
    return [(out[:, time].square() * (time < lengths)).sum() for time in range(int(lengths.max()))]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: sum(one / len(x) for one in times(model, x)),
        lambda model, x, y: sum(times(model, x)) / len(x),
    ],
    ids=["each", "last"],
)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_any_number_of_sums_over_time_may_be_divided_by_the_samples(
    tmp_path: Path, loss: Losses, micro_batch: int
) -> None:
    ours, weights = trained(tmp_path, loss, micro_batch=micro_batch)
    assert torch.allclose(ours, plain(loss), rtol=0, atol=1e-14)
    assert weights == [8.0] * 3
    assert '"level": "warning"' not in (tmp_path / "run" / "events.jsonl").read_text()


def test_means_that_are_not_proportional_are_refused(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) + model(x).square().mean()

    with pytest.raises(MisuseError, match="the losses of step 0 add up means over unlike things"):
        trained(tmp_path, loss)
    trained(tmp_path / "given", loss, weight=3)


def test_a_loss_that_could_be_read_in_two_ways_is_refused_where_they_differ(tmp_path: Path) -> None:
    def times_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum(1).expand(3, len(x)).mean(1).mean()  # three times, and three samples or two

    with pytest.raises(MisuseError, match=r"can be read in two ways.*weight=len\(x\)"):
        trained(tmp_path, times_first)


def test_a_dimension_as_long_as_the_samples_is_theirs_before_a_multiple_of_it(tmp_path: Path) -> None:
    def times_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum(1).expand(6, len(x)).mean(1).mean()

    def classes_last(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = (y != -100).to(x)  # label smoothing, over twelve classes
        smooth = model(x)[:, None].expand(len(x), 4, 4).repeat(1, 1, 3).log_softmax(-1).mean(-1).mean(1)
        return -(smooth * kept).sum() / kept.sum()

    for loss in (times_first, classes_last):
        assert torch.allclose(trained(tmp_path / loss.__name__, loss)[0], plain(loss), rtol=0, atol=1e-14)


def test_what_could_be_read_in_two_ways_is_read_as_other_micro_batches_are() -> None:
    model, like = net(), Tally(read=[(3.0, 3)], raw=True)
    losses = [model(X[:4] + n).square().mean() for n in range(2)]  # two samples of four values, or two views of them
    loss = torch.stack(losses).mean()
    assert weighed(loss, 2)[0] == 16.0
    assert weighed(loss, 2, like=like)[0] == weighed(loss, 2, unit=1.0)[0] == 2.0
    assert weighed(loss, 2, unit=8.0)[0] == 2.0
    assert weighed(loss, 2)[1].unsure


def test_means_of_features_first_are_one_process_s(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x)[:, :3] - x).square().mean(0).mean()

    ours, weights = trained(tmp_path, loss)
    assert torch.allclose(ours, plain(loss), rtol=0, atol=1e-14)
    assert weights == [8.0] * 3


def test_the_others_counts_are_looked_at_too() -> None:
    transport = Scripted(2)
    worker = Worker(transport)
    try:
        transport.answer = lambda number, facts: facts.write(1, samples=4.0, weight=12.0, kinds=float(ITEMS | GIVEN))
        step = next(iter(worker.steps))
        worker.work(step, commit=False)
        with pytest.raises(MisuseError, match="others were given a weight: give every"):
            step.reduce()
    finally:
        worker.close()


def weighed(loss: torch.Tensor, rows: int, **how: Any) -> tuple[Any, Tally, str]:
    tally = Tally()
    weight, said = read_weight(loss, rows, tally, **{"unit": None, "part": False, **how})
    return weight, tally, said


def test_the_first_round_is_told_of_items_per_sample() -> None:
    out = net()(X[:6])
    weight, tally, _ = weighed(out.square().mean(), 6)
    assert weight == 24.0
    terms = {"terms": _terms_number(frozenset({"Mean"}), 1)}
    assert tally.facts(weight) == {"kinds": ITEMS | FINE, "unit": 4.0, "ratio": 0.0, **terms}
    tally.add(weighed(out[:, :3].square().mean(), 6)[1])
    assert tally.facts(42.0)["unit"] == -1.0
    weight, tally, _ = weighed(out.square().mean(), 6, unit=4.0)
    assert weight == 6.0
    assert tally.facts(weight) == {"kinds": SAMPLES | FINE, "unit": 0.0, "ratio": 0.0, **terms}


def test_the_ratio_of_two_counts_is_compared_within_rounding() -> None:
    out = net()(X[:6])
    whole = F.cross_entropy(out, Y[:6].clamp(min=0)) + out.square().mean()
    _, tally, _ = weighed(whole, 6)
    total = Tally()
    total.add(tally)
    total.add(weighed(whole, 6)[1])
    assert not int(total.facts(12.0)["kinds"]) & APART
    ignored = torch.tensor([0, -100, 1, 2, 3, 0])
    total.add(weighed(F.cross_entropy(out, ignored) + out.square().mean(), 6)[1])
    assert int(total.facts(12.0)["kinds"]) & APART
    assert weighed(out.bfloat16().mean(), 6)[1].precision == ROUGH


def test_a_loss_that_cannot_be_read_counts_by_samples() -> None:
    out = net()(X[:6])
    weight, tally, said = weighed(torch.where(Y[0] > -5, out.mean(), out.sum()), 6)
    assert (weight, said) == (6.0, "")
    tally.add(weighed(torch.where(Y[0] > -5, out[:3].mean(), out.sum()), 3)[1])
    assert tally.facts(9.0)["kinds"] == UNREAD | UNLIKE_ROWS
    assert "SqrtBackward0" in weighed(out.square().mean().sqrt(), 6)[2]


def test_a_count_of_nothing_that_was_made_one_counts_nothing() -> None:
    out, none = net()(X[:6]).sum(1), torch.zeros(6, dtype=torch.bool)
    assert weighed((out * none).sum() / none.sum().clamp(min=1), 6)[0] == 0.0
    none[0] = True
    assert weighed((out * none).sum() / none.sum().clamp(min=1), 6)[0] == 1.0


def test_losses_of_several_models_have_their_samples_as_one_weight() -> None:
    out, tally = net()(X[:6]), Tally()
    for loss in (out.square().mean(), out.mean(1).mean()):
        assert read_weight(loss, 6, tally, unit=None, part=True) == (6.0, "")
    assert tally.facts(6.0)["kinds"] == SAMPLES | FINE
    assert tally.ratio == pytest.approx(4 * 3**0.5 + 5**0.5)


def test_a_mean_over_nothing_beside_one_over_something_is_refused() -> None:
    out, ignored = net()(X[:3]), torch.full((3,), -100)
    assert weighed(F.cross_entropy(out, ignored), 3)[0] == 0.0
    weight, tally, _ = weighed(F.cross_entropy(out, ignored) + out.square().mean(), 3)
    total = Tally()
    total.add(tally)
    assert weight == 12.0
    assert int(total.facts(weight)["kinds"]) & APART


def test_a_count_that_is_not_finite_is_left_to_the_gradient() -> None:
    out = net()(X[:3])
    assert weighed(out.sum() / torch.tensor(float("nan")), 3)[0] == 3.0


def test_a_weight_beside_several_counts_is_compared_with_the_samples_alone() -> None:
    """One of them may stay the same, as that of boundary points does: then a weight of the samples is right."""
    net, boundary = nn.Linear(3, 1), torch.randn(10, 3)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    for weight, proportions in ((4, [1.0]), (6, [4 / 6])):
        tally = Tally()
        x = torch.randn(4, 3)
        assert look_at_given(net(x).square().mean() + net(boundary).square().mean(), weight, 4, tally) == ""
        assert tally.proportions == proportions
    tally = Tally()
    tokens = (net(x).square() * mask).sum() / mask.sum()
    assert look_at_given(tokens, 6.0, 4, tally) == ""
    assert tally.proportions == [1.0]


Penalty = Callable[[torch.Tensor, Any], torch.Tensor]


def log_of(folder: Path, data: Any, penalty: Penalty, *, loops: int = 1, **options: Any) -> str:
    """Train with a penalty on the weights, loop after loop; return the run's log."""
    with join(folder, device="cpu") as fleet:
        model = fleet.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(loops):
            steps = fleet.steps(data, **options)
            for step in steps:
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y) + penalty(model.weight.square().sum(), steps))
                step.commit(optimizer)
    return (folder / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "penalty", "warned"),
    [
        (5, False, lambda penalty, steps: penalty / 5, True),
        (5, True, lambda penalty, steps: penalty / 4, True),
        (5, True, lambda penalty, steps: penalty / 5, False),
        (8, False, lambda penalty, steps: penalty / 3, False),
        (5, False, lambda penalty, steps: penalty / (len(steps) // 2), False),
        (5, False, lambda penalty, steps: penalty, False),
    ],
    ids=["loader", "its last batch dropped", "another number", "as many updates", "updates", "plain"],
)
def test_a_penalty_divided_by_the_loaders_length_is_warned_of(
    tmp_path: Path, batch_size: int, drop_last: bool, penalty: Penalty, warned: bool
) -> None:
    data = DataLoader(DATA, batch_size, drop_last=drop_last)
    log = log_of(tmp_path, data, penalty, global_batch=8, epochs=2, drop_last=False)
    assert log.count("which is len(loader): that counts micro-batches, and an epoch has 3 updates") == warned


class Batches:
    """A dataset whose samples are batches."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[3 * index : 3 * index + 3] for tensor in DATA.tensors)


@pytest.mark.parametrize(
    ("data", "options", "times"),
    [
        (DATA, {"global_batch": 8, "micro_batch": 1}, 1),
        (DATA, {"global_batch": 8, "micro_batch": 3}, 0),
        (DATA, {"global_batch": 1}, 0),
        (DataLoader(DATA, batch_sampler=[[number] for number in range(24)]), {"global_batch": 4}, 0),
        (DataLoader(Batches(), 1, collate_fn=lambda samples: samples[0]), {"global_batch": 4}, 0),  # type: ignore[arg-type]
    ],
    ids=["single samples", "several", "a step of one", "a batch sampler", "samples that are batches"],
)
def test_micro_batches_of_one_sample_are_noted_once_per_run(
    tmp_path: Path, data: Any, options: dict[str, Any], times: int
) -> None:
    log = log_of(tmp_path, data, lambda penalty, steps: penalty, loops=2, **options)
    assert log.count("nothing shows whether the loss couples samples") == times
