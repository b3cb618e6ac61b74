"""Predictions of a whole set: bit for bit, in order, for any shares; what has no row per sample is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from lone import join, linear, numbers
from paceline.feed import EvaluationNumbers, Source
from paceline.training import predict as predicting
from paceline.training.evaluate import each_batch

CPU = torch.device("cpu")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[paceline.Fleet]:
    with join(tmp_path) as fleet:
        yield fleet


def odd_types(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every type, with NaN, infinity, minus zero and the largest whole numbers among the values."""
    wild = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40, 3.5])[x % 5]
    return {
        "single": wild,
        "half": wild.half()[:, None].expand(-1, 3),
        "brain": wild.bfloat16(),
        "double": wild.double().reshape(-1, 1, 1),
        "long": torch.tensor([-(2**63), 2**63 - 1, 0])[x % 3],
        "byte": (x % 256).to(torch.uint8),
        "bool": x % 2 == 0,
        "complex": torch.complex(wild, -wild),
        "empty": torch.zeros(len(x), 0),
    }


@given(data=st.data(), workers=st.integers(1, 5), length=st.integers(1, 40), batch_size=st.integers(1, 50))
def test_every_row_is_in_its_place_bit_for_bit_for_any_shares(
    data: st.DataObject, workers: int, length: int, batch_size: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=workers - 1, max_size=workers - 1)))
    shares = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    parts = []
    for rank in range(workers):
        source = Source(TensorDataset(torch.arange(length)), device=CPU, seed=0)
        batches = each_batch(source, shares=shares, rank=rank, batch_size=batch_size, numbers=EvaluationNumbers(5, CPU))
        parts.append(predicting.own_part(odd_types, batches))
    layout = predicting.agreed_layout(json.loads(json.dumps([part.to_json() for part in parts])))
    buffers = [predicting.packed(layout, part, length) for part in parts]
    whole = predicting.unpacked(layout, torch.stack(buffers).sum(0), length)
    for name, expected in odd_types(torch.arange(length)).items():
        assert whole[name].dtype == expected.dtype
        assert whole[name].shape == expected.shape
        bits, expected_bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (whole[name], expected))
        assert torch.equal(bits, expected_bits), name
    lost = [buffer for buffer, share in zip(buffers, shares, strict=True) if share][1:]
    if lost:
        assert predicting.unpacked(layout, torch.stack(lost).sum(0), length) is None


@pytest.mark.parametrize("kind", ["dataset", "shuffled loader with a process"])
def test_alone_the_rows_are_those_of_the_dataset_in_its_order(fleet: paceline.Fleet, kind: str) -> None:
    model = fleet.model(nn.Sequential(linear(), nn.Dropout()))
    data: Any = numbers()
    if kind != "dataset":
        data = DataLoader(list(zip(*numbers().tensors, strict=True)), batch_size=7, shuffle=True, num_workers=1)
    whole = fleet.predict(lambda x, y: (model(x), y, x.numpy()), data)
    assert isinstance(whole, tuple)
    x, y = numbers().tensors
    assert torch.equal(whole[1], y)
    assert torch.equal(whole[2], x)
    with torch.no_grad():
        assert torch.allclose(whole[0], model[0](x), atol=1e-12)
    assert not whole[0].requires_grad
    assert model.training
    assert torch.equal(fleet.predict(lambda x, y: y, data, to="leader"), y)
    assert list(fleet.predict(lambda x, y: [x], data)[0].shape) == [40, 3]


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        (lambda x, y: y.sum(), "must have one row per sample; for sums over a batch call fleet.evaluate"),
        (lambda x, y: {"loss": y.mean()}, "'loss' has the shape () for a batch of 7 samples"),
        (lambda x, y: x[1:], "has the shape (6, 3) for a batch of 7 samples"),
        (lambda x, y: x.T, "has the shape (3, 7) for a batch of 7 samples"),
        (lambda x, y: y.tolist(), "part 0 is a list"),
        (lambda x, y: list(x), "part 0 has the shape (3,) for a batch of 7 samples"),
        (lambda x, y: np.array(["a"] * len(x)), "is a ndarray"),
        (lambda x, y: None, "is a NoneType"),
        (lambda x, y: {}, "returned nothing"),
        (lambda x, y: x[:, : 1 + len(x) % 2], "pad it to one size"),
        (lambda x, y: x if len(x) == 7 else x.half(), "keep one type"),
        (lambda x, y: {"a": x} if len(x) == 7 else {"b": x}, "a dict of ['a'] for one batch and a dict of ['b']"),
    ],
)
def test_what_has_no_row_a_sample_is_refused(fleet: paceline.Fleet, predict: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        fleet.predict(predict, TensorDataset(*(tensor[:20] for tensor in numbers().tensors)), batch_size=7)
    assert said in str(error.value)


def test_rows_that_the_function_writes_over_again_are_kept(fleet: paceline.Fleet) -> None:
    own = torch.zeros(10, dtype=torch.float64)

    def predict(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return own.copy_(y[:, 0])

    assert torch.equal(fleet.predict(predict, numbers(), batch_size=10), numbers().tensors[1][:, 0])


def test_an_error_of_the_users_own_comes_through_as_it_is(fleet: paceline.Fleet) -> None:
    def predict(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bug in the script")

    with pytest.raises(ValueError, match=r"^a bug in the script$"):
        fleet.predict(predict, numbers())
    with pytest.raises(ValueError, match='is "all" or "leader"'):
        fleet.predict(predict, numbers(), to="everybody")
