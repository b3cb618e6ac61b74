from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.feed.loader_settings import read_settings

DATA = TensorDataset(torch.arange(10))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class LengthRaises(NoLength):
    def __len__(self) -> int:
        raise NotImplementedError


class OwnPart(DistributedSampler[int]):
    """A sampler that a script derived from torch's."""


class InBatches(Sampler[list[int]]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter([[index] for index in self.sampler])


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=3),
        SubsetRandomSampler([1, 2]),
        WeightedRandomSampler([1.0] * 10, 20),
        [3, 1],
    ],
)
def test_a_sampler_that_decides_the_order_is_taken_as_it_is(sampler: Any) -> None:
    settings = read_settings(DataLoader(DATA, sampler=sampler))
    assert settings.sampler is sampler
    assert settings.shuffle is None


def test_torchs_own_batch_sampler_says_no_more_than_sampler_and_batch_size() -> None:
    inner = WeightedRandomSampler([1.0] * 10, 20)
    settings = read_settings(DataLoader(DATA, batch_sampler=BatchSampler(inner, 4, True)))
    assert (settings.sampler, settings.batch_size, settings.drop_last) == (inner, 4, True)
    settings = read_settings(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)))
    assert (settings.sampler, settings.shuffle, settings.drop_last) == (None, True, False)


@pytest.mark.parametrize("batches", [[[1, 2], [3]], InBatches(range(10))])
def test_a_batch_sampler_of_another_kind_gives_the_batches(batches: Any) -> None:
    settings = read_settings(DataLoader(DATA, batch_sampler=batches, num_workers=1))
    assert settings.batches is batches
    assert (settings.sampler, settings.batch_size, settings.drop_last, settings.num_workers) == (None, None, False, 1)


def test_a_plain_dataset_says_nothing_of_shuffling() -> None:
    settings = read_settings(DATA)
    assert (settings.length, settings.shuffle, settings.drop_last, settings.batch_size) == (10, None, False, None)
    assert read_settings([1, 2, 3]).length == 3


def test_a_loader_is_read_in_full() -> None:
    def collate(samples: Any) -> Any:
        return samples

    def init(worker: int) -> None: ...

    generator = torch.Generator()
    loader = DataLoader(
        DATA,
        batch_size=4,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=3,
        collate_fn=collate,
        worker_init_fn=init,
        timeout=9,
        pin_memory=True,
        generator=generator,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    settings = read_settings(loader)
    assert (settings.dataset, settings.collate, settings.worker_init_fn) == (DATA, collate, init)
    assert (settings.batch_size, settings.shuffle, settings.drop_last) == (4, True, True)
    assert (settings.num_workers, settings.prefetch_factor, settings.timeout) == (2, 3, 9)
    assert settings.generator is generator
    assert settings.pin_memory
    assert settings.persistent_workers
    assert settings.multiprocessing_context.get_start_method() == "spawn"


def test_samplers_that_only_say_shuffle_or_not_are_understood() -> None:
    assert read_settings(DataLoader(DATA)).shuffle is False
    assert read_settings(DataLoader(DATA, sampler=SequentialSampler(DATA))).shuffle is False
    assert read_settings(DataLoader(DATA, sampler=RandomSampler(DATA))).shuffle is True


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_accepted_and_no_longer_needed(shuffle: bool, caplog: Any) -> None:
    sampler = DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=shuffle, drop_last=True)
    with caplog.at_level(logging.INFO):
        settings = read_settings(DataLoader(DATA, sampler=sampler))
    assert (settings.length, settings.shuffle, settings.drop_last) == (10, shuffle, True)
    assert "no longer needed" in caplog.text


def test_an_iterable_dataset_has_no_length() -> None:
    assert read_settings(Endless()).length is None
    settings = read_settings(DataLoader(Endless(), batch_size=3))
    assert (settings.length, settings.shuffle, settings.batch_size) == (None, None, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(DATA, batch_sampler=iter([[1, 2], [3]])), "batch_sampler is a list_iterator.*only once"),
        (
            lambda: DataLoader(DATA, batch_sampler=InBatches(OwnPart(DATA, 2, 0))),
            r"one worker's part \(OwnPart divides",
        ),
        (lambda: (DataLoader(DATA), DataLoader(DATA)), r"StackDataset\(a, b\)"),
        (lambda: [DATA, DATA], r"StackDataset\(a, b\)"),
        (lambda: {"a": DATA, "b": DATA}, r"StackDataset\(a, b\)"),
        (lambda: zip(DataLoader(DATA), DataLoader(DATA), strict=True), r"StackDataset\(a, b\)"),
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None gives whole batches"),
        (lambda: DataLoader(DATA, sampler=OwnPart(DATA, 2, 0)), "OwnPart draws one worker's part.*order="),
        (list, "empty"),
        (lambda: TensorDataset(torch.zeros(0)), "empty"),
        (NoLength, "NoLength has no length.*IterableDataset"),
        (LengthRaises, "LengthRaises has no length"),
        (lambda: iter([1, 2]), "has no length"),
        (lambda: {1, 2}, "has no __getitem__"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_advice(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(make())
