"""Models divided by ``fully_shard``: torch must add their gradients up, and a torch that cannot is refused."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.gradients.sharded import set_up


class Divided(FSDPModule, nn.Linear):
    """A layer as ``fully_shard`` leaves it, with the two calls that `set_up` makes."""

    def __new__(cls, *args: int) -> Divided:
        return object.__new__(cls)

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)
        self.calls: list[object] = []

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        self.calls.append(enable)

    def set_gradient_divide_factor(self, factor: float) -> None:
        self.calls.append(factor)


def test_gradients_of_divided_layers_are_added_up_and_not_divided() -> None:
    layer = Divided()
    set_up([nn.Sequential(layer, nn.Linear(2, 2))])
    assert layer.calls == [True, 1.0]


def test_a_torch_that_can_only_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Divided, "set_force_sum_reduction_for_comms")
    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms")
    with pytest.raises(ValueError, match=r"fully_shard needs torch 2\.8 or newer"):
        set_up([nn.Sequential(Divided())])
