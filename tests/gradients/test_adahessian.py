"""AdaHessian of pytorch_optimizer, held against its rules: hand-computed Hessians, and memory that stays flat."""

import gc
import resource
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline.gradients.second_order import curvature, needs_graph, step

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="needs the extra research")

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")

LR, BETAS, EPS = 0.15, (0.9, 0.999), 1e-4


def adahessian(parameters: Any, **settings: Any) -> Any:
    return pytorch_optimizer.AdaHessian(parameters, **{"lr": LR, "betas": BETAS, "eps": EPS, **settings})


def by_hand(steps: list[tuple[torch.Tensor, torch.Tensor]], start: torch.Tensor, decay: float = 0.0) -> torch.Tensor:
    """AdaHessian's rule written out: moments of gradient and D, bias-corrected, and decoupled weight decay."""
    point, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for count, (gradient, diagonal) in enumerate(steps, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * diagonal**2
        size = (square / (1 - BETAS[1] ** count)).sqrt() + EPS
        point = point - LR * (mean / (1 - BETAS[0] ** count) / size + decay * point)
    return point


def test_on_a_diagonal_quadratic_the_estimate_is_exact_and_the_steps_follow_the_rule() -> None:
    scales = torch.tensor([0.5, -2.0, 7.0, 30.0], dtype=torch.float64)
    start = torch.tensor([1.0, -1.0, 2.0, 0.3], dtype=torch.float64)
    point = nn.Parameter(start.clone())
    optimizer = adahessian([point], weight_decay=0.1)
    seen = []
    for _ in range(6):
        (0.5 * scales * point**2).sum().backward(create_graph=True)
        assert point.grad is not None
        (diagonal,) = curvature([point], [point.grad])
        torch.testing.assert_close(diagonal, scales.abs())
        point.grad = None  # the estimate used up the graph: make the gradient anew
        (0.5 * scales * point**2).sum().backward(create_graph=True)
        seen.append((point.grad.detach().clone(), scales.abs()))
        step(optimizer)
    torch.testing.assert_close(point.detach(), by_hand(seen, start, decay=0.1), rtol=1e-12, atol=1e-12)


def test_the_package_s_own_estimate_agrees_where_there_is_no_kernel_window() -> None:
    scales = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    ends = []
    for own in (True, False):
        point = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = adahessian([point])
        for _ in range(4):
            (scales * point**4).sum().backward(create_graph=True)
            if own:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            else:
                step(optimizer)
        ends.append(point.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


def test_on_a_full_quadratic_the_estimate_is_the_hessian_times_the_signs() -> None:
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    hessian = root @ root.T
    point = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
    (0.5 * point @ hessian @ point).backward(create_graph=True)
    assert point.grad is not None
    (diagonal,) = curvature([point], [point.grad], generator=torch.Generator().manual_seed(1))
    signs = 2 * torch.randint(0, 2, (6,), generator=torch.Generator().manual_seed(1)).double() - 1
    torch.testing.assert_close(diagonal, (hessian @ signs).abs())


def tiny() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    return model, torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (5,))


def whole_hessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every second derivative of the loss, one at a time."""
    names, shapes = zip(*[(name, p.shape) for name, p in model.named_parameters()], strict=True)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    return torch.autograd.functional.hessian(loss, flat)


def test_a_tiny_cnn_s_step_equals_the_rule_with_its_whole_hessian_and_the_mean_over_each_kernel_window() -> None:
    model, x, y = tiny()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    generator = torch.Generator().manual_seed(9)
    signs = [2 * torch.randint(0, 2, p.shape, generator=generator).double() - 1 for p in parameters]
    products = (whole_hessian(model, x, y) @ torch.cat([s.flatten() for s in signs])).abs().split(sizes)
    diagonals = [part.view_as(p) for part, p in zip(products, parameters, strict=True)]
    diagonals[0] = diagonals[0].mean(dim=(2, 3), keepdim=True).expand_as(diagonals[0])
    starts = [p.detach().clone() for p in parameters]

    optimizer = adahessian(parameters)
    nn.functional.cross_entropy(model(x), y).backward(create_graph=True)
    gradients = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    step(optimizer, generator=torch.Generator().manual_seed(9))
    for parameter, start, gradient, diagonal in zip(parameters, starts, gradients, diagonals, strict=True):
        torch.testing.assert_close(parameter.detach(), by_hand([(gradient, diagonal)], start), rtol=1e-9, atol=1e-12)


def test_it_trains_the_tiny_cnn() -> None:
    model, x, y = tiny()
    optimizer = adahessian(model.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward(create_graph=True)
        step(optimizer, generator=torch.Generator().manual_seed(len(losses)))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.slow
def test_the_gradients_and_their_graph_are_gone_after_every_step_without_the_garbage_collector() -> None:
    """Each step's graph holds some 3 MB; 60 of them kept alive could not be missed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer, x = adahessian(model.parameters(), lr=0.01), torch.randn(256, 256)
    seen, peaks = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(70):
            model(x).square().mean().backward(create_graph=True)
            seen.append(weakref.ref(next(model.parameters()).grad))
            step(optimizer)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    finally:
        gc.enable()
    assert [ref() for ref in seen] == [None] * 70
    assert peaks[-1] - peaks[9] < 60


def test_only_optimisers_that_use_second_derivatives_keep_the_graph() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert needs_graph(adahessian(parameters))
    assert not needs_graph(torch.optim.SGD(parameters, lr=0.1))
    assert not needs_graph(pytorch_optimizer.Lion(parameters))


def test_a_model_without_second_derivatives_is_refused_in_words() -> None:
    point = nn.Parameter(torch.ones(2))
    optimizer = adahessian([point])
    (3 * point).sum().backward(create_graph=True)
    with pytest.raises(ValueError, match="needs second derivatives"):
        step(optimizer)
    (point**2).sum().backward()
    with pytest.raises(ValueError, match="create_graph=True"):
        step(optimizer)


def test_parameters_outside_the_loss_stay_where_they_are() -> None:
    used, linear, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = adahessian([used, linear, unused])
    ((used**2).sum() + linear.sum()).backward(create_graph=True)
    step(optimizer)
    assert unused.tolist() == [1.0, 1.0]
    assert (used < 1).all()
