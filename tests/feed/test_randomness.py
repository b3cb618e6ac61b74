from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.feed import key, keys
from paceline.feed.randomness import (
    Generators,
    generators_kept,
    seed_generators,
    seed_micro_batch,
)

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def _leave_no_trace():
    with generators_kept():
        yield


def test_a_sample_meets_the_same_noise_whatever_was_drawn_before() -> None:
    seed_generators(key(1, 2, 3))
    first = draw()
    draw()
    seed_generators(key(1, 2, 3))
    assert draw() == first


def test_seed_epoch_and_position_each_change_all_three_generators() -> None:
    drawn = []
    for words in [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0)]:
        seed_generators(key(*words))
        drawn.append(draw())
    for generator in zip(*drawn):
        assert len(set(generator)) == len(drawn)


def test_numpy_and_torch_do_not_share_a_stream() -> None:
    def raw_words() -> tuple[list[int], list[int]]:
        numpy_words = np.random.randint(0, 2**32, 8, dtype=np.uint32) % 2**20
        return numpy_words.tolist(), torch.randint(0, 2**20, (8,)).tolist()

    np.random.seed(6789)
    torch.default_generator.manual_seed(6789)
    numpy_words, torch_words = raw_words()
    assert numpy_words == torch_words, "equal seeds do give equal words, so the two must be seeded apart"
    seed_generators(12345 << 31 | 6789)
    numpy_words, torch_words = raw_words()
    assert not set(numpy_words) & set(torch_words)


@pytest.mark.parametrize("key", [0, 2**63 - 1])
def test_every_key_is_a_valid_seed(key: int) -> None:
    seed_generators(key)
    assert all(0 <= value < 1 for value in draw())


def test_the_users_own_generators_are_left_as_they_were() -> None:
    seed_generators(5)
    np.random.randn()  # leaves half a pair of normal numbers in NumPy's pocket
    expected_state = Generators()
    expected = (*draw(), np.random.randn())
    expected_state.restore()
    with generators_kept():
        seed_generators(key(1, 2, 3))
        draw()
        np.random.randn()
    assert (*draw(), np.random.randn()) == expected


def test_dropout_is_keyed_by_the_micro_batch_and_apart_from_augmentation() -> None:
    def dropped(position: int) -> list[float]:
        seed_micro_batch(1, 2, position, CPU)
        return torch.nn.functional.dropout(torch.ones(64)).tolist()

    assert dropped(3) == dropped(3)
    assert dropped(3) != dropped(4)
    seed_micro_batch(1, 2, 3, CPU)
    forward = torch.rand(4).tolist()
    seed_generators(key(1, 2, 3))
    assert torch.rand(4).tolist() != forward


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_on_a_gpu_is_keyed_and_nothing_synchronises() -> None:
    device = torch.device("cuda", 0)
    ones = torch.ones(64, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = []
        for position in (3, 3, 4):
            seed_micro_batch(1, 2, position, device)
            drawn.append(torch.nn.functional.dropout(ones))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


words = st.integers(-(2**70), 2**70)


@given(seed=words, epoch=words, positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_one_key_and_many_keys_agree(seed: int, epoch: int, positions: list[int]) -> None:
    many = keys(seed, epoch, np.array(positions, dtype=np.int64))
    assert many.tolist() == [key(seed, epoch, position) for position in positions]


def test_keys_have_63_bits_and_all_of_them_vary() -> None:
    drawn = keys(0, 0, np.arange(2000)).tolist()
    assert all(0 <= value < 2**63 for value in drawn)
    for bit in range(63):
        ones = sum(value >> bit & 1 for value in drawn)
        assert 850 < ones < 1150


def test_no_two_seeds_epochs_or_positions_share_a_key() -> None:
    drawn = {key(seed, epoch, position) for seed in range(20) for epoch in range(20) for position in range(20)}
    assert len(drawn) == 20**3


def test_a_key_is_the_same_on_every_machine_and_version() -> None:
    assert key(1, 2, 3) == 8_457_334_684_515_183_916
