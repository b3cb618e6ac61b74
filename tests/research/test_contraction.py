"""How much a step contracts, against the optimisers themselves on the quadratic ``lambda/2 w^2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import paceline
from lone import join, linear, mse, numbers
from paceline.research.wp_weights import contraction_of, log_contraction


def parameter(size: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size, dtype=torch.float64))


def measured(optimizer: Optimizer, steps: int = 400, *, of: int = 200) -> float:
    """The mean over all parameters of log |w|'s slope, in the last ``of`` steps; the loss is 0, the decay is all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sizes: list[float] = []
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        sizes.append(float(torch.cat([p.detach() for p in parameters]).abs().log().mean()))
    return (sizes[-1] - sizes[-1 - of]) / of


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.6, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "dampening": 0.9},
        {"dampening": 0.5},
        {"momentum": 0.9, "maximize": True},
    ],
)
@pytest.mark.parametrize(("rate", "decay"), [(0.1, 5e-3), (0.05, 0.02)])
def test_sgd_contracts_by_the_dominant_root(how: dict[str, Any], rate: float, decay: float) -> None:
    optimizer = SGD([parameter()], lr=rate, weight_decay=decay, **how)
    assert contraction_of([optimizer], None) == pytest.approx(measured(optimizer), rel=1e-3)


def test_momentum_makes_decay_about_ten_times_as_strong() -> None:
    plain, heavy = (SGD([parameter()], lr=0.1, weight_decay=5e-3, momentum=m) for m in (0.0, 0.9))
    assert contraction_of([plain], None) == pytest.approx(-0.0005, rel=0.001)
    assert contraction_of([heavy], None) == pytest.approx(-0.00526, rel=0.001)


@given(st.floats(1e-6, 0.9), st.floats(0, 0.95), st.booleans())
def test_the_root_is_that_of_the_updates_matrix(a: float, momentum: float, nesterov: bool) -> None:
    matrix = torch.tensor([[1 - a, -momentum], [a, momentum]], dtype=torch.float64)
    if nesterov:
        matrix = torch.tensor([[1 - a * (1 + momentum), -(momentum**2)], [a, momentum]], dtype=torch.float64)
    roots = torch.linalg.eigvals(matrix)
    dominant = roots[roots.abs().argmax()]
    if abs(dominant.imag) < 1e-9 and dominant.real <= 0:
        with pytest.raises(ValueError, match="goes beyond the optimum"):
            log_contraction(1.0, a, momentum=momentum, nesterov=nesterov)
        return
    found = log_contraction(1.0, a, momentum=momentum, nesterov=nesterov)
    assert math.exp(found) == pytest.approx(float(dominant.abs()), abs=1e-6)
    assert found < 0


def test_where_the_way_oscillates_it_shrinks_by_the_root_of_the_momentum() -> None:
    optimizer = SGD([parameter()], lr=1.0, weight_decay=0.1, momentum=0.5)
    assert contraction_of([optimizer], None) == pytest.approx(math.log(0.5) / 2)
    assert measured(optimizer, 600, of=500) == pytest.approx(math.log(0.5) / 2, rel=0.02)


def test_each_parameter_group_counts_by_its_parameters() -> None:
    """The usual no-decay group: means of rate and decay would give -0.0005 * 0.5 and forget the sizes."""
    groups = [
        {"params": [parameter(30)], "weight_decay": 0.02, "lr": 0.05, "momentum": 0.9},
        {"params": [parameter(6), parameter(4)], "weight_decay": 0.0, "lr": 0.1},
        {"params": [parameter(10)], "weight_decay": 0.01, "lr": 0.2},
    ]
    optimizer = SGD(groups, lr=0.1)
    found = contraction_of([optimizer], None)
    assert found == pytest.approx(measured(optimizer), rel=1e-3)
    assert found == pytest.approx(0.6 * log_contraction(0.05, 0.02, momentum=0.9) + 0.2 * log_contraction(0.2, 0.01))


def test_several_optimisers_are_as_one_with_all_their_groups() -> None:
    one, two = SGD([parameter(3)], lr=0.1, weight_decay=0.1), SGD([parameter(1)], lr=0.2, weight_decay=0.3)
    assert contraction_of([one, two], None) == pytest.approx(
        (3 * log_contraction(0.1, 0.1) + log_contraction(0.2, 0.3)) / 4
    )


def test_parameters_that_are_not_trained_do_not_count() -> None:
    frozen = parameter(100).requires_grad_(False)
    optimizer = SGD([{"params": [frozen], "weight_decay": 0.0}, {"params": [parameter()]}], lr=0.1, weight_decay=0.1)
    assert contraction_of([optimizer], None) == pytest.approx(log_contraction(0.1, 0.1))


def test_each_step_has_its_own_rate() -> None:
    optimizer = SGD([parameter()], lr=0.1, weight_decay=0.1)
    before = contraction_of([optimizer], None)
    optimizer.param_groups[0]["lr"] = 0.01
    assert contraction_of([optimizer], None) == pytest.approx(log_contraction(0.01, 0.1))
    assert before == pytest.approx(log_contraction(0.1, 0.1))


