from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import sqrt

import numpy as np
import pytest

from paceline.feed import KeyedPermutation
from paceline.feed.randomness import MAX_LENGTH


def excess(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Return the chi-square of counts against what is expected, in standard deviations above its mean."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / sqrt(2 * freedom)


@pytest.mark.parametrize("key", [0, 1, 2**62 + 12345])
def test_every_short_length_is_a_bijection(key: int) -> None:
    for length in range(1, 301):
        shuffled = KeyedPermutation(length, key)(np.arange(length))
        assert sorted(shuffled.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [4095, 4096, 4097, 2**20, 999_983, 10**6 + 1])
def test_long_lengths_are_bijections(length: int) -> None:
    shuffled = KeyedPermutation(length, 5)(np.arange(length))
    assert np.array_equal(np.sort(shuffled), np.arange(length))


def test_parts_are_those_of_the_whole_in_whatever_order_they_are_asked_for() -> None:
    for length in (1, 7, 1500, 5000):
        shuffle, dice = KeyedPermutation(length, 3), np.random.default_rng(length)
        whole = shuffle(np.arange(length))
        for start in dice.integers(0, length, 50).tolist():
            stop = int(dice.integers(start, min(length, start + 1100) + 1))
            assert np.array_equal(shuffle.part(start, stop), whole[start:stop])


@pytest.mark.parametrize("length", [10**9, 2**33 + 7, MAX_LENGTH])
def test_huge_lengths_stay_in_range_and_reach_everywhere(length: int) -> None:
    positions = np.unique(np.random.default_rng(0).integers(0, length, 100_000))
    shuffled = KeyedPermutation(length, 5)(positions)
    assert shuffled.min() >= 0
    assert shuffled.max() < length
    assert abs(excess(np.bincount(shuffled // (length // 100 + 1), minlength=100), len(positions) / 100)) < 5


@pytest.mark.slow
def test_a_million_positions_of_a_huge_length_never_collide() -> None:
    # A function that only looked random would collide about 16 times here.
    shuffled = KeyedPermutation(2**35, 9)(np.arange(2**20) * 31_337)
    assert len(np.unique(shuffled)) == 2**20


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_permutation_of_a_few_comes_up_equally_often(length: int) -> None:
    orders = list(permutations(range(length)))
    seen = Counter(tuple(KeyedPermutation(length, key)(np.arange(length)).tolist()) for key in range(40 * len(orders)))
    assert excess(np.array([seen[order] for order in orders]), 40) < 4


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 50, 5000])
def test_position_zero_lands_everywhere_equally_often_over_keys(length: int) -> None:
    bins, trials = min(length, 25), 5000
    landed = np.array([KeyedPermutation(length, key)(np.array([0]))[0] for key in range(trials)])
    sizes = np.bincount(np.arange(length) * bins // length, minlength=bins)
    assert excess(np.bincount(landed * bins // length, minlength=bins), sizes * trials / length) < 5


@pytest.mark.parametrize("length", [300, 10_007, 200_000])
def test_neighbours_epochs_and_positions_are_not_correlated(length: int) -> None:
    first, second = (KeyedPermutation(length, key)(np.arange(length)) for key in (1, 2))
    for one, other in [(first[1:], first[:-1]), (first, second), (first, np.arange(length))]:
        assert abs(np.corrcoef(one, other)[0, 1]) * sqrt(length) < 4.5


@pytest.mark.parametrize("stride", [1, 2, 31_623, 31_624])
def test_pairs_at_a_fixed_distance_fill_the_plane_evenly(stride: int) -> None:
    # 31 624 is a row of the grid that a billion positions are laid out in: where a weak network would show.
    length, cells = 10**9, 32
    positions = np.random.default_rng(1).integers(0, length - stride, 100_000)
    shuffle = KeyedPermutation(length, 3)
    cell = shuffle(positions) * cells // length * cells + shuffle(positions + stride) * cells // length
    assert excess(np.bincount(cell, minlength=cells**2), len(positions) / cells**2) < 5


def test_any_part_of_the_shuffle_can_be_asked_for_alone() -> None:
    shuffle = KeyedPermutation(1000, 4)
    assert np.array_equal(shuffle(np.array([7, 999, 7])), shuffle(np.arange(1000))[[7, 999, 7]])
    assert shuffle(np.empty(0, dtype=np.int64)).size == 0


def test_a_shuffle_is_the_same_on_every_machine_and_version() -> None:
    assert KeyedPermutation(12, 42)(np.arange(12)).tolist() == [9, 6, 5, 10, 4, 0, 8, 11, 3, 7, 1, 2]
    assert KeyedPermutation(10**9, 42)(np.arange(3)).tolist() == [114082797, 335359775, 53788395]


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="length between 1 and"):
        KeyedPermutation(length, 0)
