"""Loading of one micro-batch in any process: fetch each sample with its own random numbers, then collate."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from paceline import concurrency
from paceline.feed.fingerprints import MOST_SECONDS, Fingerprint, NoFingerprint, alike, fingerprint
from paceline.feed.randomness import keys, seed_generators
from paceline.feed.ranges import positions
from paceline.records import Range


@dataclass(eq=False)
class EpochPiece:
    """One micro-batch to be loaded: positions of an epoch, and the dataset indices there."""

    epoch: int
    ranges: tuple[Range, ...]
    indices: NDArray[np.int64]

    @cached_property
    def name(self) -> tuple[int, tuple[Range, ...], bytes]:
        """Return a value that is equal for pieces that request the same samples."""
        return self.epoch, self.ranges, self.indices.tobytes()


@dataclass(eq=False)
class Glance:
    """Samples that are read for their fingerprints alone."""

    indices: tuple[int, ...]

    @property
    def name(self) -> tuple[str, tuple[int, ...]]:
        return "look", self.indices

    def read(self, fetch: Fetcher | TensorFetcher) -> dict[str, Any]:
        """Return fingerprints of the first of these samples, the seconds spent, and ``why`` if there are none.

        Reading stops after `MOST_SECONDS`. ``stable`` is whether the first, read twice, was the same.
        """
        began, found = concurrency.perf_counter(), list[Any]()
        spent, stable = 0.0, True
        try:
            for index in self.indices:
                found.append(fetch.fingerprint(index))
                spent = concurrency.perf_counter() - began
                if spent > MOST_SECONDS:
                    break
            else:
                stable = not found or alike(fetch.fingerprint(self.indices[0]), found[0])
        except NoFingerprint as none:
            return {"found": [], "seconds": spent, "why": f"a sample holds {none}, which has no stable bytes"}
        except Exception as error:  # the loop will raise it when it loads the sample
            return {"found": [], "seconds": spent, "why": f"sample {index} raised {type(error).__name__}"}
        return {"found": found, "seconds": spent, "why": None, "stable": stable}


def _never() -> bool:
    return False


class Fetcher:
    """Loader of pieces of a map-style dataset; it travels to loader processes by pickling."""

    random = True
    """Whether the global generators are seeded while loading."""

    def __init__(self, dataset: Any, *, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset, self._chosen = unwrap(dataset)
        self._many = fetches_many(self._dataset)
        self._collate = collate
        self._seed = seed

    def __call__(self, piece: EpochPiece, *, unwanted: Callable[[], bool] = _never) -> Any:
        """Return the collated piece; None when it was called off meanwhile.

        Each sample is seeded by its position. A dataset that fetches many samples at once with ``__getitems__`` is
        seeded once per piece, by its first position.
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
        """Return one sample, not collated, with random numbers keyed by its index alone, whatever the run's seed."""
        where = np.array([index])
        ((chosen,), (sample_key,)) = choose(self._chosen, where).tolist(), keys(0, 0, where).tolist()
        seed_generators(sample_key)
        return self._dataset.__getitems__([chosen])[0] if self._many else self._dataset[chosen]

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of one sample, and of what the script's ``collate_fn`` makes of it alone."""
        sample = self.sample(index)
        alone = fingerprint(sample)
        if self._collate is default_collate:
            return alone
        try:
            return fingerprint([sample, self._collate([deepcopy(sample)])])
        except Exception:  # what it makes has no stable bytes, or it needs several samples
            return alone


class TensorFetcher:
    """Loader of pieces of a TensorDataset by one indexing per tensor: equal to fetch and collate, many times faster."""

    random = False

    def __init__(self, dataset: Any) -> None:
        base, self._chosen = unwrap(dataset)
        self._tensors = base.tensors

    def sample(self, index: int) -> list[torch.Tensor]:
        """Return one sample, as a list of its tensors."""
        chosen = int(choose(self._chosen, np.array([index]))[0])
        return [tensor[chosen] for tensor in self._tensors]

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of one sample."""
        return fingerprint(self.sample(index))

    def __call__(self, piece: EpochPiece) -> list[torch.Tensor]:
        where = torch.from_numpy(choose(self._chosen, piece.indices))
        return [
            tensor.index_select(0, where if tensor.is_cpu else where.to(tensor.device, non_blocking=True))
            for tensor in self._tensors
        ]


def make_fetcher(dataset: Any, *, collate: Callable[[Any], Any], seed: int) -> Fetcher | TensorFetcher:
    """Return the fast fetcher for exactly a TensorDataset or a Subset of one, else the general one.

    A subclass of TensorDataset may transform its samples.
    """
    if type(unwrap(dataset)[0]) is TensorDataset and collate is default_collate:
        return TensorFetcher(dataset)
    return Fetcher(dataset, collate=collate, seed=seed)


def unwrap(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """Return the dataset beneath torch's Subset, and the indices that the Subset chooses.

    Subset defines ``__getitems__``, which would hide that the dataset beneath fetches one sample at a time, each with
    its own random numbers.
    """
    chosen: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        inner = np.asarray(dataset.indices, dtype=np.int64)
        chosen = inner if chosen is None else inner[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def fetches_many(dataset: Any) -> bool:
    """Return whether the dataset itself fetches many samples at once.

    torch's Subset and StackDataset only delegate, and would hide that each sample has its own random numbers.
    """
    if type(dataset) is Subset:
        return fetches_many(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(fetches_many(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def choose(chosen: NDArray[np.int64] | None, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices if chosen is None else chosen[indices]
