"""Samplers as orders: the same on every worker and again after a resume, another in every epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from paceline.feed import Feed
from paceline.feed.custom_orders import SamplerOrder

N = 50


class Own(Sampler[int]):
    """A sampler that draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.generator, (np.random.Generator, np.random.RandomState)):
            yield from self.generator.permutation(N)
        else:
            yield from self.generator.sample(range(N), N)


class ByEpoch(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(N), N)


class Around(Sampler[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from (index for index in self.inner if index % 2)


class Cursor(Sampler[int]):
    """A sampler that continues where the last epoch ended."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        self.at += 10
        yield from range(self.at - 10, self.at)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.ones(N), N),
    "weighted, own generator": lambda: WeightedRandomSampler(torch.ones(N), N, generator=torch.Generator()),
    "random": lambda: RandomSampler(range(N), replacement=True),
    "subset": lambda: SubsetRandomSampler(range(20)),
    "numpy": lambda: Own(np.random.default_rng(3)),
    "old numpy": lambda: Own(np.random.RandomState(3)),
    "python": lambda: Own(random.Random(3)),
    "by epoch": ByEpoch,
    "around another": lambda: Around(Own(random.Random(3))),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_epochs_order_is_the_same_wherever_and_whenever_it_is_drawn(kind: str) -> None:
    one, other = (SamplerOrder(SAMPLERS[kind](), length=N, seed=7) for _ in range(2))
    epochs = [one(epoch).tolist() for epoch in range(4)]
    torch.rand(3)
    random.random()
    np.random.rand()
    assert other(2).tolist() == epochs[2], "a resume begins there"
    assert other(1).tolist() == epochs[1]
    assert len({tuple(order) for order in epochs}) == 4, "every epoch has its own"


def test_the_users_own_random_numbers_are_as_they_were() -> None:
    states = []
    for draws in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        if draws:
            SamplerOrder(SAMPLERS["weighted"](), length=N, seed=7)(0)
        states.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert states[0] == states[1]


def test_an_order_that_cannot_be_drawn_again_shows_when_a_checkpoint_is_loaded() -> None:
    feed = Feed(N, workers=2, order=SamplerOrder(Cursor(), length=N, seed=0))
    feed.open(1)
    feed.open(2)
    with pytest.raises(ValueError, match="now gives another order than when the state was saved"):
        Feed(N, workers=2, order=SamplerOrder(Cursor(), length=N, seed=0)).load_state_dict(feed.state_dict())


def test_a_sampler_that_the_script_changes_too_late_is_refused() -> None:
    sampler = WeightedRandomSampler(torch.ones(N), N)
    order = SamplerOrder(sampler, length=N, seed=0)
    order(1)
    order.check_unchanged(1)
    sampler.weights = torch.arange(N).double()
    with pytest.raises(ValueError, match="WeightedRandomSampler was changed after it had drawn the order of epoch 1"):
        order.check_unchanged(1)


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (iter(int, 1), "gave 15000 indices of 50 samples and no end"),
        ([[1, 2], [3]], "one by one"),
        ([1.5], "one by one"),
    ],
)
def test_what_is_no_order_is_refused(drawn: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplerOrder(drawn, length=N, seed=0)(0)
