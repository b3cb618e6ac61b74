"""The settings of the user's Dataset or DataLoader, read once; what cannot be honoured is refused with advice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.feed.custom_orders import within

log = logging.getLogger(__name__)

_ORDER_ADVICE = "pass order=fn(epoch), which returns the dataset indices of that epoch in the order you want"
_PARTS = ("num_replicas", "world_size", "num_processes")
"""Attribute names under which samplers that draw one worker's part store the number of parts."""


@dataclass(frozen=True)
class Settings:
    """Settings for loading samples; the defaults are those of a plain Dataset."""

    dataset: Any
    length: int | None
    """Samples in the dataset; None for an iterable dataset."""
    collate: Callable[[Any], Any] = default_collate
    batch_size: int | None = None
    shuffle: bool | None = None
    """Whether epochs are shuffled; None where the user did not specify it."""
    sampler: Any = None
    """Sampler that decides the order; None where the feed does."""
    batches: Any = None
    """Batch sampler whose batches are dealt unchanged; None where micro-batches are cut from shares."""
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    generator: torch.Generator | None = None
    persistent_workers: bool = False


def read_settings(data: Any) -> Settings:
    """Return the settings of a Dataset (``__len__`` and ``__getitem__``), an IterableDataset or a DataLoader."""
    _refuse_several(data)
    if not isinstance(data, DataLoader):
        return Settings(dataset=data, length=_length(data))
    plain = type(data.batch_sampler) is BatchSampler  # made by torch from batch_size, or equivalent
    if not plain and data.batch_size is None:
        return Settings(batches=_read_batch_sampler(data.batch_sampler), **_loading(data))
    batches: Any = data.batch_sampler
    loading = _loading(data)
    length = loading["length"]
    shuffle, drop_last, sampler = (None, False, None) if length is None else _read_sampler(batches.sampler, length)
    return Settings(
        batch_size=batches.batch_size,
        shuffle=shuffle,
        sampler=sampler,
        drop_last=batches.drop_last or drop_last,
        **loading,
    )


def _loading(data: DataLoader[Any]) -> dict[str, Any]:
    """Return those settings of the DataLoader that do not concern its order."""
    return {
        "dataset": data.dataset,
        "length": _length(data.dataset),
        "collate": data.collate_fn,
        "num_workers": data.num_workers,
        "prefetch_factor": max(1, data.prefetch_factor or 1),
        "pin_memory": data.pin_memory,
        "timeout": data.timeout,
        "worker_init_fn": data.worker_init_fn,
        "multiprocessing_context": data.multiprocessing_context,
        "generator": data.generator,
        "persistent_workers": data.persistent_workers,
    }


def _refuse_several(data: Any) -> None:
    """Raise ValueError for several datasets or loaders in a list, tuple or dict, which would pass for one dataset."""
    parts = list(data.values()) if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else []
    if isinstance(data, zip) or any(isinstance(part, (DataLoader, Dataset)) for part in parts):
        raise ValueError(
            "fleet.steps, evaluate and predict take one dataset: torch.utils.data.StackDataset(a, b) gives the samples "
            "(a[i], b[i]) of datasets of one length, ConcatDataset([a, b]) one after the other (docs/data.md has a "
            "recipe for unlike lengths)"
        )


def _length(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{type(dataset).__name__} has no length, so its samples cannot be dealt exactly once; give it __len__ "
            "and __getitem__, or make it a torch.utils.data.IterableDataset (each worker then draws its own stream)"
        ) from error
    if not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{type(dataset).__name__} has no __getitem__: pass a Dataset or a DataLoader")
    if length == 0:
        raise ValueError("the dataset is empty: there is nothing to train on")
    return length


def _read_batch_sampler(batches: Any) -> Any:
    """Return the batch sampler, or raise ValueError where it does not give the fleet's batches."""
    if batches is None:
        raise ValueError(
            "a DataLoader with batch_size=None gives whole batches, which cannot be dealt in shares: let the dataset "
            "give single samples and set batch_size (micro_batch in fleet.steps decides what is loaded at once)"
        )
    name = type(batches).__name__
    if isinstance(batches, Iterator):
        raise ValueError(
            f"the DataLoader's batch_sampler is a {name}, which gives its batches only once: pass a list of batches, "
            "or an object whose __iter__ gives them for every epoch"
        )
    for one in within(batches):
        if any((getattr(one, parts, None) or 1) != 1 for parts in _PARTS):
            raise ValueError(
                f"the DataLoader's batch_sampler ({name}) gives one worker's part ({type(one).__name__} divides), and "
                "Paceline deals the parts: make it so that it gives all batches of an epoch on every worker"
            )
    return batches


def _read_sampler(sampler: Any, length: int) -> tuple[bool | None, bool, Any]:
    """Return (shuffle, drop_last, sampler); sampler is None where it only says whether to shuffle."""
    if type(sampler) is SequentialSampler:
        return False, False, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return True, False, None
    if type(sampler) is DistributedSampler:
        log.info("the DistributedSampler is no longer needed: Paceline deals the samples (its shuffle is kept)")
        return sampler.shuffle, sampler.drop_last, None
    if isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"):
        raise ValueError(
            f"the DataLoader's {type(sampler).__name__} draws one worker's part, and Paceline deals the parts: drop it "
            f"and {_ORDER_ADVICE}"
        )
    return None, False, sampler
