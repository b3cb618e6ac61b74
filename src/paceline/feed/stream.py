"""Iterable datasets: each worker draws from its own stream, and collates as many samples as its share holds.

A stream that does not divide itself can be divided here: of W workers, process l of L of worker w keeps the samples i
with ``i mod (W L) = w + W l``. For that all of them must see the same stream: `get_worker_info` reports one process in
each, and the global generators, by which a stream may shuffle, start a pass alike everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.feed.loader_settings import Settings
from paceline.feed.loading import InitWorker, LoaderFailure, as_it_is, received, shut_down
from paceline.feed.randomness import Generators, generators_kept, key, seed_generators

Part = tuple[int, int]
"""Pair (w, W): worker w of those W who divide a stream."""


class Guarded(IterableDataset[Any]):
    """The user's stream in a loader process: it gets each pass's epoch, and its exceptions arrive unchanged."""

    def __init__(self, dataset: Any, *, seed: int, split: bool) -> None:
        self.dataset = dataset
        self._seed, self._split = seed, split
        self._pass = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        """Epoch, w and W, written by the worker and read in loader processes, persistent ones too."""
        self._process: Part | None = None
        """Pair (l, L) of this loader process."""

    def announce(self, epoch: int, part: Part) -> None:
        """Store the epoch and the part of the next pass; called in the worker."""
        self._pass[:] = torch.tensor([epoch, *part])

    def __iter__(self) -> Iterator[Any]:
        try:
            epoch, *part = self._pass.tolist()
            set_epoch(self.dataset, epoch)
            yield from self._divided(epoch, *part) if self._split else self.dataset
        except Exception as error:
            yield LoaderFailure.wrap(error)

    def _divided(self, epoch: int, worker: int, workers: int) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        process, processes = self._process = self._process or (info.id, info.num_workers)
        object.__setattr__(info, "id", 0)  # frozen; a stream that divides itself by it would be divided twice
        object.__setattr__(info, "num_workers", 1)
        seed_generators(key(self._seed, epoch))
        return islice(iter(self.dataset), worker + workers * process, None, workers * processes)


class InitStream(InitWorker):
    """Initialiser of a loader process of a stream that is divided here: the user's init must not divide it too."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset.dataset  # type: ignore[attr-defined]
        before = dict(getattr(dataset, "__dict__", {}))
        super().__call__(worker_id)
        after = getattr(dataset, "__dict__", {})
        changed = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
        if changed:
            raise ValueError(
                f"worker_init_fn sets {type(dataset).__name__}.{changed[0]}, as if to divide the stream among loader "
                "processes, and split=True divides it too: leave one of the two out"
            )


def _received(chunks: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of loader processes until all have come to their end."""
    while True:
        try:
            yield received(chunks)
        except StopIteration:
            return


def set_epoch(dataset: Any, epoch: int) -> None:
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)


class Stream:
    """One worker's passes over an iterable dataset, with or without loader processes.

    The random numbers of a pass are keyed by (seed, epoch, rank): no two workers share them, though within a pass they
    depend on the order in which the stream gives its samples. A stream that is divided here (``split``) has random
    numbers keyed by (seed, epoch), so that all read the same stream.
    """

    def __init__(self, settings: Settings, *, seed: int, rank: int, split: bool = False) -> None:
        self._settings = settings
        self._seed = seed
        self._rank = rank
        self._split = split
        self._guarded = Guarded(settings.dataset, seed=seed, split=split)
        self._own_generator = torch.Generator()
        self._stale = False
        """Whether the script has changed the dataset since it was handed to the loader processes."""
        self._loader = self._make_loader() if settings.num_workers else None
        self._chunks: Iterator[Any] | None = None
        self._samples: Iterator[Any] | None = None
        self._noise: Generators | None = None

    def restart(self, epoch: int, part: Part = (0, 1)) -> None:
        """Begin a new pass; a dataset with ``set_epoch`` gets its number.

        Args:
            epoch: number of the pass.
            part: (w, W) of a stream that is divided here.
        """
        self.close()
        self._epoch, self._drawn = epoch, 0
        set_epoch(self._settings.dataset, epoch)
        self._guarded.announce(epoch, part)
        stream_key = key(self._seed, epoch) if self._split else key(self._seed, epoch, self._rank)
        self._own_generator.manual_seed(stream_key)
        with generators_kept():
            seed_generators(stream_key)
            if self._loader is None:
                worker, workers = part if self._split else (0, 1)
                self._samples = islice(iter(self._settings.dataset), worker, None, workers)
            else:
                self._chunks = iter(self._loader)
                self._samples = chain.from_iterable(_received(self._chunks))
            self._noise = Generators()

    def draw(self, count: int) -> tuple[Any, int] | None:
        """Return up to ``count`` samples, collated, and their number; None when the stream has ended."""
        if count < 1:
            raise ValueError(f"draw needs a count of at least 1, got {count}")
        if self._samples is None:
            self.restart(0)
        assert self._noise is not None
        with generators_kept():  # the stream's own random numbers continue from draw to draw
            self._noise.restore()
            try:
                samples = self._gather(count)
                if self._split:  # collating unequal shares must not advance the stream's generators
                    self._noise = Generators()
                    seed_generators(key(self._seed, self._epoch, self._rank, self._drawn))
                self._drawn += len(samples)
                return (self._settings.collate(samples), len(samples)) if samples else None
            finally:
                if not self._split:
                    self._noise = Generators()

    def renew(self) -> None:
        """Restart persistent processes with the next pass."""
        self._stale = True

    def close(self) -> None:
        if self._stale or not self._settings.persistent_workers:
            shut_down(self._chunks)
        if self._stale and self._loader is not None:
            self._loader, self._stale = self._make_loader(), False
        self._chunks = self._samples = self._noise = None

    def end(self) -> None:
        """End the loader processes, persistent ones too."""
        shut_down(self._chunks)
        self.close()

    def _gather(self, count: int) -> list[Any]:
        assert self._samples is not None
        samples = []
        for sample in islice(self._samples, count):
            if isinstance(sample, LoaderFailure):
                sample.reraise()
            samples.append(sample)
        return samples

    def _make_loader(self) -> DataLoader[Any]:
        """Return a loader of chunks of the user's batch size, not collated: a micro-batch's size is known later."""
        settings = self._settings
        return DataLoader(
            self._guarded,
            batch_size=settings.batch_size or 1,
            collate_fn=as_it_is,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            timeout=settings.timeout,
            worker_init_fn=(InitStream if self._split else InitWorker)(settings.worker_init_fn),
            multiprocessing_context=settings.multiprocessing_context,
            generator=settings.generator or self._own_generator,
            persistent_workers=settings.persistent_workers,
        )
