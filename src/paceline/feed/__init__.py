"""Exactly-once dealing: who gets which samples (`Feed`), and how they reach the device (`Source`)."""

from paceline.feed.feed import Feed, Order
from paceline.feed.keys import key, keys
from paceline.feed.loading import Source
from paceline.feed.permutation import KeyedPermutation
from paceline.feed.randomness import seed_micro_batch
from paceline.feed.ranges import Ranges, positions, split, total

__all__ = [
    "Feed",
    "KeyedPermutation",
    "Order",
    "Ranges",
    "Source",
    "key",
    "keys",
    "positions",
    "seed_micro_batch",
    "split",
    "total",
]
