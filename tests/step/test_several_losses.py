"""A backward for each model within one micro-batch of a worker alone: what is exact, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from lone import join, linear, mse, numbers
from paceline import MisuseError
from paceline.step.losses.several_losses import parameters_of

Pair = tuple[nn.Linear, nn.Linear]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def pair(fleet: paceline.Fleet) -> Pair:
    return fleet.model(linear()), fleet.model(linear())


def opened(fleet: paceline.Fleet, **options: Any) -> tuple[paceline.Step, Iterator[Any]]:
    settings = {"global_batch": 8, "micro_batch": 4, "shuffle": False} | options
    step = next(iter(fleet.steps(numbers(), **settings)))
    return step, iter(step)


def both(pair: Pair, x: torch.Tensor) -> torch.Tensor:
    """A loss that reaches both."""
    return (pair[0](x) * pair[1](x)).mean()


def test_the_gradient_is_for_the_named_models_alone(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet)
    for x, y in batches:
        step.backward(both(pair, x), models=pair[0])
        step.backward(2 * mse(pair[1], x, y), models=[pair[1]])
    step.reduce()
    x, y = (part[:8] for part in numbers().tensors)
    first = torch.autograd.grad(both(pair, x), list(pair[0].parameters()))
    second = torch.autograd.grad(2 * mse(pair[1], x, y), list(pair[1].parameters()))
    for parameter, right in zip([*pair[0].parameters(), *pair[1].parameters()], [*first, *second], strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-12, atol=1e-12)
    assert step.loss == pytest.approx((both(pair, x) + 2 * mse(pair[1], x, y)).item(), rel=1e-12)
    assert step.record is not None
    assert step.record.micro_batches == (2,)
    assert step.record.weight == 8


def test_one_graph_serves_several_losses_when_it_is_retained(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet, global_batch=4)
    for x, _ in batches:
        loss = both(pair, x)
        step.backward(loss, models=pair[0], retain_graph=True)
        step.backward(-loss, models=pair[1])
    step.reduce()
    x = numbers().tensors[0][:4]
    right = torch.autograd.grad(both(pair, x), [pair[0].weight, pair[1].weight])
    torch.testing.assert_close(pair[0].weight.grad, right[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pair[1].weight.grad, -right[1], rtol=1e-12, atol=1e-12)


def test_a_model_that_no_loss_was_for_is_not_updated(fleet: paceline.Fleet, pair: Pair) -> None:
    before = pair[1].weight.detach().clone()
    step, batches = opened(fleet)
    for x, _ in batches:
        step.backward(both(pair, x), models=pair[0])
    step.commit(torch.optim.SGD([*pair[0].parameters(), *pair[1].parameters()], lr=0.1, weight_decay=0.1))
    assert torch.equal(pair[1].weight, before), "nor decayed: without a gradient torch leaves a parameter alone"
    assert not torch.equal(pair[0].weight, before)


def test_memory_that_runs_out_in_the_second_part_lets_the_first_count_once(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet, global_batch=4, micro_batch="auto", fixed_micro_batch=True)
    sizes = []
    for x, y in batches:
        sizes.append(len(x))
        step.backward(both(pair, x), models=pair[0])
        hidden = pair[1](x)
        if len(sizes) == 1:
            hidden.register_hook(_run_out)
        step.backward((hidden - y).square().mean(), models=pair[1])
    step.reduce()
    assert sizes == [4, 2, 2]
    x = numbers().tensors[0][:4]
    right = torch.autograd.grad(both(pair, x), pair[0].weight)[0]
    torch.testing.assert_close(pair[0].weight.grad, right, rtol=1e-12, atol=1e-12)
    assert step.record is not None
    assert step.record.weight == 4


def _run_out(grad: Any) -> None:
    raise torch.OutOfMemoryError("for the test")


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (lambda step, pair, x: step.backward(both(pair, x), models=pair[0]), "twice for the same parameters"),
        (lambda step, pair, x: step.backward(both(pair, x), models=pair), "twice for the same parameters"),
        (lambda step, pair, x: step.backward(both(pair, x)), r"step\.backward\(loss\) after step\.backward\(loss, mod"),
        (lambda step, pair, x: step.skip(), r"step\.skip\(\) after step\.backward"),
        (lambda step, pair, x: step.backward(pair[0](x).mean(), models=pair[1]), "reached no parameter of these"),
    ],
)
def test_a_second_use_of_a_micro_batch_that_would_not_be_a_mean_is_refused(
    fleet: paceline.Fleet, pair: Pair, again: Any, said: str
) -> None:
    step, batches = opened(fleet)
    x, _ = next(batches)
    step.backward(both(pair, x), models=pair[0])
    with pytest.raises(MisuseError, match=said):
        again(step, pair, x)


def test_unlike_weights_within_a_micro_batch_are_refused(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet)
    x, y = next(batches)
    step.backward(both(pair, x), models=pair[0])
    with pytest.raises(ValueError, match="unlike weights, 4 and 7"):
        step.backward(mse(pair[1], x, y), models=pair[1], weight=7)


def test_micro_batches_of_one_step_that_train_unlike_models_are_refused(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet)
    x, _ = next(batches)
    step.backward(both(pair, x), models=pair[0])
    x, _ = next(batches)
    with pytest.raises(MisuseError, match="trained unlike models"):
        step.backward(both(pair, x))


def test_a_commit_that_forgets_the_optimizer_of_a_model_is_refused(fleet: paceline.Fleet, pair: Pair) -> None:
    step, batches = opened(fleet)
    for x, y in batches:
        step.backward(both(pair, x), models=pair[0])
        step.backward(mse(pair[1], x, y), models=pair[1])
    with pytest.raises(MisuseError, match=r"no optimizer of step\.commit updates"):
        step.commit(torch.optim.SGD(pair[0].parameters(), lr=0.1))


def test_models_that_are_not_the_fleets_or_frozen_are_refused(pair: Pair) -> None:
    ours = [*pair[0].parameters(), *pair[1].parameters()]
    with pytest.raises(ValueError, match="not the fleet's"):
        parameters_of(linear(), ours)
    with pytest.raises(ValueError, match=r"takes modules that fleet\.model returned, got Parameter"):
        parameters_of(pair[0].parameters(), ours)
    with pytest.raises(ValueError, match="all of them are frozen"):
        parameters_of(pair[0].requires_grad_(False), ours)
