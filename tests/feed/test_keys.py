from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.feed import key, keys

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
