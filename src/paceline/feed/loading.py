"""A Dataset or DataLoader seen as one question: give me these samples, collated, on this device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from paceline.feed.batches import Batches, BatchOrder, once_each
from paceline.feed.fetching import Fetcher, Glance, Piece, make_fetcher
from paceline.feed.loader_settings import read_settings
from paceline.feed.pipeline import Pipeline
from paceline.feed.placing import move, pin
from paceline.feed.randomness import TorchGenerators, generators_kept
from paceline.feed.samplers import SamplerOrder
from paceline.feed.stream import Stream
from paceline.records import Range


class Source:
    """Loads micro-batches the way the user's DataLoader would: its dataset, collate function, processes and pinning.

    Args:
        data: a map-style dataset, an IterableDataset, or a DataLoader over one of them.
        device: where the batches go.
        seed: of the samples' noise (`paceline.feed.randomness`).
        rank: this worker's; only an iterable dataset's noise depends on it.
        split: an iterable dataset does not divide itself, and is divided among workers and loader processes.
    """

    def __init__(
        self,
        data: Dataset[Any] | DataLoader[Any] | Any,
        *,
        device: torch.device,
        seed: int,
        rank: int = 0,
        split: bool = False,
    ) -> None:
        settings = read_settings(data)
        self.dataset = settings.dataset
        self.split = split
        self.name = type(settings.dataset).__name__
        """Of the dataset's class."""
        self.length = settings.length
        self.shuffle = settings.shuffle
        self.drop_last = settings.drop_last
        self.order: SamplerOrder | BatchOrder | None = None
        """The DataLoader's sampler or batch sampler, where it decides the order."""
        if settings.sampler is not None:
            self.order = SamplerOrder(settings.sampler, length=settings.length or 0, seed=seed)
        elif settings.batches is not None:
            self.order = BatchOrder(settings.batches, length=settings.length or 0, seed=seed)
        self.batch_size = settings.batch_size
        self._device = device
        self._pin, self._asked_to_pin = device.type == "cuda", settings.pin_memory
        self._stream = Stream(settings, seed=seed, rank=rank, split=split) if settings.length is None else None
        self._settings, self._seed = settings, seed
        self._fetch = make_fetcher(settings.dataset, collate=settings.collate, seed=seed)
        self._pipeline: Pipeline | None = None
        if self._stream is None and settings.num_workers and isinstance(self._fetch, Fetcher):
            self._pipeline = Pipeline(settings, pin_memory=self._pin and self._asked_to_pin, seed=seed)
        self.ahead = settings.num_workers * settings.prefetch_factor if self._pipeline else 0
        """Micro-batches it likes to load ahead."""

    def take(self, epoch: int, ranges: tuple[Range, ...], indices: NDArray[np.int64]) -> Any:
        """The micro-batch at these positions of the epoch (and these indices of the dataset), on the device."""
        assert self._stream is None, "an iterable dataset is drawn from"
        assert len(indices), "a micro-batch holds at least one sample"
        piece = Piece(epoch, ranges, indices)
        if self._pipeline is not None:
            return self._place(self._pipeline.take(piece))
        return self._place(self._load_here(piece))

    def expect(self, epoch: int, pieces: Sequence[tuple[tuple[Range, ...], NDArray[np.int64]]]) -> None:
        """What will likely be taken next, in order; it replaces what was expected before. Never blocks for loading."""
        if self._pipeline is not None:
            self._pipeline.expect([Piece(epoch, ranges, indices) for ranges, indices in pieces])

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fingerprints of samples (`Glance.of`), read where micro-batches are: in a loader process if there is one, as
        a dataset may open there what processes cannot share. The user's random numbers stay as they were."""
        if self._stream is not None:
            return {"found": [], "seconds": 0.0, "why": "it is an IterableDataset"}
        asked = Glance(tuple(indices))
        if self._pipeline is None:
            with generators_kept():
                devices = TorchGenerators(self._device)
                found = asked.of(self._fetch)
                devices.restore()
            return found
        try:
            return dict(self._pipeline.take(asked))
        except Exception as error:  # of the user's init, or a process that died: the loop will meet it, and say so
            self._pipeline.close()
            return {"found": [], "seconds": 0.0, "why": f"a loader process raised {type(error).__name__}"}

    @property
    def batched(self) -> bool:
        """Whether a batch sampler gives the micro-batches."""
        return isinstance(self.order, BatchOrder)

    @cached_property
    def once(self) -> NDArray[np.int64] | int:
        """What an evaluation goes through: so many samples, or the indices that the sampler draws. Batches that hold
        every sample once say no more than that."""
        length = self.length or 0
        if self.order is None:
            return length
        drawn = self.order.aside(0)
        if not isinstance(drawn, Batches):
            return drawn
        self.batch_size = drawn.mean  # known only now
        return length if once_each(drawn, length) else drawn.indices

    def new_epoch(self, epoch: int) -> None:
        """An epoch begins: whatever the script has changed in the dataset since the last one counts from here on, in
        loader processes too, unless they are persistent."""
        self._fetch = make_fetcher(self._settings.dataset, collate=self._settings.collate, seed=self._seed)
        if self.length is not None and (length := len(self._settings.dataset)) != self.length:
            raise ValueError(
                f"the dataset had {self.length} samples when fleet.steps began and has {length} now: keep its length, "
                "and choose what an epoch trains on with order=fn(epoch), or call fleet.steps anew"
            )
        if self.order is not None:
            self.order.check_unchanged(epoch)
        if self._pipeline is not None and not self._settings.persistent_workers:
            self._pipeline.close()

    def renew(self) -> None:
        """Hand the dataset as it is now to the loader processes, persistent ones too; a stream's from its next pass."""
        if self._pipeline is not None:
            self._pipeline.close()
        elif self._stream is not None:
            self._stream.renew()
        else:
            self._fetch = make_fetcher(self._settings.dataset, collate=self._settings.collate, seed=self._seed)

    def draw(self, count: int) -> tuple[Any, int] | None:
        """Iterable datasets: up to ``count`` samples of this worker's stream on the device, and how many they are;
        None at its end.
        """
        assert self._stream is not None, "a map-style dataset is taken from"
        drawn = self._stream.draw(count)
        return None if drawn is None else (self._place(drawn[0]), drawn[1])

    def restart(self, epoch: int, part: tuple[int, int] = (0, 1)) -> None:
        """Iterable datasets: begin a new pass. ``part``: (w, W) when this is worker w of W who divide the stream."""
        assert self._stream is not None, "a map-style dataset needs no restart"
        self._stream.restart(epoch, part)

    def close(self) -> None:
        """End the loader processes."""
        if self._pipeline is not None:
            self._pipeline.close()
        if self._stream is not None:
            self._stream.end()

    def _load_here(self, piece: Piece) -> Any:
        if not self._fetch.random:
            return self._fetch(piece)
        with generators_kept():
            return self._fetch(piece)

    def _place(self, batch: Any) -> Any:
        if type(batch) is list and all(type(part) is torch.Tensor and part.device == self._device for part in batch):
            return batch
        return move(pin(batch, asked=self._asked_to_pin) if self._pin else batch, self._device)
