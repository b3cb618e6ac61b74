"""The transport of one: the same interface, nobody to reach."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import GenerationOver
from paceline.transport import Alone


def test_a_gather_gives_back_ones_own_value_as_it_would_travel() -> None:
    assert Alone().gather("facts", {"a": (1, 2), 3: None}) == [{"a": [1, 2], "3": None}]
    with pytest.raises(TypeError):
        Alone().gather("facts", object())


def test_slots_are_numbered_from_zero_and_keep_their_names() -> None:
    alone = Alone()
    assert [alone.slot(name) for name in ("b", "a", "b", "c", "a")] == [0, 1, 0, 2, 1]
    assert [alone.slot_name(slot) for slot in range(3)] == ["b", "a", "c"]


def test_sums_and_broadcasts_leave_tensors_as_they_are() -> None:
    alone, tensor = Alone(), torch.arange(3)
    with alone.round("a round"):
        alone.sum(tensor).wait()
    alone.broadcast([tensor])
    alone.doing("nothing")
    alone.close(failure=KeyError("x"))
    alone.close()
    assert torch.equal(tensor, torch.arange(3))


def test_where_members_never_change_nobody_asks_whether_they_can() -> None:
    alone = Alone()
    assert not any((alone.elastic, alone.outside, alone.leaving, alone.roster_away))
    assert alone.id == alone.rank
    alone.deliver_members_changed()
    alone.release()
    over = GenerationOver("generation 5 is over", generation=5)
    with pytest.raises(GenerationOver) as raised:
        alone.recover(over)
    assert raised.value is over
