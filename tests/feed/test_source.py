from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from paceline.feed import Feed, Source, positions, split
from paceline.feed.loading import EpochPiece, Fetcher
from paceline.feed.source import move

CPU = torch.device("cpu")
LENGTH = 60


class Noisy(Dataset[Any]):
    """Index, and random numbers from all three generators, as an augmentation would draw them.

    Some samples draw more.
    """

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        for _ in range(index % 3):
            random.random(), np.random.rand(), torch.rand(5)
        return index, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


class Where(Noisy):
    """A dataset that returns which process fetched a sample."""

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


class Counted(Noisy):
    """A dataset that counts, across processes, how many samples were fetched; each takes 10 ms."""

    def __init__(self) -> None:
        self.fetched = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        with self.fetched.get_lock():
            self.fetched.value += 1
        return index


class Together(Noisy):
    """A dataset that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(index, torch.rand(()).item()) for index in indices]


class Refused(Exception):
    """An exception that cannot be unpickled: its constructor wants more than its message."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{index}: {reason}")


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("no such picture")
        if index == 8:
            raise Refused(index, "too large")
        return index


class Opened(Noisy):
    """A dataset that needs its worker_init_fn: a file must be opened in each process."""

    file: int | None = None

    def __getitem__(self, index: int) -> Any:
        assert self.file is not None
        return self.file


class Batch(NamedTuple):
    index: torch.Tensor
    noise: torch.Tensor


def named(samples: list[Any]) -> Batch:
    return Batch(*default_collate(samples))


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {"index": [index for index, _ in samples], "noise": torch.stack([noise for _, noise in samples])}


def open_in_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.file = 100 + worker  # type: ignore[attr-defined]


def load_epoch(data: Any, *, micro_batch: int = 4, epoch: int = 1, foresight: bool = True) -> list[Any]:
    """Load an epoch as one of two workers whose shares change in mid-epoch; the second's samples are loaded too."""
    source = Source(data, device=CPU, seed=5)
    feed = Feed(source.length or 0, workers=2, seed=5)
    feed.open(epoch)
    batches = []
    shares = [[9, 3], [9, 3], [4, 8], [12, 0], [3, 9]]
    step = 0
    try:
        while feed.remaining:
            dealt = feed.deal(shares[step % len(shares)], ahead=source.ahead * micro_batch)
            for worker, share in enumerate(dealt):
                coming = [(ranges, feed.indices(ranges)) for ranges in split(feed.queue(worker), micro_batch)]
                if foresight:
                    source.expect(epoch, coming)
                mine = split(feed.queue(worker), share)[0] if share else ()
                for ranges in split(mine, micro_batch):
                    batches.append(source.take(epoch, ranges, feed.indices(ranges)))
            feed.consume(dealt)
            step += 1
    finally:
        source.close()
    return batches


def noise_by_index(batches: list[Any]) -> dict[int, list[float]]:
    pairs = [(int(index), noise.tolist()) for batch in batches for index, noise in zip(batch[0], batch[1])]
    assert sorted(index for index, _ in pairs) == list(range(LENGTH)), "each sample exactly once"
    return dict(pairs)


def piece_of(source: Source, ranges: tuple[tuple[int, int], ...]) -> Any:
    return source.take(0, ranges, positions(ranges))


def test_noise_belongs_to_the_sample_however_it_is_batched() -> None:
    whole = noise_by_index(load_epoch(Noisy(), micro_batch=60))
    assert noise_by_index(load_epoch(Noisy(), micro_batch=1)) == whole
    assert noise_by_index(load_epoch(Noisy(), micro_batch=7)) == whole
    assert noise_by_index(load_epoch(Noisy(), epoch=2)) != whole
    assert len({tuple(noise) for noise in whole.values()}) == LENGTH


@pytest.mark.fleet
@pytest.mark.parametrize("foresight", [True, False])
def test_noise_belongs_to_the_sample_whichever_process_fetches_it(foresight: bool) -> None:
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2)
    assert noise_by_index(load_epoch(loader, foresight=foresight)) == noise_by_index(load_epoch(Noisy()))


def test_the_users_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    load_epoch(Noisy())
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_a_subset_keeps_each_samples_noise() -> None:
    subset = Subset(Subset(Noisy(), list(range(50, 0, -1))), [3, 4, 5])
    source = Source(subset, device=CPU, seed=5)
    index, noise = piece_of(source, ((0, 3),))
    assert index.tolist() == [47, 46, 45]
    assert torch.equal(piece_of(source, ((2, 3),))[1][0], noise[2])