def adahessian(parameters: Sequence[torch.nn.Parameter], **how: Any) -> Optimizer:
    made: Optimizer = pytest.importorskip("pytorch_optimizer").AdaHessian(parameters, **how)
    return made


@pytest.mark.parametrize(
    "make",
    [
        AdamW,
        lambda parameters, **how: Adam(parameters, decoupled_weight_decay=True, **how),
        torch.optim.Adafactor,
        lambda _, **how: torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))], **how),
    ],
)
def test_decoupled_decay_contracts_by_exactly_one_minus_rate_times_decay(make: Callable[..., Optimizer]) -> None:
    optimizer = make([parameter()], lr=0.05, weight_decay=0.02)
    assert contraction_of([optimizer], None) == pytest.approx(math.log1p(-0.001), rel=1e-12)
    parameters = optimizer.param_groups[0]["params"][0]
    parameters.grad = torch.zeros_like(parameters)
    optimizer.step()
    assert float(parameters.detach().flatten()[0]) == pytest.approx(0.999, rel=1e-6)


def test_adahessian_decays_apart_from_its_gradient_unless_it_was_asked_to_couple_them() -> None:
    apart = adahessian([parameter()], lr=0.1, weight_decay=0.1)
    assert contraction_of([apart], None) == pytest.approx(math.log1p(-0.01), rel=1e-12)
    for coupled in ({"weight_decouple": False}, {"fixed_decay": True}):
        with pytest.raises(ValueError, match="AdaHessian"):
            contraction_of([adahessian([parameter()], lr=0.1, weight_decay=0.1, **coupled)], None)


@pytest.mark.parametrize("kind", [Adam, RMSprop, torch.optim.Adagrad, torch.optim.ASGD])
def test_decay_in_a_normalised_gradient_is_refused_with_what_to_write(kind: Callable[..., Optimizer]) -> None:
    with pytest.raises(ValueError, match=r'contracts through a weight decay of 0.01 .*AdamW.*weights="samples"'):
        contraction_of([kind([parameter()], lr=0.1, weight_decay=0.01)], None)
    assert contraction_of([kind([parameter()], lr=0.1, weight_decay=0.0)], None) == 0.0, "there is nothing to know"


def test_an_optimiser_that_does_not_say_its_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS does not say its weight decay"):
        contraction_of([torch.optim.LBFGS([parameter()])], None)
    with pytest.raises(ValueError, match=r"step.commit\(optimizer\)"):
        contraction_of([], None)


def test_decay_in_the_loss_is_sgds_and_nobody_elses() -> None:
    heavy = SGD([parameter()], lr=0.1, momentum=0.9)
    assert contraction_of([heavy], 5e-3) == log_contraction(0.1, 5e-3, momentum=0.9)
    with pytest.raises(ValueError, match=r"AdamW contracts .* part of the loss"):
        contraction_of([AdamW([parameter()], lr=0.1)], 5e-3)


@pytest.mark.parametrize("weights", ["wp", "mse"])
def test_a_loop_refuses_at_its_first_commit_and_only_where_the_weights_ask(weights: str, tmp_path: Path) -> None:
    def train(weights: str) -> None:
        with join(tmp_path, combine=paceline.Averaging(every_steps=2, weights=weights)) as fleet:
            model = fleet.model(linear())
            optimizer = Adam(model.parameters(), weight_decay=0.1)
            for step in fleet.steps(numbers(), global_batch=10):
                for x, y in step:
                    step.backward(mse(model, x, y))
                step.commit(optimizer)

    train("samples")
    with pytest.raises(ValueError, match="a step of Adam contracts"):
        train(weights)


def test_an_optimiser_that_the_script_steps_itself_is_known_by_its_name(tmp_path: Path) -> None:
    with join(tmp_path, combine=paceline.Averaging(every_steps=8, weights="wp")) as fleet:
        model = fleet.model(linear())
        optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)
        fleet.track(optimizer=optimizer)
        steps: Any = fleet.steps(numbers(), global_batch=10)._loop
        for step in steps:
            for x, y in step:
                step.backward(mse(model, x, y))
            step.reduce()
            optimizer.step()
            step.commit()
            if step.index == 2:
                assert steps.combine.periods.open.contraction == pytest.approx(
                    3 * log_contraction(0.1, 0.1, momentum=0.9)
                )


@pytest.mark.parametrize("rule", ["linear", "gain"])
def test_a_rate_that_follows_the_global_count_is_refused(tmp_path: Path, rule: str) -> None:
    with join(tmp_path, combine="average") as fleet:
        fleet.model(linear())
        with pytest.raises(ValueError, match="leave lr_scaling out"):
            fleet.steps(numbers(15), global_batch=10, lr_scaling=rule)
