"""Fingerprints of samples: equal data pass on unlike machines, other data do not, and reading leaves no trace."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from paceline.feed import Source, fingerprints
from paceline.feed.fingerprints import NoFingerprint, alike, fingerprint, look_at
from paceline.training.same_data import unlike

CPU = torch.device("cpu")


@dataclass
class Item:
    name: str
    values: np.ndarray[Any, Any]


@given(length=st.integers(1, 10**9))
def test_positions_are_distinct_and_inside(length: int) -> None:
    chosen = look_at(length)
    assert len(chosen) == len(set(chosen)) == min(4, length)
    assert all(0 <= index < length for index in chosen)


def noise(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape)


PAIRS = [
    (3, 4),
    (3, True),
    (1.0, 1.01),
    ("a", "b"),
    (b"ab", b"ac"),
    (None, 0),
    ([1, 2], [1, 3]),
    ((1, 2), (1, 2, 3)),
    (["ab", "c"], ["a", "bc"]),
    ({"x": 1}, {"y": 1}),
    ({"x": 1}, {"x": 2}),
    (np.arange(5), np.arange(1, 6)),
    (np.array(["a"]), np.array(["b"])),
    (torch.arange(5), torch.arange(5).reshape(5, 1)),
    (torch.zeros(5), torch.zeros(5, dtype=torch.float64)),
    (torch.from_numpy(noise(0, 3, 32, 32)), torch.from_numpy(noise(1, 3, 32, 32))),
    (torch.from_numpy(noise(0, 3) + 1000), torch.from_numpy(noise(1, 3) + 1000)),
    (torch.from_numpy(noise(0, 300, 300)), torch.from_numpy(noise(1, 300, 300))),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    (torch.zeros(100, dtype=torch.uint8), torch.full((100,), 9, dtype=torch.uint8)),
    (Item("a", noise(0, 4)), Item("b", noise(0, 4))),
    (torch.zeros(200_000), torch.zeros(200_001)),
    (list(range(100_000)), list(range(1, 100_001))),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_unlike_samples_have_unlike_fingerprints_and_each_is_like_itself(one: Any, other: Any) -> None:
    assert alike(fingerprint(one), fingerprint(one))
    assert alike(fingerprint(other), fingerprint(other))
    assert not alike(fingerprint(one), fingerprint(other))


def test_rounding_and_decoding_on_another_machine_is_no_difference() -> None:
    image = np.random.default_rng(0).integers(5, 250, (3, 64, 64)).astype(np.uint8)
    decoded = image + np.random.default_rng(1).integers(-1, 2, image.shape).astype(np.uint8)
    features = torch.from_numpy(noise(2, 40)).float()
    assert alike(fingerprint((image, 3)), fingerprint((decoded, 3)))
    assert alike(fingerprint(features), fingerprint(features * (1 + 3e-7)))
    assert alike(fingerprint({"b": 1, "a": [2]}), fingerprint({"a": [2], "b": 1}))
    assert not alike(fingerprint((image, 3)), fingerprint((decoded, 4)))


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, np.array([object()]), [torch.eye(2).to_sparse()]])
def test_what_has_no_stable_bytes_has_no_fingerprint(value: Any) -> None:
    with pytest.raises(NoFingerprint):
        fingerprint(value)


class Augmented(Dataset[Any]):
    """A dataset that draws from all generators, or fails."""

    def __init__(self, length: int = 50, *, fails: bool = False) -> None:
        self.length, self.fails = length, fails

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.fails:
            raise OSError("a file is missing")
        return index, random.random(), np.random.random(), torch.rand(3)


@pytest.mark.parametrize("processes", [0, 1])
def test_noise_belongs_to_the_sample_and_the_users_generators_stay_as_they_were(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "MOST_SECONDS", 60.0)  # a busy computer reads fewer samples
    data = Subset(Augmented(), range(10, 40))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        source = Source(DataLoader(data, num_workers=processes), device=CPU, seed=seed)
        found.append(source.look([3, 7])["found"])
        source.close()
        drawn = [random.random(), np.random.random(), torch.rand(()).item()] if not processes else []
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        assert drawn == ([random.random(), np.random.random(), torch.rand(()).item()] if not processes else [])
    assert len(found[0]) == 2
    assert all(alike(one, other) for one, other in zip(*found, strict=True))
    assert not alike(*found[0])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(3)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (Stream(), "it is an IterableDataset"),
        (Augmented(fails=True), "sample 3 raised OSError"),
        (DataLoader(Augmented(fails=True), num_workers=1), "sample 3 raised OSError"),
        ([{"a", "b"}] * 9, "a sample holds a set, which has no stable bytes"),
    ],
)
def test_what_cannot_be_looked_at_is_said_and_is_no_error(data: Any, why: str) -> None:
    source = Source(data, device=CPU, seed=0)
    assert source.look([3, 7]) == {"found": [], "seconds": pytest.approx(0, abs=5), "why": why}
    source.close()


def test_a_tensor_dataset_is_looked_at_through_its_subset() -> None:
    data = TensorDataset(torch.arange(20))
    one, other = (Source(Subset(data, chosen), device=CPU, seed=0) for chosen in (range(5, 10), range(6, 11)))
    assert alike(one.look([1])["found"][0], other.look([0])["found"][0])
    assert not alike(one.look([1])["found"][0], other.look([1])["found"][0])


def test_processes_that_looked_at_fewer_samples_are_compared_as_far_as_they_looked() -> None:
    seen = [{"indices": [4, 2], "found": [fingerprint(index) for index in numbers]} for numbers in ([4, 2], [4], [])]
    assert unlike([[one] for one in seen]) is None
    other = {"indices": [4, 2], "found": [fingerprint(4), fingerprint(3)]}
    assert unlike([[seen[1]], [seen[0]], [other, seen[2]]]) == (2, [(1, 0), (2, 0)])
