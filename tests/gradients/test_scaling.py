"""Our rule for the loss scale against torch's own GradScaler, over random overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.gradients import scaling
from paceline.gradients.scaling import LivingScalers, instances, is_active, next_state, scale_in
from quick import examples


def torchs_states(overflows: list[bool], **options: Any) -> list[dict[str, Any]]:
    """The states of a real scaler in a real loop in which gradients overflow as told."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **options)
    states = []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (float("inf") if overflow else 1e-30)).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(scaler.state_dict())
    return states


@settings(deadline=None, max_examples=examples(60))
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=30),
    interval=st.integers(1, 5),
    growth=st.sampled_from([1.5, 2.0, 3.0]),
    backoff=st.sampled_from([0.1, 0.5, 0.9]),
    scale=st.sampled_from([1.0, 2.0**16, 3.3]),
)
def test_the_scale_moves_as_torchs_does(
    overflows: list[bool], interval: int, growth: float, backoff: float, scale: float
) -> None:
    options = {"init_scale": scale, "growth_interval": interval, "growth_factor": growth, "backoff_factor": backoff}
    ours = torch.amp.GradScaler("cpu", **options)
    ours.scale(torch.ones(1))  # torch makes its tensors on first use
    for overflow, theirs in zip(overflows, torchs_states(overflows, **options), strict=True):
        ours.load_state_dict(next_state(ours.state_dict(), overflow=overflow))
        assert ours.state_dict() == theirs


def test_the_scale_never_grows_to_infinity() -> None:
    options = {"init_scale": 2.0**126, "growth_interval": 1}
    ours = torch.amp.GradScaler("cpu", **options)
    ours.scale(torch.ones(1))
    for theirs in torchs_states([False] * 4, **options):
        ours.load_state_dict(next_state(ours.state_dict(), overflow=False))
        assert ours.get_scale() == theirs["scale"]


@pytest.mark.parametrize(("scaler", "active"), [(None, False), (False, False), (True, True)])
def test_only_an_enabled_scaler_is_active(scaler: bool | None, active: bool) -> None:
    thing = None if scaler is None else torch.amp.GradScaler("cpu", enabled=scaler)
    assert is_active(thing) is active


@pytest.mark.parametrize("factor", [0.5, torch.ones((), requires_grad=True), torch.ones(3, requires_grad=True).sum()])
def test_no_object_is_looked_through_for_factors_that_no_scaler_can_have_left(
    factor: float | torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scaling, "instances", lambda *kinds: pytest.fail("a scan of the process takes as long as a step")
    )
    assert scale_in((torch.ones(3, requires_grad=True) * factor).sum(), LivingScalers()) is None


def test_all_micro_batches_of_a_step_share_one_scan_for_scalers(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scans, living = list[Any](), LivingScalers()
    monkeypatch.setattr(scaling, "instances", lambda *kinds: scans.append(kinds) or instances(*kinds))
    loss = torch.ones(3, requires_grad=True).sum()
    assert scale_in(loss * torch.tensor(8.0), living) is None, "as large as a scale, and of the user's own"
    assert scale_in(scaler.scale(loss), living) == 8.0, "it has only now made the tensor of its scale"
    assert len(scans) == 1