def test_a_dataset_that_fetches_together_is_seeded_by_the_piece() -> None:
    source = Source(Together(), device=CPU, seed=5)
    first = piece_of(source, ((0, 4),))
    assert first[0].tolist() == [0, 1, 2, 3]
    assert torch.equal(piece_of(source, ((0, 4),))[1], first[1])
    assert not torch.equal(piece_of(source, ((4, 8),))[1], first[1])


@pytest.mark.fleet
def test_custom_collates_are_used_in_every_process() -> None:
    plain = noise_by_index(load_epoch(Noisy()))
    for workers in (0, 2):
        batches = load_epoch(DataLoader(Noisy(), batch_size=4, num_workers=workers, collate_fn=named))
        assert all(type(batch) is Batch for batch in batches)
        assert noise_by_index(batches) == plain
        batches = load_epoch(DataLoader(Noisy(), batch_size=4, num_workers=workers, collate_fn=as_dict))
        assert noise_by_index([(batch["index"], batch["noise"]) for batch in batches]) == plain


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_tensors_are_indexed_at_once_with_the_same_result(device: torch.device) -> None:
    data = TensorDataset(torch.randn(60, 3), torch.arange(60), torch.randn(60, 2, 2).bool())
    indices = np.array([5, 59, 0, 5])
    for dataset in (data, Subset(data, list(range(59, -1, -1)))):
        quick = Source(dataset, device=device, seed=0).take(0, ((0, 4),), indices)
        slow = Fetcher(dataset, collate=default_collate, seed=0)(EpochPiece(0, ((0, 4),), indices))
        assert type(quick) is type(slow)
        for one, other in zip(quick, slow):
            assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, device)
            assert device.type == "meta" or torch.equal(one, other)


def test_a_tensor_dataset_with_its_own_collate_or_class_is_not_short_cut() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * part for part in super().__getitem__(index))

    assert piece_of(Source(Doubled(torch.arange(5)), device=CPU, seed=0), ((1, 3),))[0].tolist() == [2, 4]
    loader = DataLoader(TensorDataset(torch.arange(5)), collate_fn=lambda samples: len(samples))
    assert piece_of(Source(loader, device=CPU, seed=0), ((1, 3),)) == 2


def test_tensors_need_no_loader_processes() -> None:
    source = Source(DataLoader(TensorDataset(torch.arange(5)), num_workers=2), device=CPU, seed=0)
    assert source.ahead == 0
    assert piece_of(source, ((1, 3),))[0].tolist() == [1, 2]
    assert not multiprocessing.active_children()


def test_a_source_says_what_the_loader_says() -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True, num_workers=2, prefetch_factor=3)
    source = Source(loader, device=CPU, seed=0)
    assert (source.length, source.shuffle, source.drop_last) == (LENGTH, True, True)
    assert (source.batch_size, source.ahead) == (8, 6)


def test_an_exception_in_the_dataset_reaches_the_user_as_it_is() -> None:
    source = Source(Broken(), device=CPU, seed=0)
    with pytest.raises(KeyError) as caught:
        piece_of(source, ((5, 10),))
    assert caught.value.args == ("no such picture",)


@pytest.mark.fleet
def test_an_exception_in_a_loader_process_reaches_the_user_as_it_is() -> None:
    source = Source(DataLoader(Broken(), num_workers=1), device=CPU, seed=0)
    source.expect(0, [(((6, 8),), np.arange(6, 8)), (((0, 2),), np.arange(2))])
    assert piece_of(source, ((0, 2),)).tolist() == [0, 1], "nobody took the broken piece yet"
    with pytest.raises(KeyError) as caught:
        piece_of(source, ((6, 8),))
    assert caught.value.args == ("no such picture",)
    assert "__getitem__" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="Refused: 8: too large"):
        piece_of(source, ((8, 9),))
    assert piece_of(source, ((2, 4),)).tolist() == [2, 3], "and the source still works"
    source.close()


@pytest.mark.fleet
def test_the_init_function_sees_the_users_dataset_in_every_process() -> None:
    loader = DataLoader(Opened(), num_workers=2, worker_init_fn=open_in_worker)
    source = Source(loader, device=CPU, seed=0)
    opened = {int(piece_of(source, ((i, i + 1),))[0]) for i in range(8)}
    source.close()
    assert opened == {100, 101}


@pytest.mark.fleet
def test_a_spawned_process_works_as_a_forked_one() -> None:
    loader = DataLoader(Noisy(), num_workers=1, multiprocessing_context="spawn")
    source = Source(loader, device=CPU, seed=5)
    batch = piece_of(source, ((0, 3),))
    source.close()
    assert torch.equal(batch[1], piece_of(Source(Noisy(), device=CPU, seed=5), ((0, 3),))[1])


