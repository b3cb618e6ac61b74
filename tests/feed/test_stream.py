from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.feed import Source

CPU = torch.device("cpu")


class Counting(IterableDataset[Any]):
    """0 to 9 (divided among loader processes), each with random numbers and the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for value in range(first, 10, stride):
            yield value, self.epoch, random.random() + np.random.rand() + torch.rand(()).item()


class Breaking(Counting):
    def __iter__(self) -> Iterator[Any]:
        yield 1
        raise KeyError("no such shard")


def collate_with_noise(samples: list[Any]) -> tuple[list[int], float]:
    return [value for value, _, _ in samples], torch.rand(()).item()


def draw_all(source: Source, count: int) -> list[list[Any]]:
    rows = []
    while (drawn := source.draw(count)) is not None:
        batch, samples = drawn
        assert samples == len(batch[0])
        rows.append([column.tolist() for column in batch])
    assert source.draw(count) is None, "an ended stream stays ended"
    return rows


def flat(rows: list[list[Any]], column: int) -> list[Any]:
    return [value for row in rows for value in row[column]]


@pytest.mark.fleet
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_gives_every_sample_in_micro_batches_of_the_asked_size(workers: int) -> None:
    source = Source(DataLoader(Counting(), batch_size=3, num_workers=workers), device=CPU, seed=0)
    source.restart(4)
    rows = draw_all(source, 4)
    source.close()
    assert [len(row[0]) for row in rows] == [4, 4, 2]
    assert sorted(flat(rows, 0)) == list(range(10))
    assert set(flat(rows, 1)) == {4}
    assert source.length is None
    assert not multiprocessing.active_children()


@pytest.mark.fleet
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_repeats_its_noise_and_shares_it_with_no_other_pass_or_worker(workers: int) -> None:
    def noise(epoch: int, rank: int) -> list[float]:
        loader = DataLoader(Counting(), batch_size=3, num_workers=workers)
        source = Source(loader, device=CPU, seed=0, rank=rank)
        source.restart(epoch)
        drawn = flat(draw_all(source, 4), 2)
        source.close()
        return drawn

    first = noise(0, 0)
    assert noise(0, 0) == first
    assert not set(noise(1, 0)) & set(first)
    assert not set(noise(0, 1)) & set(first)


def test_drawing_leaves_the_users_random_numbers_alone_and_goes_on_with_its_own() -> None:
    source = Source(Counting(), device=CPU, seed=0)
    state = torch.get_rng_state()
    first, second = source.draw(2), source.draw(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert first is not None
    assert second is not None
    assert not set(first[0][2].tolist()) & set(second[0][2].tolist())


@pytest.mark.fleet
@pytest.mark.parametrize("workers", [0, 1])
def test_a_random_collate_gives_new_noise_every_time(workers: int) -> None:
    loader = DataLoader(Counting(), batch_size=2, num_workers=workers, collate_fn=collate_with_noise)
    source = Source(loader, device=CPU, seed=0)
    drawn = [source.draw(2) for _ in range(4)]
    source.close()
    assert len({batch[1] for batch, _ in drawn}) == 4  # type: ignore[misc]


@pytest.mark.fleet
@pytest.mark.parametrize("persistent", [False, True])
def test_a_restart_in_mid_stream_begins_a_whole_new_pass(persistent: bool) -> None:
    loader = DataLoader(Counting(), batch_size=2, num_workers=2, persistent_workers=persistent)
    source = Source(loader, device=CPU, seed=0)
    source.draw(3)
    source.restart(1)
    assert sorted(flat(draw_all(source, 5), 0)) == list(range(10))
    source.close()
    assert not multiprocessing.active_children()


@pytest.mark.fleet
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_the_stream_reaches_the_user_as_it_is(workers: int) -> None:
    source = Source(DataLoader(Breaking(), num_workers=workers), device=CPU, seed=0)
    with pytest.raises(KeyError) as caught:
        source.draw(5)
    source.close()
    assert caught.value.args == ("no such shard",)


def test_a_draw_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Source(Counting(), device=CPU, seed=0).draw(0)
