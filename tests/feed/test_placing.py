from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from paceline.feed.placing import move

META = torch.device("meta")
"""A device that is not the CPU wherever the tests run."""


class Pair(NamedTuple):
    x: torch.Tensor
    y: str


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    rest: list[Any]


class Own:
    """A batch class whose .to knows only the device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device))


def tensor() -> torch.Tensor:
    return torch.zeros(2)


@pytest.mark.parametrize(
    "nested",
    [
        [tensor(), (tensor(), {"a": [tensor()]})],
        Pair(tensor(), "text"),
        OrderedDict(a=tensor()),
        defaultdict(list, a=tensor()),
        UserDict(a=tensor()),
        Batch(tensor(), [tensor(), 3]),
        Own(tensor()),
    ],
)
def test_a_nested_batch_keeps_its_structure_and_moves_every_tensor(nested: Any) -> None:
    moved = move(nested, META)
    assert type(moved) is type(nested)
    found = list(_tensors(moved))
    assert found
    assert all(one.device == META for one in found)
    assert all(one.device.type == "cpu" for one in _tensors(nested)), "the original is left alone"


def test_what_has_no_device_is_left_as_it_is() -> None:
    assert move(["text", b"bytes", 3, None, 1.5], META) == ["text", b"bytes", 3, None, 1.5]
    assert move(Pair(tensor(), "text"), META).y == "text"


def test_packed_sequences_and_read_only_mappings_move_too() -> None:
    assert move(pack_sequence([torch.zeros(3)]), torch.device("cpu")).data.shape == (3,)
    assert move(MappingProxyType({"a": tensor()}), META)["a"].device == META


def _tensors(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for part in data:
            yield from _tensors(part)
    elif hasattr(data, "values"):
        for part in data.values():
            yield from _tensors(part)
    elif hasattr(data, "__dict__"):
        yield from _tensors(list(vars(data).values()))
