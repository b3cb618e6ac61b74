"""The samples of a Dataset or DataLoader, collated, on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from paceline.feed.custom_orders import Batches, BatchOrder, SamplerOrder, once_each
from paceline.feed.loader_settings import read_settings
from paceline.feed.loading import EpochPiece, Fetcher, Glance, Pipeline, make_fetcher
from paceline.feed.randomness import generators_kept
from paceline.feed.stream import Stream
from paceline.records import Range


class Source:
    """Loader of micro-batches with the user's own dataset, collate function, processes and pinning.

    Args:
        data: a map-style dataset, an IterableDataset, or a DataLoader over one of them.
        device: device that the batches are copied to.
        seed: seed of the samples' random numbers (`paceline.feed.randomness`).
        rank: this worker's rank; only the random numbers of an iterable dataset depend on it.
        split: whether an iterable dataset is divided here among workers and loader processes.
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
        """Name of the dataset's class."""
        self.length = settings.length
        self.shuffle = settings.shuffle
        self.drop_last = settings.drop_last
        self.order: SamplerOrder | BatchOrder | None = None
        """Order of the DataLoader's sampler or batch sampler, where it decides the order."""
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
        """Micro-batches that are loaded ahead."""

    def take(self, epoch: int, ranges: tuple[Range, ...], indices: NDArray[np.int64]) -> Any:
        """Return the micro-batch at these positions of the epoch and these indices of the dataset, on the device."""
        assert self._stream is None, "an iterable dataset is drawn from"
        assert len(indices), "a micro-batch holds at least one sample"
        piece = EpochPiece(epoch, ranges, indices)
        if self._pipeline is not None:
            return self._to_device(self._pipeline.take(piece))
        return self._to_device(self._load_here(piece))

    def expect(self, epoch: int, pieces: Sequence[tuple[tuple[Range, ...], NDArray[np.int64]]]) -> None:
        """Load ahead, in order, what will likely be taken next; it replaces what was expected before.

        Never waits for loading.
        """
        if self._pipeline is not None:
            self._pipeline.expect([EpochPiece(epoch, ranges, indices) for ranges, indices in pieces])

    def look(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return fingerprints of samples (`Glance.read`); the user's random numbers stay as they were.

        They are read where micro-batches are, in a loader process if there is one: a dataset may open there what
        processes cannot share.
        """
        if self._stream is not None:
            return {"found": [], "seconds": 0.0, "why": "it is an IterableDataset"}
        asked = Glance(tuple(indices))
        if self._pipeline is None:
            with generators_kept(self._device):
                return asked.read(self._fetch)
        try:
            return dict(self._pipeline.take(asked))
        except Exception as error:  # from the user's init or a dead process; the loop will raise it
            self._pipeline.close()
            return {"found": [], "seconds": 0.0, "why": f"a loader process raised {type(error).__name__}"}

    @property
    def batched(self) -> bool:
        """Return whether a batch sampler gives the micro-batches."""
        return isinstance(self.order, BatchOrder)

    @cached_property
    def once(self) -> NDArray[np.int64] | int:
        """Return what an evaluation goes through: a number of samples, or the indices that the sampler draws.

        Batches that hold every sample once are the number of samples.
        """
        length = self.length or 0
        if self.order is None:
            return length
        drawn = self.order.for_evaluation(0)
        if not isinstance(drawn, Batches):
            return drawn
        self.batch_size = drawn.mean  # unknown before the first draw
        return length if once_each(drawn, length) else drawn.indices

    def new_epoch(self, epoch: int) -> None:
        """Begin an epoch with the dataset as the script has changed it since the last one.

        Loader processes get it too, unless they are persistent.
        """
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
        """Hand the current dataset to the loader processes, persistent ones too; to a stream's with its next pass."""
        if self._pipeline is not None:
            self._pipeline.close()
        elif self._stream is not None:
            self._stream.renew()
        else:
            self._fetch = make_fetcher(self._settings.dataset, collate=self._settings.collate, seed=self._seed)

    def draw(self, count: int) -> tuple[Any, int] | None:
        """Return up to ``count`` samples of this worker's stream on the device, and their number; None at its end.

        For iterable datasets only.
        """
        assert self._stream is not None, "a map-style dataset is taken from"
        drawn = self._stream.draw(count)
        return None if drawn is None else (self._to_device(drawn[0]), drawn[1])

    def restart(self, epoch: int, part: tuple[int, int] = (0, 1)) -> None:
        """Begin a new pass over an iterable dataset.

        Args:
            epoch: number of the pass.
            part: (w, W) when this is worker w of the W that divide the stream.
        """
        assert self._stream is not None, "a map-style dataset needs no restart"
        self._stream.restart(epoch, part)

    def close(self) -> None:
        """End the loader processes."""
        if self._pipeline is not None:
            self._pipeline.close()
        if self._stream is not None:
            self._stream.end()

    def _load_here(self, piece: EpochPiece) -> Any:
        if not self._fetch.random:
            return self._fetch(piece)
        with generators_kept():
            return self._fetch(piece)

    def _to_device(self, batch: Any) -> Any:
        if type(batch) is list and all(type(part) is torch.Tensor and part.device == self._device for part in batch):
            return batch
        return move(pin(batch, asked=self._asked_to_pin) if self._pin else batch, self._device)


def move(data: Any, device: torch.device) -> Any:
    """Return the same structure with every tensor on ``device``; copies from pinned memory do not block."""

    def to(leaf: Any) -> Any:
        if type(leaf) is torch.Tensor and leaf.device == device:
            return leaf
        try:
            return leaf.to(device, non_blocking=True)
        except TypeError:  # the user's own batch class, whose .to takes only the device
            return leaf.to(device)

    return _each(data, to, method="to")


def pin(data: Any, *, asked: bool) -> Any:
    """Return the same structure with every tensor in page-locked memory.

    From other memory, the copy to a GPU would block the host until the GPU has done everything before it. ``asked``:
    the user set ``pin_memory``; objects that can pin themselves are then pinned too.
    """

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if asked else leaf
        return leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout is torch.strided else leaf

    return _each(data, to, method="pin_memory")


def _each(data: Any, change: Callable[[Any], Any], *, method: str) -> Any:
    """Apply ``change`` to every part of a nested structure that has ``method``; leave the rest unchanged.

    Tuples, lists, dicts, named tuples, dataclasses and objects with the method are supported.
    """
    if callable(getattr(data, method, None)):
        return change(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_each(part, change, method=method) for part in data))
    if isinstance(data, (tuple, list)):
        return type(data)(_each(part, change, method=method) for part in data)
    if isinstance(data, Mapping):
        parts = {name: _each(part, change, method=method) for name, part in data.items()}
        if not isinstance(data, MutableMapping):
            return parts
        same_kind = copy.copy(data)
        same_kind.update(parts)
        return same_kind
    if is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in fields(data):  # past a frozen dataclass's guard: the copy is ours
            object.__setattr__(changed, field.name, _each(getattr(data, field.name), change, method=method))
        return changed
    return data
