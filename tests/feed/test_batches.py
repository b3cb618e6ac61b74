"""Batches of a batch sampler: the same wherever they are drawn, and dealt undivided."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from paceline.feed import Batches, Feed, Source, batch_count_note
from paceline.feed.custom_orders import BatchOrder, once_each
from paceline.feed.dealing import BatchDealing
from paceline.records import StepRecord

N = 40


class Pairs(Sampler[list[int]]):
    """A sampler of batches of one to four indices that reuses one list, as some batch samplers do."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) > random.randrange(4):
                yield batch
                batch.clear()
        if batch:
            yield batch


class Told(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches, self.epoch = batches, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class ByEpoch(Sampler[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, self.epoch + 1])


def made() -> BatchOrder:
    return BatchOrder(Pairs(RandomSampler(range(N))), length=N, seed=3)


def test_an_epochs_batches_are_the_same_wherever_they_are_drawn_and_the_users_numbers_stay() -> None:
    one, other = made(), made()
    before = torch.random.get_rng_state(), random.getstate()
    drawn = [one(epoch) for epoch in range(3)]
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert other(2).digest() == drawn[2].digest()
    assert len({batches.digest() for batches in drawn}) == 3
    assert all(once_each(batches, N) for batches in drawn)


def test_samplers_within_a_batch_sampler_hear_of_the_epoch() -> None:
    order = BatchOrder(Pairs(ByEpoch()), length=N, seed=0)
    assert order(7).indices.tolist() == [7, 8]


def test_a_list_of_batches_that_the_script_changes_after_the_draw_is_refused() -> None:
    batches = [[0, 1], [2]]
    order = BatchOrder(batches, length=N, seed=0)
    order(1)
    order.check_unchanged(1)
    batches.reverse()
    with pytest.raises(ValueError, match="list was changed after it had drawn the order of epoch 1"):
        order.check_unchanged(1)


def test_an_evaluation_of_the_same_batches_does_not_disturb_the_training() -> None:
    sampler = Told([[0, 1], [2]])
    order = BatchOrder(sampler, length=3, seed=0)
    order(4)
    loader = DataLoader(TensorDataset(torch.arange(3)), batch_sampler=sampler)
    source = Source(loader, device=torch.device("cpu"), seed=0)
    assert source.once == 3
    assert source.batch_size == 1
    assert sampler.epoch == 4
    order.check_unchanged(4)


def test_batches_that_are_shuffled_in_place_cannot_be_drawn_again_beyond_the_first_epoch() -> None:
    class InPlace(Sampler[list[int]]):
        def __init__(self) -> None:
            self.batches = [[number] for number in range(N)]

        def __iter__(self) -> Iterator[list[int]]:
            random.shuffle(self.batches)
            return iter(self.batches)

    first, second = (Feed(N, workers=1, order=BatchOrder(InPlace(), length=N, seed=0)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    first.open(1)
    third = Feed(N, workers=1, order=BatchOrder(InPlace(), length=N, seed=0), epoch=1)
    with pytest.raises(ValueError, match="now gives another order"):
        third.load_state_dict(first.state_dict())


def test_a_batch_sampler_without_an_end_is_refused() -> None:
    class Endless(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield [0, 1]

    with pytest.raises(ValueError, match=r"Endless gave .* and no end"):
        BatchOrder(Endless(), length=N, seed=0)(0)
    with pytest.raises(ValueError, match="gave no batches"):
        BatchOrder([], length=N, seed=0)(0)


def test_the_same_samples_in_other_batches_are_another_order() -> None:
    feeds = [
        Feed(3, workers=1, order=lambda epoch, batches=batches: Batches.from_lists(batches))  # type: ignore[misc]
        for batches in ([[0, 1], [2]], [[0], [1, 2]])
    ]
    assert [feed.length for feed in feeds] == [2, 2]
    assert feeds[0].indices([(0, 1)]).tolist() == [0, 1]
    with pytest.raises(ValueError, match="now gives another order"):
        feeds[0].load_state_dict(feeds[1].state_dict())


def test_batches_that_hold_every_sample_once_are_told_from_others() -> None:
    assert once_each(Batches.from_lists([[2, 0], [1]]), 3)
    assert not once_each(Batches.from_lists([[2, 0], [0]]), 3)
    assert not once_each(Batches.from_lists([[2, 0]]), 3)
    assert not once_each(Batches.from_lists([[2, 0], [-2]]), 3)


def test_a_number_that_may_be_meant_as_samples_is_warned_of() -> None:
    batches = Batches.from_lists([[0] * 16] * 100)
    assert batch_count_note("Buckets", batches, global_batch=8, workers=1)[0] == "info"
    assert batch_count_note("Buckets", batches, global_batch=48, workers=4)[0] == "info"
    level, text = batch_count_note("Buckets", batches, global_batch=64, workers=4)
    assert level == "warning"
    assert text.endswith("about 1024 samples; if you mean 64 samples per step, write global_batch=4")


@pytest.mark.parametrize("committed", [False, True])
def test_a_record_of_batches_is_told_in_samples(committed: bool) -> None:
    given = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14]]
    source = Source(DataLoader(TensorDataset(torch.arange(N)), batch_sampler=given), device=torch.device("cpu"), seed=0)
    feed = Feed(N, workers=2, order=source.order)
    dealing = BatchDealing(feed, source, rank=0, micro_batch=1, ahead=[0, 0])
    planned = dealing.deal([3, 2])
    done = (2, 2)
    ranges = dealing.commit(done, False) if committed else ()
    record = StepRecord(0, 0, 0, workers=(0, 1), planned=planned, samples=done, seconds=(0.1, 0.1), ranges=ranges)
    record_in_samples = dealing.in_samples(record)
    assert (record_in_samples.planned, record_in_samples.samples) == ((6, 9), (3, 9))
    assert record_in_samples.ranges == ((((0, 3),), ((6, 15),)) if committed else ())


def test_a_batch_counts_as_one_and_weighs_its_samples() -> None:
    given = [[5, 5, 6], [7]]
    source = Source(DataLoader(TensorDataset(torch.arange(N)), batch_sampler=given), device=torch.device("cpu"), seed=0)
    dealing = BatchDealing(Feed(N, workers=1, order=source.order), source, rank=0, micro_batch=1, ahead=[0])
    dealing.deal([2])
    dealing.begin_share(2)
    first, second, none = (dealing.take(1) for _ in range(3))
    assert first is not None
    assert second is not None
    assert none is None
    assert [first.batch[0].tolist(), second.batch[0].tolist()] == given
    assert [(micro.samples, micro.rows, micro.last) for micro in (first, second)] == [(1, 3, False), (1, 1, True)]
