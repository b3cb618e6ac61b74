"""One worker's gradients from backward to mean, without processes: weights, true counts, clipping, work put aside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.errors import MisuseError
from paceline.gradients import Gradients, Header
from paceline.transport.fixed import Alone


class Doubling(Alone):
    """A fleet of two whose other worker always brings what this one does."""

    solitary = False
    size = 2

    def sum(self, tensor: torch.Tensor) -> Any:
        tensor.mul_(2)
        return super().sum(tensor)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2, dtype=torch.float64)


X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def whole_batch(x: torch.Tensor) -> list[torch.Tensor]:
    net = model()
    loss(net, x).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def committed(gradients: Gradients, samples: int, clip_norm: float | None = None) -> None:
    gradients.start_rest()
    assert gradients.finite()
    header = Header(gradients.layout)
    header.write(0, samples=samples, weight=samples)
    assert gradients.exchange.run(lambda: header, samples, "a round") is header
    gradients.mean(header, clip_norm)


def close(net: torch.nn.Module, wanted: list[torch.Tensor]) -> bool:
    pairs = zip(net.parameters(), wanted, strict=True)
    return all(p.grad is not None and torch.allclose(p.grad, grad, rtol=0, atol=1e-14) for p, grad in pairs)


@pytest.mark.parametrize("transport", [Alone, Doubling])
@pytest.mark.parametrize("done", [8, 5])
def test_micro_batches_of_unlike_sizes_give_the_whole_batchs_mean_whatever_was_planned(
    transport: type[Alone], done: int
) -> None:
    net = model()
    gradients = Gradients(transport(), [net])
    gradients.begin(8)
    for part in X[:done].split([3, done - 3]):
        gradients.backward(loss(net, part), len(part), last=False)
    committed(gradients, done)
    assert close(net, whole_batch(X[:done]))


@pytest.mark.parametrize("transport", [Alone, Doubling])
def test_clipping_scales_the_mean_to_the_norm_and_the_norm_told_is_that_before_it(transport: type[Alone]) -> None:
    net, wanted = model(), whole_batch(X)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in wanted))
    gradients = Gradients(transport(), [net])
    gradients.begin(8)
    gradients.backward(loss(net, X), 8, last=True)
    committed(gradients, 8, clip_norm=norm / 4)
    assert gradients.mean_gradient.norm() == pytest.approx(norm, rel=1e-12)
    assert close(net, [grad * (norm / 4 / (norm + 1e-6)) for grad in wanted])


def test_a_micro_batch_beside_the_sum_counts_only_once_it_joins() -> None:
    net = model()
    gradients = Gradients(Doubling(), [net])
    gradients.begin(8)
    first = gradients.accumulation.backward_apart(loss(net, X[:4]), 4)
    gradients.accumulation.join(first)
    gradients.accumulation.backward_apart(loss(net, X[4:]), 4)  # the deadline came before it joined
    gradients.buckets.show()
    mine, header = gradients.close(4), Header(gradients.layout)
    header.write(0, samples=4, weight=4)
    assert mine.finite
    assert gradients.exchange.run_in_background(lambda: (header, mine), "a round with a deadline") == (header, mine)
    gradients.exchange.adopt(mine, header)
    gradients.mean(header, None)
    assert close(net, whole_batch(X[:4]))


def test_a_worker_that_finished_nothing_brings_zeros_in_tensors_of_its_own() -> None:
    net = model()
    gradients = Gradients(Doubling(), [net])
    gradients.begin(8)
    gradients.accumulation.join(gradients.accumulation.backward_apart(loss(net, X), 8))
    nothing = gradients.exchange.nothing()
    assert not any(nothing.used)
    assert all(not flat.any() for flat in nothing.flats)
    assert any(flat.any() for flat in gradients.close(8).flats)


def test_parameters_frozen_between_steps_leave_the_round_and_in_the_middle_of_one_are_refused() -> None:
    net = model()
    gradients = Gradients(Alone(), [net])
    gradients.begin(8)
    gradients.backward(loss(net, X[:4]), 4, last=False)
    net.bias.requires_grad_(False)
    with pytest.raises(MisuseError, match="in the middle of a step"):
        gradients.start_rest()
    net.bias.requires_grad_(True)
    gradients.clear(overflow=False)
    net.bias.requires_grad_(False)
    gradients.begin(8)
    gradients.backward(loss(net, X), 8, last=True)
    assert gradients.accumulation.trained == [True, False]
    assert gradients.layout.parameters == 1


def test_a_gradient_that_is_not_finite_is_seen_before_the_round() -> None:
    for transport in (Alone(), Doubling()):
        net = model()
        gradients = Gradients(transport, [net])
        gradients.begin(8)
        gradients.backward(loss(net, X) * math.inf, 8, last=True)
        gradients.start_rest()
        assert not gradients.finite()
