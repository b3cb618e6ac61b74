"""Loading of micro-batches: each sample with its own random numbers, here or in loader processes of torch's DataLoader.

A `Fetcher` fetches the samples of one micro-batch, in any process, and collates them. A `Pipeline` over the loader
processes works ahead of a plan that may change. One DataLoader iterator serves an epoch, or with persistent_workers the
whole run. New processes get the dataset as it is when they start, so what a script changes in it between two epochs
reaches them. The iterator's "batch sampler" hands out the pieces that are expected next; when none is, it hands out an
empty task that is answered at once, so the iterator never runs dry and never blocks. A piece that is no longer expected
is called off between two samples through a flag in shared memory. A piece that was not foreseen goes to the front and
is waited for: always correct, and fast when the forecast holds.
"""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from paceline import concurrency
from paceline.errors import LoaderDied, describe_exit
from paceline.feed.fingerprints import MOST_SECONDS, Fingerprint, NoFingerprint, alike, fingerprint
from paceline.feed.loader_settings import Settings
from paceline.feed.randomness import key, keys, seed_generators
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


_Name = tuple[Any, ...]


@dataclass(frozen=True)
class Task:
    """Message to a loader process: a piece or nothing, and the slot of the flag that calls it off."""

    slot: int
    piece: EpochPiece | Glance | None = None


class Remote(Dataset[Any]):
    """The dataset in a loader process: it answers tasks."""

    def __init__(self, dataset: Any, called_off: torch.Tensor, *, collate: Callable[[Any], Any], seed: int) -> None:
        self.dataset = dataset
        self._called_off = called_off
        self._collate, self._seed = collate, seed
        self._fetcher: Fetcher | None = None
        """Fetcher made in the loader process from the dataset that arrived there."""

    def __getitems__(self, task: Task) -> Any:
        if task.piece is None:
            return None
        try:
            self._fetcher = self._fetcher or Fetcher(self.dataset, collate=self._collate, seed=self._seed)
            if isinstance(task.piece, Glance):
                return task.piece.read(self._fetcher)
            return self._fetcher(task.piece, unwanted=lambda: bool(self._called_off[task.slot]))
        except Exception as error:
            return LoaderFailure.wrap(error)


class Pipeline:
    """Pieces loaded by ``settings.num_workers`` loader processes, which start with the first call."""

    def __init__(self, settings: Settings, *, pin_memory: bool, seed: int) -> None:
        self._depth = settings.num_workers * settings.prefetch_factor
        self._called_off = torch.zeros(2 * self._depth, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._loader = DataLoader(
            Remote(settings.dataset, self._called_off, collate=settings.collate, seed=seed),
            batch_sampler=_Tasks(self),
            collate_fn=as_it_is,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=pin_memory,
            timeout=settings.timeout,
            worker_init_fn=InitWorker(settings.worker_init_fn),
            multiprocessing_context=settings.multiprocessing_context,
            generator=settings.generator or torch.Generator().manual_seed(key(seed)),
        )
        self._iterator: Iterator[Any] | None = None
        self._issued = 0
        self._in_flight: deque[Task] = deque()
        self._expected: dict[_Name, EpochPiece | Glance] = {}
        self._loaded: dict[_Name, Any] = {}

    def expect(self, pieces: Sequence[EpochPiece]) -> None:
        """Load these next, in this order; call off all other pieces in flight."""
        self._expected = {piece.name: piece for piece in pieces}
        self._loaded = {name: data for name, data in self._loaded.items() if name in self._expected}
        for task in self._in_flight:
            if task.piece is not None and task.piece.name not in self._expected:
                self._called_off[task.slot] = 1
        self._start()
        while self._in_flight[0].piece is None and self._next_piece() is not None:
            self._receive()

    def take(self, piece: EpochPiece | Glance) -> Any:
        """Return the collated piece, or the fingerprints; wait for them if need be."""
        name = piece.name
        if name not in self._expected:
            self._expected = {name: piece, **self._expected}
        self._start()
        while name not in self._loaded:
            self._receive()
        del self._expected[name]
        data = self._loaded.pop(name)
        if isinstance(data, LoaderFailure):
            data.reraise()
        return data

    def close(self) -> None:
        """End the loader processes; a later call starts them again, with the dataset as it is then."""
        self._called_off.fill_(1)
        shut_down(self._iterator)
        self._iterator = None
        self._in_flight.clear()
        self._loaded.clear()
        self._expected.clear()

    def next_task(self) -> Task:
        """Return the next task: the first expected piece that is neither loaded nor in flight, or nothing."""
        task = Task(self._issued % len(self._called_off), self._next_piece())
        self._called_off[task.slot] = 0
        self._issued += 1
        self._in_flight.append(task)
        return task

    def _next_piece(self) -> EpochPiece | Glance | None:
        coming = {t.piece.name for t in self._in_flight if t.piece is not None and not self._called_off[t.slot]}
        return next((p for name, p in self._expected.items() if name not in self._loaded and name not in coming), None)

    def _receive(self) -> None:
        """Wait for the oldest task in flight; another is sent in its place."""
        assert self._iterator is not None
        task = self._in_flight[0]
        try:
            data = received(self._iterator)
        finally:
            self._in_flight.popleft()
        wanted = task.piece is not None and not self._called_off[task.slot] and task.piece.name in self._expected
        if wanted and task.piece is not None:
            self._loaded[task.piece.name] = data

    def _start(self) -> None:
        if self._iterator is None:
            self._iterator = iter(self._loader)


class _Tasks:
    """An endless batch sampler."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._pipeline.next_task()


@dataclass(frozen=True)
class LoaderFailure:
    """An exception in transit from a loader process, where torch would replace its message."""

    error: Exception
    trace: str

    @classmethod
    def wrap(cls, error: Exception) -> LoaderFailure:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it cannot be pickled or unpickled: keep name and message
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, trace)

    def reraise(self) -> NoReturn:
        self.error.add_note(f"It was raised in a loader process:\n{self.trace}")
        raise self.error


class InitWorker:
    """Initialiser of a loader process: `get_worker_info` shows the user's dataset, then the user's own init runs."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # The loader's dataset is our wrapper; code written for a plain DataLoader expects its own. Info is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._init is not None:
            self._init(worker_id)


def as_it_is(data: Any) -> Any:
    """Return data unchanged: the DataLoader's collate function where everything is collated already."""
    return data


DYING_S = 1.0
"""Seconds from the first sign of a process's death until its exit code is available."""


def received(iterator: Any) -> Any:
    """Return the next item of a DataLoader's iterator; raise `LoaderDied` when one of its processes is dead."""
    try:
        return next(iterator)
    except (RuntimeError, EOFError, OSError) as error:
        raise (_death(list(getattr(iterator, "_workers", ())), error) or error) from None


def _death(processes: Sequence[Any], error: Exception) -> LoaderDied | None:
    """Return the death of one of these processes, of which ``error`` may be a sign; None when all live."""
    try:
        until = concurrency.monotonic() + DYING_S
        while not any(process.exitcode for process in processes) and concurrency.monotonic() < until:
            wait([process.sentinel for process in processes], timeout=0.05)
    except RuntimeError as death:  # raised just now by torch's handler of SIGCHLD
        error = death
    dead = next((process for process in processes if process.exitcode), None)
    return LoaderDied.told_by(error) if dead is None else LoaderDied(dead.pid, describe_exit(dead.exitcode))


def shut_down(iterator: Any) -> None:
    """End the processes of a DataLoader iterator now, not when the last reference to it happens to go."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()
