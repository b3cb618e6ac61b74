"""Exactly-once dealing: who gets which samples (`Feed`), and how they reach the device (`Source`)."""

from paceline.feed.batches import Batches, unit_said
from paceline.feed.feed import Feed, Order
from paceline.feed.keys import key, keys
from paceline.feed.loading import Source
from paceline.feed.permutation import KeyedPermutation
from paceline.feed.randomness import Generators, TorchGenerators, seed_micro_batch, seed_update
from paceline.feed.ranges import Ranges, positions, split, total

__all__ = [
    "Batches",
    "Feed",
    "Generators",
    "KeyedPermutation",
    "Order",
    "Ranges",
    "Source",
    "TorchGenerators",
    "key",
    "keys",
    "positions",
    "seed_micro_batch",
    "seed_update",
    "split",
    "total",
    "unit_said",
]
