"""Random numbers that belong to a sample, not to the process that happens to fetch it, and the shuffle by keys.

A *key* is a function of a few whole numbers (seed, epoch, position, ...), equal on every machine. Nothing is drawn from
a stream, so nothing depends on earlier draws. The mixing function is the finaliser of SplitMix64 (Steele, Lea and
Flood, 2014): every bit of the input changes about half of the output.

>>> key(0, 1, 2) == key(0, 1, 2), key(0, 1, 2) == key(0, 2, 1)
(True, False)
>>> keys(0, 1, np.array([2, 3])).tolist() == [key(0, 1, 2), key(0, 1, 3)]
True

Before ``dataset[i]`` runs, the three global generators that augmentations use are seeded with a key of (seed, epoch,
position). So a sample gets the same random numbers on any worker, in any loader process, before and after a resume; and
no two workers share random numbers because their processes were seeded alike. `seed_micro_batch` does the same for
dropout, and for noise that the script draws in its inner loop, and `seed_step` for what a script draws once per step.

The price was measured on one slow core: 3.9 us for Python's generator, 1.6 us for NumPy's and 1.1 us for torch's
(``torch.manual_seed`` would take 130 us, as it also visits every other device). NumPy gets a 32-bit seed, since a
longer one takes 8.6 us. Whether a dataset uses a generator is unknown, so none is left out.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*words: int) -> int:
    """Mix whole numbers (seed, epoch, position, ...) into one of 63 bits; their order matters."""
    return key_prefix(*words) >> 1


def key_prefix(*words: int, state: int = 0) -> int:
    """Return a key that more words may follow (`extended_key`), for keys with a common beginning."""
    for word in words:
        state = _mix((state + GOLDEN & MASK) ^ (word & MASK))
    return state


def extended_key(state: int, *words: int) -> int:
    """Return the key of the words of a `key_prefix` and of these words.

    >>> extended_key(key_prefix(3, 1), 4) == key(3, 1, 4)
    True
    """
    return key_prefix(*words, state=state) >> 1


def keys(seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``key(seed, epoch, position)`` for many positions at once."""
    prefix = _mix((_mix(GOLDEN ^ (seed & MASK)) + GOLDEN & MASK) ^ (epoch & MASK))
    words = positions.astype(np.uint64) ^ np.uint64(prefix + GOLDEN & MASK)
    return (mix(words) >> np.uint64(1)).astype(np.int64)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a new array of the scrambled 64-bit words; a bijection."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST & MASK
    word = (word ^ word >> 27) * _SECOND & MASK
    return word ^ word >> 31


_MICRO_BATCH = 0x6D6963726F
_STEP = 0x73746570
_UPDATE = 0x757064617465
_SCORE = 0x73636F7265
"""Constants that keep the keys of micro-batches, steps, updates and evaluations apart from those of samples."""


def seed_generators(sample_key: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators from one 63-bit key.

    NumPy's and torch's CPU generator are the same algorithm and use 32 bits of the seed, so each gets its own half of
    the key: equal seeds would give equal noise.
    """
    random.seed(sample_key)
    np.random.seed(sample_key >> 31)
    torch.default_generator.manual_seed(sample_key)


def seed_micro_batch(seed: int, epoch: int, position: int, device: torch.device) -> None:
    """Seed the global generators, and that of ``device`` if it is a GPU, for the forward of one micro-batch.

    ``position`` is that of its first sample. Nothing is synchronised: a CUDA generator's seed lives on the host.
    """
    _seed_all(extended_key(_epoch_prefix(seed, epoch), position, _MICRO_BATCH), device)


def seed_step(seed: int, step: int, device: torch.device) -> None:
    """Seed the global generators, equally on every worker, for what the script draws outside its inner loop.

    That is a resolution or a weight per step, for example, and what comes between a commit and the next step.
    """
    _seed_all(key(seed, step, _STEP), device)


class EvaluationNumbers:
    """Random numbers of one evaluation or prediction: those of a batch belong to its first sample's position.

    As a context manager it leaves the script's own numbers as they were. ``number`` tells one call from another.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._device = number, device

    def __enter__(self) -> EvaluationNumbers:
        self._before = Generators(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self._before.restore()

    def seed(self, position: int) -> None:
        _seed_all(key(self._number, position, _SCORE), self._device)

    @staticmethod
    def draw() -> int:
        """Draw the number of the next call from the script's own random numbers."""
        return int(torch.randint(1 << 62, ()))


def seed_update(seed: int, step: int, device: torch.device) -> None:
    """Seed the global generators, equally on every worker, for what follows a step's micro-batches.

    That is noise added to the mean gradient, and whatever an optimiser draws.
    """
    _seed_all(key(seed, step, _UPDATE), device)


_epoch_prefix = lru_cache(maxsize=4)(key_prefix)
"""Cached `key_prefix` of (seed, epoch)."""


def _seed_all(one_key: int, device: torch.device) -> None:
    seed_generators(one_key)
    if device.type != "cpu":
        for generator in _torch_generators(device)[1:]:
            generator.manual_seed(one_key)


def _torch_generators(device: torch.device) -> list[torch.Generator]:
    """Return the CPU's generator, and that of ``device`` if it is a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class TorchGenerators:
    """States of torch's generators, of the CPU and of a GPU in use, at one moment: the user's own random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._states = [(generator, _state_of(generator)) for generator in _torch_generators(device)]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


def _state_of(generator: torch.Generator) -> torch.Tensor:
    """Return a generator's state, without garbage being collected meanwhile.

    torch holds the generator's lock, and the GIL. Python code that the collector runs may hand the GIL to a thread that
    waits for that lock, and both would wait for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return generator.get_state()
    finally:
        if collects:
            gc.enable()


class OwnNumbers:
    """The script's own random numbers, put aside while a step seeds the global generators.

    Copying the state of NumPy's generator takes 50 us, so another generator takes its place instead. (Half a pair of
    normal numbers that NumPy may hold for ``np.random.randn`` is dropped.)
    """

    def __init__(self, device: torch.device) -> None:
        self._torch, self._random = TorchGenerators(device), random.getstate()
        self._numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(_numbers_of_steps())

    def restore(self) -> None:
        self._torch.restore()
        random.setstate(self._random)
        mtrand.set_bit_generator(self._numpy)


_numbers_of_steps = lru_cache(maxsize=1)(np.random.MT19937)
"""NumPy's generator within steps, made once."""


class Generators:
    """States of the three global generators at one moment, and of that of ``device`` if it is a GPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._random = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = _state_of(torch.default_generator)
        self._device = None if device is None else TorchGenerators(device)

    def restore(self) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._device is not None:
            self._device.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {"random": self._random, "numpy": _listed(self._numpy), "torch": self._torch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._random, self._torch = state["random"], state["torch"].cpu()
        self._numpy = tuple(state["numpy"])


def _listed(state: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore this process's global generators, and that of ``device``, afterwards, whatever is seeded inside."""
    before = Generators(device)
    try:
        yield
    finally:
        before.restore()


MAX_LENGTH = 1 << 40
_SMALL, _ROUNDS_SMALL, _ROUNDS = 1 << 12, 16, 8
WINDOW = 1024
"""Positions that are computed at once when fewer are requested: they cost little more than a few."""
_HALF, _MULTIPLIER = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)


