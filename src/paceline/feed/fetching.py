"""From positions to one collated micro-batch, in whichever process: fetch each sample with its own noise, collate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from paceline import concurrency
from paceline.feed.fingerprints import MOST_SECONDS, NoFingerprint, fingerprint
from paceline.feed.keys import keys
from paceline.feed.randomness import seed_generators
from paceline.feed.ranges import positions
from paceline.records import Range


@dataclass(eq=False)
class Piece:
    """One micro-batch to be loaded: positions of an epoch, and the dataset indices found there."""

    epoch: int
    ranges: tuple[Range, ...]
    indices: NDArray[np.int64]

    @cached_property
    def name(self) -> tuple[int, tuple[Range, ...], bytes]:
        """Equal for pieces that ask for the same thing."""
        return self.epoch, self.ranges, self.indices.tobytes()


@dataclass(eq=False)
class Glance:
    """Samples that are read for their fingerprints alone."""

    indices: tuple[int, ...]

    @property
    def name(self) -> tuple[str, tuple[int, ...]]:
        return "look", self.indices

    def of(self, fetch: Fetcher | TensorFetcher) -> dict[str, Any]:
        """Return the fingerprints of the first of them, for as long as time allows, and the seconds that it took; with
        ``why`` where they have none."""
        began, found = concurrency.perf_counter(), list[Any]()
        spent = 0.0
        try:
            for index in self.indices:
                found.append(fingerprint(fetch.sample(index)))
                spent = concurrency.perf_counter() - began
                if spent > MOST_SECONDS:
                    break
        except NoFingerprint as none:
            return {"found": [], "seconds": spent, "why": f"a sample holds {none}, which has no stable bytes"}
        except Exception as error:  # whatever the dataset raises: the loop will meet it, and say so
            return {"found": [], "seconds": spent, "why": f"sample {index} raised {type(error).__name__}"}
        return {"found": found, "seconds": spent, "why": None}


def _never() -> bool:
    return False


class Fetcher:
    """Loads pieces of a map-style dataset. Travels to loader processes by pickling."""

    random = True
    """Whether the global generators are seeded on the way."""

    def __init__(self, dataset: Any, *, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset, self._chosen = unwrap(dataset)
        self._many = fetches_many(self._dataset)
        self._collate = collate
        self._seed = seed

    def __call__(self, piece: Piece, *, unwanted: Callable[[], bool] = _never) -> Any:
        """The collated piece; None when it turned out on the way that nobody wants it any more.

        Each sample is seeded by its position. A dataset that fetches many at once with ``__getitems__`` is seeded
        once a piece, by its first position.
        """
        sample_keys = keys(self._seed, piece.epoch, positions(piece.ranges)).tolist()
        indices = choose(self._chosen, piece.indices).tolist()
        if self._many:
            seed_generators(sample_keys[0])
            return self._collate(self._dataset.__getitems__(indices))
        samples = []
        for sample_key, index in zip(sample_keys, indices):
            if unwanted():
                return None
            seed_generators(sample_key)
            samples.append(self._dataset[index])
        return self._collate(samples)

    def sample(self, index: int) -> Any:
        """One sample, not collated, with noise that belongs to its index, whatever the run's seed."""
        where = np.array([index])
        ((chosen,), (sample_key,)) = choose(self._chosen, where).tolist(), keys(0, 0, where).tolist()
        seed_generators(sample_key)
        return self._dataset.__getitems__([chosen])[0] if self._many else self._dataset[chosen]


class TensorFetcher:
    """Loads pieces of a TensorDataset by one indexing per tensor: equal to fetch and collate, many times faster."""

    random = False

    def __init__(self, dataset: Any) -> None:
        base, self._chosen = unwrap(dataset)
        self._tensors = base.tensors

    def sample(self, index: int) -> list[torch.Tensor]:
        """One sample, as a list of its tensors."""
        chosen = int(choose(self._chosen, np.array([index]))[0])
        return [tensor[chosen] for tensor in self._tensors]

    def __call__(self, piece: Piece) -> list[torch.Tensor]:
        where = torch.from_numpy(choose(self._chosen, piece.indices))
        return [
            tensor.index_select(0, where if tensor.is_cpu else where.to(tensor.device, non_blocking=True))
            for tensor in self._tensors
        ]


def make_fetcher(dataset: Any, *, collate: Callable[[Any], Any], seed: int) -> Fetcher | TensorFetcher:
    """The quick one for exactly a TensorDataset (or a Subset of one): a subclass may transform its samples."""
    if type(unwrap(dataset)[0]) is TensorDataset and collate is default_collate:
        return TensorFetcher(dataset)
    return Fetcher(dataset, collate=collate, seed=seed)


def unwrap(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """The dataset beneath torch's Subset, and the indices it chooses.

    Subset defines ``__getitems__``, which would hide from us that the dataset beneath fetches one sample at a time,
    each with its own noise.
    """
    chosen: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        inner = np.asarray(dataset.indices, dtype=np.int64)
        chosen = inner if chosen is None else inner[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def fetches_many(dataset: Any) -> bool:
    """Whether the dataset fetches many samples at once of its own: torch's Subset and StackDataset only pass on the
    question, and would hide that each sample has its own noise."""
    if type(dataset) is Subset:
        return fetches_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(fetches_many(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def choose(chosen: NDArray[np.int64] | None, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices if chosen is None else chosen[indices]
