"""The optimiser on the fleet's averaged update."""

import math
from typing import Any

import pytest
import torch

from paceline.averaging.weighted_average import Outer, OuterSGD


def rounds(count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 3), (5,))
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(count)]


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]


@pytest.mark.parametrize("settings", [Outer(), Outer(nesterov=False), Outer(lr=0.3, momentum=0.0)])
def test_it_equals_torch_sgd_on_the_negative_update(settings: Outer) -> None:
    ours, theirs = zeros(), [torch.nn.Parameter(t) for t in zeros()]
    outer = OuterSGD(settings)
    nesterov = settings.nesterov and settings.momentum > 0
    reference = torch.optim.SGD(theirs, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
    for update in rounds(5):
        outer.step(ours, update)
        for parameter, part in zip(theirs, update, strict=True):
            parameter.grad = -part
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-12)


def test_a_rate_of_one_without_momentum_is_the_plain_average() -> None:
    start, (update,) = zeros(), rounds(1)
    OuterSGD(Outer(lr=1.0, momentum=0.0)).step(start, update)
    assert all(torch.equal(a, b) for a, b in zip(start, update, strict=True))


def test_the_update_itself_is_left_alone() -> None:
    (update,) = rounds(1)
    before = [part.clone() for part in update]
    outer = OuterSGD(Outer())
    outer.step(zeros(), update)
    outer.step(zeros(), update)
    assert all(torch.equal(a, b) for a, b in zip(update, before, strict=True))


def test_a_saved_velocity_goes_on_as_before_and_is_no_view_of_the_living_one() -> None:
    first, *rest = rounds(4)
    outer, copy = OuterSGD(Outer()), OuterSGD(Outer())
    here = zeros()
    outer.step(here, first)
    there, state = [t.clone() for t in here], outer.state_dict()
    for update in rest:
        outer.step(here, update)
    copy.load_state_dict(state)
    for update in rest:
        copy.step(there, update)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_fresh_state_can_be_saved_and_loaded() -> None:
    outer = OuterSGD(Outer())
    outer.load_state_dict(OuterSGD(Outer()).state_dict())
    assert outer.velocity is None


@pytest.mark.parametrize(
    "bad", [{"lr": 0.0}, {"lr": -1.0}, {"lr": math.inf}, {"momentum": 1.0}, {"momentum": -0.1}, {"momentum": math.nan}]
)
def test_settings_that_cannot_train_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="the outer"):
        Outer(**bad)
