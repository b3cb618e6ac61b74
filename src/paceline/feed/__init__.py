"""Exactly-once dealing: which worker gets which samples (`Feed`), and how they reach the device (`Source`)."""

from paceline.feed.custom_orders import Batches, batch_count_note
from paceline.feed.feed import Feed, Order
from paceline.feed.randomness import (
    EvaluationNumbers,
    Generators,
    KeyedPermutation,
    OwnNumbers,
    TorchGenerators,
    key,
    keys,
    seed_micro_batch,
    seed_step,
    seed_update,
)
from paceline.feed.ranges import Ranges, positions, split, total
from paceline.feed.source import Source

__all__ = [
    "Batches",
    "EvaluationNumbers",
    "Feed",
    "Generators",
    "KeyedPermutation",
    "Order",
    "OwnNumbers",
    "Ranges",
    "Source",
    "TorchGenerators",
    "batch_count_note",
    "key",
    "keys",
    "positions",
    "seed_micro_batch",
    "seed_step",
    "seed_update",
    "split",
    "total",
]
