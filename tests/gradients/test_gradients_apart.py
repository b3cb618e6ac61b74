"""Gradients beside the sum: a micro-batch joins whole or not at all, from any thread, and meddling is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import MisuseError
from paceline.gradients.buckets import Buckets

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def buckets_of(net: nn.Module) -> Buckets:
    return Buckets(list(net.parameters()), start=lambda flat: None)


def test_a_micro_batch_that_joins_while_the_next_backward_runs_leaves_that_alone() -> None:
    net = model()
    buckets = buckets_of(net)
    first = buckets.backward_apart(net(X[:2]).sum())
    buckets.show()

    def joins_now(grad: torch.Tensor) -> None:
        buckets.join(first)  # as the proxy does when a deadline comes

    output = net(X[2:])
    output.register_hook(joins_now)
    second = buckets.backward_apart(output.sum())
    expected = torch.autograd.grad(net(X[2:]).sum(), list(net.parameters()))
    for grad, right in zip(second, expected, strict=True):
        assert grad is not None
        assert torch.allclose(grad, right, atol=1e-14)
    alone = torch.autograd.grad(net(X[:2]).sum(), list(net.parameters()))
    for slot, right in zip(buckets.slots, alone, strict=True):
        assert slot.grad is not None
        assert torch.allclose(slot.grad, right, atol=1e-14), "the sum holds the first one only"
    buckets.check_untouched()


def test_a_backward_that_fails_shows_the_sum_again_and_is_no_misuse() -> None:
    net = model()
    buckets = buckets_of(net)
    buckets.join(buckets.backward_apart(net(X).sum()))
    buckets.show()
    hidden = net[0](X)
    hidden.register_hook(_run_out)
    with pytest.raises(torch.OutOfMemoryError):
        buckets.backward_apart(net[2](net[1](hidden)).sum())
    assert all(slot.parameter.grad is slot.grad is not None for slot in buckets.slots)
    buckets.check_untouched()


def _run_out(grad: Any) -> None:
    raise torch.OutOfMemoryError("for the test")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("meddling", ["clear", "zero", "scale"])
def test_meddling_with_what_shows_is_an_error_before_and_after_it_joined(joined: bool, meddling: str) -> None:
    net = model()
    buckets = buckets_of(net)
    gradients = buckets.backward_apart(net(X).sum())
    if joined:
        buckets.join(gradients)
        buckets.show()
    buckets.check_untouched()
    for parameter in net.parameters():
        assert parameter.grad is not None
        if meddling == "clear":
            parameter.grad = None
        else:
            parameter.grad.mul_(0.0 if meddling == "zero" else 0.5)
    with pytest.raises(MisuseError, match="cleared or changed"):
        buckets.check_untouched()
