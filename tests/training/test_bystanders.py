"""What the script has besides the fleet's models is found without a call of anything in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from paceline.training.untracked import Bystanders


class Lazy(OrderedDict[str, Any]):
    """As Transformers' mappings: looking at its entries loads them."""

    def items(self) -> Any:
        raise AssertionError("it was asked for its entries")

    __iter__ = keys = values = items


class Proxy:
    """As Flask's and Werkzeug's: everything about it is asked of another object."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("it was asked for its class")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"it was asked for {name}")


class Broken(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        raise ImportError("a weight that is not there")


class Holder:
    def __init__(self) -> None:
        self.teacher = nn.Linear(2, 2)


def test_foreign_objects_are_not_asked_for_anything_and_end_no_training() -> None:
    lazy, proxy, broken, holder = Lazy(), Proxy(), Broken(), Holder()
    listed, named = [nn.Linear(2, 1)], {"a": nn.Linear(1, 1), (1, 2): nn.Linear(1, 1)}
    optimizer = torch.optim.SGD(listed[0].parameters(), 0.1)
    bystanders = Bystanders(lambda: "")
    try:
        found = bystanders.look([], lambda optimizer: False)
    finally:
        bystanders.close()
    assert {"holder.teacher", "listed[0]", "named['a']"} <= set(found)
    assert not {"lazy", "proxy", "broken", "optimizer"} & set(found)
    assert (lazy, proxy, broken, holder, named, optimizer) is not None
