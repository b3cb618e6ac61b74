"""An optimiser that needs second derivatives, through the user's loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lone import join, numbers
from paceline.gradients import second_order

AdaHessian = pytest.importorskip("pytorch_optimizer").AdaHessian


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def inputs() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(32, 3, generator=generator, dtype=torch.float64))


def test_the_loop_keeps_the_graph_for_a_tracked_adahessian_and_steps_as_by_hand(tmp_path: Path) -> None:
    by_hand, data = network(), inputs()
    optimizer = AdaHessian(by_hand.parameters(), lr=0.05)
    for batch in data.tensors[0].split(8):
        loss_of(by_hand, batch).backward(create_graph=True)
        torch.manual_seed(7)
        second_order.step(optimizer)
    with join(tmp_path) as fleet:
        model = fleet.model(network())
        ours = AdaHessian(model.parameters(), lr=0.05)
        fleet.track(optimizer=ours)
        for step in fleet.steps(data, global_batch=8, micro_batch=8, shuffle=False):
            for (x,) in step:
                step.backward(loss_of(model, x))
            torch.manual_seed(7)
            step.commit(ours)
        assert all(parameter.grad is None for parameter in model.parameters()), "the graph would live on"
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_untracked_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(network())
        optimizer = AdaHessian(model.parameters(), lr=0.05)
        step = next(iter(fleet.steps(inputs(), global_batch=8, micro_batch=8)))
        for (x,) in step:
            step.backward(loss_of(model, x))
        with pytest.raises(ValueError, match="second derivatives"):
            step.commit(optimizer)


def test_a_model_without_second_derivatives_is_refused(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(nn.Linear(3, 1).double())
        optimizer = AdaHessian(model.parameters(), lr=0.05)
        fleet.track(optimizer=optimizer)
        step = next(iter(fleet.steps(inputs(), global_batch=8, micro_batch=8)))
        for (x,) in step:
            step.backward(model(x).mean())
        with pytest.raises(ValueError, match="second derivatives"):
            step.commit(optimizer)


def test_other_optimisers_keep_no_graph(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(network())
        fleet.track(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert not fleet.steps(numbers(), global_batch=8, micro_batch=4)._loop.gradients.keep_graph
