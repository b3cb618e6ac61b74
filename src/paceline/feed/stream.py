"""Iterable datasets: each worker draws from its own stream, and collates as many samples as its share asks for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.feed.keys import key
from paceline.feed.loader_settings import Settings
from paceline.feed.processes import Failure, InitWorker, as_it_is, shut_down
from paceline.feed.randomness import Generators, generators_kept, seed_generators


class Guarded(IterableDataset[Any]):
    """The user's stream, whose exceptions come through as they are."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.dataset
        except Exception as error:
            yield Failure.of(error)


class Stream:
    """One worker's passes over an iterable dataset, with or without loader processes.

    The noise of a pass is keyed by (seed, epoch, rank): no two workers share it, though within a pass it depends on
    the order in which the stream gives its samples.
    """

    def __init__(self, settings: Settings, *, seed: int, rank: int) -> None:
        self._settings = settings
        self._seed = seed
        self._rank = rank
        self._own_generator = torch.Generator()
        self._loader = self._make_loader() if settings.num_workers else None
        self._chunks: Iterator[Any] | None = None
        self._samples: Iterator[Any] | None = None
        self._noise: Generators | None = None

    def restart(self, epoch: int) -> None:
        """A new pass. A dataset with ``set_epoch`` is told which."""
        self.close()
        if callable(getattr(self._settings.dataset, "set_epoch", None)):
            self._settings.dataset.set_epoch(epoch)
        stream_key = key(self._seed, epoch, self._rank)
        self._own_generator.manual_seed(stream_key)
        with generators_kept():
            seed_generators(stream_key)
            if self._loader is None:
                self._samples = iter(self._settings.dataset)
            else:
                self._chunks = iter(self._loader)
                self._samples = chain.from_iterable(self._chunks)
            self._noise = Generators()

    def draw(self, count: int) -> tuple[Any, int] | None:
        """Up to ``count`` samples, collated, and how many they are; None when the stream has ended."""
        if count < 1:
            raise ValueError(f"draw needs a count of at least 1, got {count}")
        if self._samples is None:
            self.restart(0)
        assert self._noise is not None
        with generators_kept():  # the stream has its own noise, which goes on from one draw to the next
            self._noise.restore()
            try:
                return self._gather(count)
            finally:
                self._noise = Generators()

    def close(self) -> None:
        if not self._settings.persistent_workers:
            shut_down(self._chunks)
        self._chunks = self._samples = self._noise = None

    def end(self) -> None:
        """End the loader processes, persistent ones too."""
        shut_down(self._chunks)
        self.close()

    def _gather(self, count: int) -> tuple[Any, int] | None:
        assert self._samples is not None
        samples = []
        for sample in islice(self._samples, count):
            if isinstance(sample, Failure):
                sample.reraise()
            samples.append(sample)
        return (self._settings.collate(samples), len(samples)) if samples else None

    def _make_loader(self) -> DataLoader[Any]:
        """Samples travel in chunks of the user's batch size, not collated: how many make a micro-batch shows later."""
        settings = self._settings
        return DataLoader(
            Guarded(settings.dataset),
            batch_size=settings.batch_size or 1,
            collate_fn=as_it_is,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            timeout=settings.timeout,
            worker_init_fn=InitWorker(settings.worker_init_fn),
            multiprocessing_context=settings.multiprocessing_context,
            generator=settings.generator or self._own_generator,
            persistent_workers=settings.persistent_workers,
        )