@pytest.mark.fleet
def test_foreseen_pieces_are_loaded_while_the_worker_computes() -> None:
    data = Counted()
    source = Source(DataLoader(data, num_workers=2, prefetch_factor=2), device=CPU, seed=0)
    piece_of(source, ((50, 51),))  # the processes are up, and idle tasks wait in their queues
    coming = split([(0, 32)], 8)
    source.expect(0, [(ranges, positions(ranges)) for ranges in coming])
    give_up = time.monotonic() + 20
    while data.fetched.value < 33 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert data.fetched.value == 33, "all four pieces were loaded before the first was taken"
    for ranges in coming:
        assert piece_of(source, ranges).tolist() == positions(ranges).tolist()
    assert data.fetched.value == 33, "and none was loaded twice"
    source.close()


@pytest.mark.fleet
def test_a_piece_that_comes_out_of_turn_is_kept_for_later() -> None:
    data = Counted()
    source = Source(DataLoader(data, num_workers=1, prefetch_factor=2), device=CPU, seed=0)
    coming = split([(0, 12)], 4)
    source.expect(0, [(ranges, positions(ranges)) for ranges in coming])
    for ranges in reversed(coming):
        assert piece_of(source, ranges).tolist() == positions(ranges).tolist()
    assert data.fetched.value == 12
    source.close()


@pytest.mark.fleet
def test_a_change_of_plan_calls_off_what_is_on_its_way() -> None:
    data = Counted()
    source = Source(DataLoader(data, num_workers=1, prefetch_factor=4), device=CPU, seed=0)
    piece_of(source, ((50, 51),))
    source.expect(0, [(((start, start + 30),), np.arange(start, start + 30)) for start in range(4)])
    source.expect(0, [])
    assert piece_of(source, ((40, 42),)).tolist() == [40, 41]
    assert data.fetched.value < 100, "the four pieces of 30 were not loaded to their ends"
    again = ((0, 30),)
    assert piece_of(source, again).tolist() == list(range(30)), "a piece once called off can be asked for again"
    source.close()


@pytest.mark.fleet
def test_one_set_of_processes_serves_the_run_and_close_ends_it() -> None:
    before = set(multiprocessing.active_children())
    source = Source(DataLoader(Where(), num_workers=2), device=CPU, seed=0)
    pids = set()
    for epoch in range(3):
        for start in range(0, LENGTH, 20):
            ranges = ((start, start + 20),)
            pids |= set(source.take(epoch, ranges, positions(ranges))[1].tolist())
    assert os.getpid() not in pids
    assert len(pids) == 2
    source.close()
    source.close()
    assert set(multiprocessing.active_children()) == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu_through_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    for data in (Noisy(), TensorDataset(torch.arange(LENGTH), torch.randn(LENGTH, 3))):
        for workers in (0, 2):
            source = Source(DataLoader(data, num_workers=workers, pin_memory=True), device=device, seed=5)
            index, noise = piece_of(source, ((3, 9),))
            source.close()
            assert index.device == noise.device == device
            assert index.tolist() == list(range(3, 9))


META = torch.device("meta")
"""A device that is not the CPU wherever the tests run."""


class Pair(NamedTuple):
    x: torch.Tensor
    y: str


@dataclass(frozen=True)
class Nested:
    x: torch.Tensor
    rest: list[Any]


class Own:
    """A batch class whose .to takes only the device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device))


def tensor() -> torch.Tensor:
    return torch.zeros(2)


@pytest.mark.parametrize(
    "nested",
    [
        [tensor(), (tensor(), {"a": [tensor()]})],
        Pair(tensor(), "text"),
        OrderedDict(a=tensor()),
        defaultdict(list, a=tensor()),
        UserDict(a=tensor()),
        Nested(tensor(), [tensor(), 3]),
        Own(tensor()),
    ],
)
def test_a_nested_batch_keeps_its_structure_and_moves_every_tensor(nested: Any) -> None:
    moved = move(nested, META)
    assert type(moved) is type(nested)
    found = list(_tensors(moved))
    assert found
    assert all(one.device == META for one in found)
    assert all(one.device.type == "cpu" for one in _tensors(nested)), "the original is left alone"


def test_what_has_no_device_is_left_as_it_is() -> None:
    assert move(["text", b"bytes", 3, None, 1.5], META) == ["text", b"bytes", 3, None, 1.5]
    assert move(Pair(tensor(), "text"), META).y == "text"


def test_packed_sequences_and_read_only_mappings_move_too() -> None:
    assert move(pack_sequence([torch.zeros(3)]), torch.device("cpu")).data.shape == (3,)
    assert move(MappingProxyType({"a": tensor()}), META)["a"].device == META


def _tensors(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for part in data:
            yield from _tensors(part)
    elif hasattr(data, "values"):
        for part in data.values():
            yield from _tensors(part)
    elif hasattr(data, "__dict__"):
        yield from _tensors(list(vars(data).values()))
