"""Tensors of several kinds and shapes in a few flat ones."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.gradients.fleet_sums import Flats

shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from([torch.float32, torch.float64])),
    min_size=1,
    max_size=6,
)


@given(shapes)
def test_what_is_filled_in_stands_in_one_flat_tensor_for_each_kind_of_number(
    like: list[tuple[list[int], torch.dtype]],
) -> None:
    tensors = [torch.rand(shape, dtype=kind) for shape, kind in like]
    room = Flats(tensors)
    room.fill(tensors)
    assert len(room.flats) == len({kind for _, kind in like})
    assert sum(flat.numel() for flat in room.flats) == sum(tensor.numel() for tensor in tensors)
    for flat in room.flats:
        flat.mul_(2.0)
    for view, tensor in zip(room.views, tensors, strict=True):
        assert torch.equal(view, 2.0 * tensor)
