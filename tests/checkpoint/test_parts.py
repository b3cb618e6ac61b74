"""A state in parts: `put_together` returns what `take_apart` was given, and large tensors are not copied."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from paceline.checkpoint.parts import LEAST, put_together, take_apart

CPU = torch.device("cpu")
LARGE = LEAST // 4
"""Elements of a large tensor of float32."""


def travelled(content: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    parts = take_apart(content)
    return put_together([part.clone() for part in parts], device=CPU), parts


def test_large_tensors_are_parts_and_all_else_is_in_the_structure() -> None:
    large, small = torch.arange(float(LARGE)), torch.arange(3.0)
    content = {
        "models": [OrderedDict(weight=large, bias=small)],
        "tracked": {
            "optimizer": {"state": {0: {"step": torch.tensor(7.0), "exp_avg": large * 2}}, "groups": [(1, "a")]}
        },
        "text": "words",
        "none": None,
    }
    got, parts = travelled(content)
    assert [part.numel() for part in parts[1:]] == [LEAST, LEAST]
    assert parts[0].numel() < LEAST // 4
    assert parts[1].data_ptr() == large.data_ptr(), "it is sent from where it lies"
    assert type(got["models"][0]) is OrderedDict
    assert torch.equal(got["models"][0]["weight"], large)
    assert torch.equal(got["models"][0]["bias"], small)
    state = got["tracked"]["optimizer"]
    assert torch.equal(state["state"][0]["exp_avg"], large * 2)
    assert state["state"][0]["step"] == 7
    assert (state["groups"], got["text"], got["none"]) == ([(1, "a")], "words", None)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_any_type_and_any_strides(dtype: torch.dtype) -> None:
    tensor = (torch.rand(300, 400) * 100).to(dtype).t()
    got, parts = travelled({"tensor": tensor})
    assert len(parts) == 2
    assert got["tensor"].dtype is dtype
    assert got["tensor"].stride() == (1, 400)
    assert torch.equal(got["tensor"], tensor)


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    whole = torch.rand(4 * LARGE)
    tied = whole[LARGE : 3 * LARGE].view(2, LARGE)
    got, parts = travelled({"a": whole, "b": [whole], "c": tied})
    assert [part.numel() for part in parts[1:]] == [4 * LEAST]
    got["a"][LARGE] = 5.0
    assert got["b"][0][LARGE] == 5.0
    assert got["c"][0, 0] == 5.0


def test_memory_that_a_parameter_shares_stays_in_the_structure() -> None:
    whole = torch.rand(LARGE)
    got, parts = travelled({"a": whole, "b": torch.nn.Parameter(whole)})
    assert len(parts) == 1
    assert type(got["b"]) is torch.nn.Parameter
    got["a"][0] = 5.0
    assert got["b"][0] == 5.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(LARGE, device="meta"),
        torch.rand(LARGE).requires_grad_(),
        torch.eye(300).to_sparse(),
        torch.rand(LARGE, dtype=torch.complex64).conj(),
    ],
    ids=["empty", "meta", "leaf", "sparse", "conjugate"],
)
def test_what_is_not_plain_memory_travels_in_the_structure(tensor: torch.Tensor) -> None:
    beside = torch.rand(LARGE)
    got, parts = travelled({"before": beside, "tensor": tensor, "after": beside + 1})
    assert len(parts) == 3
    assert torch.equal(got["before"], beside)
    assert torch.equal(got["after"], beside + 1)
    assert got["tensor"].requires_grad == tensor.requires_grad
    assert got["tensor"].is_meta == tensor.is_meta
    assert got["tensor"].shape == tensor.shape
    if not tensor.is_meta:
        assert torch.equal(got["tensor"].to_dense().resolve_conj(), tensor.to_dense().resolve_conj())


def test_parts_that_do_not_fit_are_refused() -> None:
    parts = take_apart({"a": torch.rand(LARGE), "b": torch.rand(LARGE)})
    with pytest.raises(ValueError, match="do not fit together"):
        put_together(parts[:2], device=CPU)
    with pytest.raises(ValueError, match="goes beyond its memory"):
        put_together([parts[0], parts[1][:100].clone(), parts[2]], device=CPU)
    with pytest.raises(ValueError, match="cannot be read"):
        put_together([parts[0][:100].clone(), *parts[1:]], device=CPU)
