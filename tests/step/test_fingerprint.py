"""A fingerprint that equal replicas share and unlike ones do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.step.checks.replicas import fingerprint

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_equal_tensors_of_any_kind_share_it_and_it_travels_exactly(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 3).to(dtype), torch.empty(0, dtype=dtype), torch.ones((), dtype=dtype)]
    number = fingerprint(tensors)
    assert number == fingerprint([tensor.clone() for tensor in tensors])
    assert 0 <= number < 2**52
    assert number == int(number)


@given(place=st.integers(0, 11), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_the_smallest_change_anywhere_changes_it(place: int, dtype: torch.dtype) -> None:
    tensors = [torch.linspace(1, 2, 6).to(dtype), torch.linspace(-3, -2, 6).to(dtype)]
    before = fingerprint(tensors)
    flat = tensors[place // 6]
    flat[place % 6] = torch.nextafter(flat[place % 6], torch.tensor(9.0, dtype=dtype))
    assert fingerprint(tensors) != before


def test_the_order_of_tensors_counts() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    assert fingerprint([a, b]) != fingerprint([b, a])


def test_the_memory_layout_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert fingerprint([image]) == fingerprint([image.to(memory_format=torch.channels_last)])
    assert fingerprint([torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t()]) == fingerprint(
        [torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t().contiguous()]
    )
