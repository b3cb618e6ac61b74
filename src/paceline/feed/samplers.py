"""A DataLoader's sampler as an order: the dataset indices it draws are an epoch's, and each draw counts once.

All workers must draw the same, and a resumed epoch the same again. So before each epoch's draw every generator that the
sampler can draw from is seeded by (seed, epoch): the three global ones, and those it holds. What else it remembers from
one epoch to the next cannot be drawn again; that shows when workers or a checkpoint compare their orders.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator, Sequence
from copy import copy
from hashlib import blake2b
from itertools import islice
from operator import index as as_int
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.feed.keys import key
from paceline.feed.randomness import generators_kept, seed_generators

_SAMPLER = 0x73616D706C6572
"""Keeps the keys of samplers apart from those of samples."""


Drawn = TypeVar("Drawn")


class DrawnOrder(Generic[Drawn]):
    """``order(epoch)`` of a sampler or batch sampler over a dataset with ``length`` samples."""

    def __init__(self, sampler: Any, *, length: int, seed: int) -> None:
        self._sampler, self._length, self._seed = sampler, length, seed
        self.name = type(sampler).__name__
        self._most = 100 * length + 10_000
        """Indices an epoch: whoever gives more has no end."""
        self._after: bytes | None = None
        """The sampler's state after the last draw."""

    def __call__(self, epoch: int) -> Drawn:
        drawn = self._draw(epoch)
        self._after = state_of(self._sampler)
        return drawn

    def aside(self, epoch: int) -> Drawn:
        """The same for an evaluation, by a copy of the sampler: a training may be in the middle of another epoch."""
        return type(self)(copy(self._sampler), length=self._length, seed=self._seed)(epoch)

    def _draw(self, epoch: int) -> Drawn:
        self._tell(epoch)
        epoch_key = key(self._seed, epoch, _SAMPLER)
        with generators_kept():
            seed_generators(epoch_key)
            for number, generator in enumerate(own_generators(self._sampler)):
                reseed(generator, key(epoch_key, number))
            return self._read(iter(self._sampler))

    def _tell(self, epoch: int) -> None:
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)

    def _read(self, drawn: Iterator[Any]) -> Drawn:
        raise NotImplementedError

    def _no_end(self) -> ValueError:
        return ValueError(
            f"{self.name} gave {self._most} indices of {self._length} samples and no end: an epoch needs one "
            "(num_samples, or order=fn(epoch))"
        )

    def check_unchanged(self, epoch: int) -> None:
        """Raise ValueError when the script has changed the sampler after this epoch's order was drawn."""
        if self._after is not None and state_of(self._sampler) != self._after:
            raise ValueError(
                f"{self.name} was changed after it had drawn the order of epoch {epoch}, which "
                "happens when the epoch before ends: pass order=fn(epoch), or call fleet.steps anew for every epoch"
            )


class SamplerOrder(DrawnOrder[NDArray[np.int64]]):
    """``order(epoch)`` of a sampler, which gives dataset indices one by one."""

    def _read(self, drawn: Iterator[Any]) -> NDArray[np.int64]:
        indices: Sequence[Any] = list(islice(drawn, self._most + 1))
        if len(indices) > self._most:
            raise self._no_end()
        try:
            return np.fromiter(map(as_int, indices), dtype=np.int64, count=len(indices))
        except (TypeError, ValueError):
            raise ValueError(f"{self.name} must give dataset indices one by one, and gave {indices[0]!r}") from None


def within(sampler: Any) -> Iterator[Any]:
    """The sampler, and those among its attributes, and theirs."""
    todo, seen = [sampler], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [value for value in getattr(one, "__dict__", {}).values() if isinstance(value, Sampler)]


def own_generators(sampler: Any) -> Iterator[Any]:
    """The generators among a sampler's attributes, and those of samplers within it."""
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            yield value
        elif isinstance(value, Sampler):
            yield from own_generators(value)


def reseed(generator: Any, new_key: int) -> None:
    """Start a generator of torch, NumPy or Python from a 63-bit key."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(new_key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(new_key).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(new_key >> 31)
    else:
        generator.seed(new_key)


def state_of(sampler: Any) -> bytes | None:
    """A digest of what the sampler is made of, less its generators and datasets; None when nobody can tell."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(getattr(sampler, "__dict__", sampler))  # a list is what it is made of
        return blake2b(buffer.getbuffer(), digest_size=16).digest()
    except Exception:  # whatever an attribute of the user's makes of being pickled
        return None


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> str | None:
        """Large or changing by itself: not looked into."""
        kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, torch.utils.data.Dataset)
        return type(thing).__name__ if isinstance(thing, kinds) else None
