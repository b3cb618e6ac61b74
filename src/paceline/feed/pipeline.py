"""Loader processes that work ahead of a plan that may change.

One torch DataLoader iterator serves an epoch, or with persistent_workers the whole run. New processes get the dataset
as it is when they start, so what a script changes in it between two epochs reaches them. The iterator's "batch sampler"
hands out the pieces that are expected next; when none is, it hands out an empty task that is answered at once, so the
iterator never runs dry and never blocks. A piece that is no longer expected is called off between two samples through a
flag in shared memory. A piece that nobody foresaw goes to the front and is waited for: always correct, and fast when
the forecast holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.feed.fetching import Fetcher, Glance, Piece
from paceline.feed.keys import key
from paceline.feed.loader_settings import Settings
from paceline.feed.processes import InitWorker, LoaderFailure, as_it_is, received, shut_down

_Name = tuple[Any, ...]


@dataclass(frozen=True)
class Task:
    """What travels to a loader process: a piece or nothing, and where to look whether it was called off."""

    slot: int
    piece: Piece | Glance | None = None


class Remote(Dataset[Any]):
    """The dataset as a loader process sees it: answers tasks."""

    def __init__(self, dataset: Any, called_off: torch.Tensor, *, collate: Callable[[Any], Any], seed: int) -> None:
        self.dataset = dataset
        self._called_off = called_off
        self._collate, self._seed = collate, seed
        self._fetcher: Fetcher | None = None
        """Made in the loader process, of the dataset as it arrived there."""

    def __getitems__(self, task: Task) -> Any:
        if task.piece is None:
            return None
        try:
            self._fetcher = self._fetcher or Fetcher(self.dataset, collate=self._collate, seed=self._seed)
            if isinstance(task.piece, Glance):
                return task.piece.of(self._fetcher)
            return self._fetcher(task.piece, unwanted=lambda: bool(self._called_off[task.slot]))
        except Exception as error:
            return LoaderFailure.of(error)


class Pipeline:
    """Pieces by way of ``settings.num_workers`` loader processes, which start with the first call."""

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
        self._expected: dict[_Name, Piece | Glance] = {}
        self._loaded: dict[_Name, Any] = {}

    def expect(self, pieces: Sequence[Piece]) -> None:
        """Load these next, in this order; whatever else is on its way is called off."""
        self._expected = {piece.name: piece for piece in pieces}
        self._loaded = {name: data for name, data in self._loaded.items() if name in self._expected}
        for task in self._in_flight:
            if task.piece is not None and task.piece.name not in self._expected:
                self._called_off[task.slot] = 1
        self._start()
        while self._in_flight[0].piece is None and self._next_piece() is not None:
            self._receive()

    def take(self, piece: Piece | Glance) -> Any:
        """The collated piece, or what was looked for, waited for if need be."""
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
        """The task that goes out next: the first expected piece that is neither here nor on its way, or nothing."""
        task = Task(self._issued % len(self._called_off), self._next_piece())
        self._called_off[task.slot] = 0
        self._issued += 1
        self._in_flight.append(task)
        return task

    def _next_piece(self) -> Piece | Glance | None:
        coming = {t.piece.name for t in self._in_flight if t.piece is not None and not self._called_off[t.slot]}
        return next((p for name, p in self._expected.items() if name not in self._loaded and name not in coming), None)

    def _receive(self) -> None:
        """Wait for the oldest task in flight; another goes out in its place."""
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
    """The endless batch sampler."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._pipeline.next_task()
