"""Buffers that forward changes: which have changed, what is sent of them, and who takes over what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import MisuseError
from paceline.gradients.buffers import ModuleBuffers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)


CENTRE, FLAGS, COUNT, ANGLES, CACHE = range(5)


def test_batch_norms_statistics_are_not_among_them() -> None:
    assert len(ModuleBuffers([Net()])) == 5
    assert len(ModuleBuffers([nn.BatchNorm1d(2), nn.Linear(2, 2)])) == 0


def test_changes_in_place_and_other_tensors_are_seen_until_they_are_taken_over() -> None:
    net = Net()
    buffers = ModuleBuffers([net])
    assert buffers.changed() == []
    net.count.add_(1)
    net.centre = net.centre + 1
    assert buffers.changed() == [CENTRE, COUNT]
    assert buffers.flags(buffers.changed()) == [1.0, 0.0, 1.0, 0.0, 0.0]
    buffers.take([CENTRE], buffers.message([CENTRE], mine=True))
    assert buffers.changed() == [COUNT]
    buffers.rebase()
    assert buffers.changed() == []


def test_a_sum_with_zeros_gives_everybody_the_givers_bits() -> None:
    one, other = Net(), Net()
    with torch.no_grad():
        one.centre.copy_(torch.tensor([-0.5, float("nan"), 1e-40]))
        one.flags[1::2] = True
        one.count.fill_(-(2**60) - 1)
        one.angles.mul_(1j)
    givers, takers = ModuleBuffers([one]), ModuleBuffers([other])
    chosen = [CENTRE, FLAGS, COUNT, ANGLES]
    total = givers.message(chosen, mine=True) + takers.message(chosen, mine=False)
    takers.take(chosen, total)
    for name in ("flags", "count", "angles"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.centre.view(torch.int32), other.centre.view(torch.int32))
    assert takers.changed() == []


def test_what_a_round_beside_the_loop_sends_is_as_it_was_when_looked_at() -> None:
    net = Net()
    buffers = ModuleBuffers([net])
    net.count.fill_(3)
    seen = buffers.snapshot()
    assert list(seen.changed) == [COUNT]
    net.count.fill_(9)  # the next micro-batch is under way
    other = Net()
    ModuleBuffers([other]).take([COUNT], buffers.message([COUNT], mine=True, copies=seen.copies))
    assert int(other.count) == 3


def test_a_cache_that_grows_is_each_workers_own_and_a_saved_buffer_that_does_is_refused() -> None:
    net = Net()
    buffers = ModuleBuffers([net])
    net.cache = torch.zeros(8)
    assert buffers.changed() == []
    net.centre = torch.zeros(4)
    with pytest.raises(MisuseError, match=r"the buffer centre changed from \[3\] torch\.float32 to \[4\] .*own"):
        buffers.changed()


def test_a_newcomer_takes_over_those_that_are_not_saved() -> None:
    net, newcomer = Net(), Net()
    buffers, theirs = ModuleBuffers([net]), ModuleBuffers([newcomer])
    assert buffers.unsaved() == {}
    net.cache.fill_(4.0)
    buffers.snapshot()
    theirs.take_unsaved(buffers.unsaved())
    assert float(newcomer.cache) == 4.0


def test_a_worker_of_several_processes_refuses_them() -> None:
    buffers = ModuleBuffers([Net()])
    buffers.refuse([])
    with pytest.raises(MisuseError, match="the buffer flags changes in forward"):
        buffers.refuse([FLAGS])


def test_changes_that_move_no_version_are_seen_once_contents_are_looked_at_and_then_in_every_round() -> None:
    net = Net()
    buffers = ModuleBuffers([net])
    net.centre.data.add_(1)
    assert buffers.changed() == []
    buffers.note_contents()
    net.centre.data.add_(1)
    assert buffers.changed() == buffers.changed() == [CENTRE]
    assert buffers.moved_by_forward == "centre"
    assert buffers.snapshot().copies[CENTRE].tolist() == [2, 2, 2]


def test_a_buffer_that_moves_between_rounds_alone_is_not_said_to_be_moved_by_forward() -> None:
    net = Net()
    buffers = ModuleBuffers([net])
    net.count.add_(1)
    buffers.note_contents()
    net.cache.data.add_(1)  # not saved: a cache
    assert buffers.changed() == [COUNT, CACHE]
    assert buffers.moved_by_forward == ""
