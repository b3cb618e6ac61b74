"""Where optimisers may step, as torch's hooks tell of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as hooks

from lone import join, linear, mse, numbers
from paceline.errors import MisuseError
from paceline.step.checks.updates import UpdateGuard
from paceline.step.tracking import Tracked


@pytest.fixture
def model() -> nn.Module:
    return linear()


@pytest.fixture
def guard(model: nn.Module) -> Iterator[UpdateGuard]:
    tracked = Tracked(model.parameters)
    yield tracked.updates
    tracked.close()


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return list(model.parameters())


LOOP = object()


def test_a_layer_that_a_model_gets_within_a_loop_is_not_the_loops(guard: UpdateGuard, model: nn.Module) -> None:
    optimizer, summed = SGD(model.parameters(), lr=0.1), list(model.parameters())
    guard.begin(LOOP, 0, summed)
    model.head = nn.Linear(1, 1)
    optimizer.add_param_group({"params": model.head.parameters()})
    guard.combined(True, with_gradients(model))
    optimizer.step()
    guard.committing(True)
    guard.updated()
    guard.begin(LOOP, 1, summed)
    before = guard.gradients_outside()
    model.head(torch.ones(1)).sum().backward()
    with pytest.raises(MisuseError, match="A layer that a model gets in the middle of a loop"):
        guard.check_outside(before)
    guard.begin(object(), 0, list(model.parameters()))
    assert guard.gradients_outside() == [], "the next loop sums it"


def test_an_update_that_raised_does_not_count_as_made(model: nn.Module, guard: UpdateGuard) -> None:
    class Fails(SGD):
        fails = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fails:
                raise RuntimeError("no memory")
            super().step()

    optimizer = Fails(model.parameters(), lr=0.1)
    guard.begin(LOOP, 0)
    guard.combined(True, with_gradients(model))
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    guard.committing(True)
    guard.updated()


def test_a_step_refused_in_its_hook_changes_nothing(model: nn.Module, guard: UpdateGuard) -> None:
    optimizer, before = SGD(model.parameters(), lr=0.1), [p.detach().clone() for p in model.parameters()]
    guard.begin(LOOP, 4)
    with_gradients(model)
    with pytest.raises(MisuseError, match="SGD stepped in the middle of step 4"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_outside_of_a_loop_nothing_is_refused(model: nn.Module, guard: UpdateGuard) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    guard.begin(LOOP, 0)
    guard.end(object())
    with pytest.raises(MisuseError):
        optimizer.step()
    guard.end(LOOP)
    optimizer.step()
    optimizer.step()


def test_a_parameter_group_that_is_added_makes_an_optimiser_the_fleets(model: nn.Module, guard: UpdateGuard) -> None:
    optimizer: Optimizer = SGD(linear().parameters(), lr=0.1)
    guard.begin(LOOP, 0)
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(MisuseError):
        optimizer.step()


def test_what_a_worker_tells_is_of_the_step_before(model: nn.Module, guard: UpdateGuard) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    assert guard.reported(0) == 0.0
    for step, applied, told in ((0, True, 2.0), (1, False, 0.0)):
        guard.begin(LOOP, step)
        guard.combined(applied, with_gradients(model))
        optimizer.step()
        guard.committing(applied)
        guard.updated()
        guard.committed(finished=False)
        assert guard.reported(step + 1) == told
        assert guard.reported(step + 2) == 0.0


def test_hooks_end_with_the_fleet_and_fleets_may_follow_each_other(tmp_path: Path) -> None:
    before = len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)
    for number in range(2):
        with join(tmp_path / str(number)) as fleet:
            model = fleet.model(linear())
            optimizer = SGD(model.parameters(), lr=0.1)
            for step in fleet.steps(numbers(), global_batch=8):
                for x, y in step:
                    step.backward(mse(model, x, y))
                step.commit(optimizer)
            optimizer.step()
    with pytest.raises(RuntimeError, match="mine"), join(tmp_path / "error"):
        raise RuntimeError("mine")
    assert (len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)) == before


def test_parameters_that_are_changed_by_hand_in_the_middle_of_a_step_are_refused(tmp_path: Path) -> None:
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        step = next(iter(fleet.steps(numbers(), global_batch=8, micro_batch=4)))
        for x, y in step:
            step.backward(mse(model, x, y))
            with torch.no_grad():
                model.weight.add_(0.1)
        with pytest.raises(MisuseError, match="parameters changed in the middle of a step"):
            step.commit(SGD(model.parameters(), lr=0.1))