class KeyedPermutation:
    """A shuffle that is computed, not stored: position in the epoch -> index in the dataset.

    It is a permutation of ``range(length)`` chosen by ``key``: different keys give different shuffles. Memory is a
    dozen numbers whatever the length, and any part of the shuffle can be computed on its own.

    The positions are laid out as a grid of ``rows x columns >= length`` cells, both about sqrt(length). A Feistel
    network with mixed radix turns the row by a keyed function of the column, then the column by a keyed function of the
    row, and so on: each half-round can be undone, so the whole is a bijection of the grid. The few cells beyond
    ``length`` (about one in sqrt(length)) are sent round again until they land inside, which keeps it a bijection of
    ``range(length)``.

    >>> sorted(KeyedPermutation(10, key=1)(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, key: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a shuffle needs a length between 1 and 2**40, got {length}")
        self.length = length
        self._rows, self._columns = _grid(length)
        self._keys = _round_keys(key, rounds=_ROUNDS_SMALL if length < _SMALL else _ROUNDS)
        self._window: tuple[int, NDArray[np.int64]] = 0, np.empty(0, dtype=np.int64)
        """A first position, and the indices from there on that were computed last."""

    def part(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the dataset indices at the positions from ``start`` to below ``stop``; cache those that follow."""
        if stop - start > WINDOW:
            return self(np.arange(start, stop))
        first, known = self._window
        if not first <= start <= stop <= first + len(known):
            first, known = start, self(np.arange(start, min(start + WINDOW, self.length)))
            self._window = first, known
        return known[start - first : stop - first]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset index at each position (both in ``range(length)``)."""
        out = self._scramble(np.asarray(positions).astype(np.uint64))
        outside = np.flatnonzero(out >= self.length)
        while outside.size:
            out[outside] = self._scramble(out[outside])
            outside = outside[out[outside] >= self.length]
        return out.astype(np.int64)

    def _scramble(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Run one pass of the Feistel network over cells of the grid."""
        row, column = np.divmod(cells, np.uint64(self._columns))
        for even, odd in zip(self._keys[::2], self._keys[1::2]):
            row = _turn(row, by=column, size=self._rows, key=even)
            column = _turn(column, by=row, size=self._columns, key=odd)
        return row * np.uint64(self._columns) + column


def _grid(length: int) -> tuple[int, int]:
    """Return rows and columns, not both odd.

    Turning an odd circle is an even permutation, and odd ones are wanted too.
    """
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    return rows, columns + (rows % 2 and columns % 2)


def _round_keys(seed: int, *, rounds: int) -> list[np.uint64]:
    """Return the rounds' keys.

    Short grids need more rounds to reach all permutations evenly: 8 rounds of 3 x 3 miss some, 16 do not.
    """
    return [np.uint64(key(seed, turn)) for turn in range(rounds)]


def _turn(digit: NDArray[np.uint64], *, by: NDArray[np.uint64], size: int, key: np.uint64) -> NDArray[np.uint64]:
    """Return ``digit + hash(by) mod size``.

    The hash is lighter than `mix`: the rounds do the rest, and calls are small.
    """
    amount = by + key
    amount *= _MULTIPLIER
    amount ^= amount >> _HALF
    amount *= _MULTIPLIER
    amount >>= _HALF
    amount += digit
    amount %= np.uint64(size)
    return amount
