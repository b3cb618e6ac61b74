"""A prepared loader: the fleet's steps while the model trains, the set in blocks while it does not.

In training the loader yields this worker's micro-batches, one step of the fleet after the other. A worker that has none
in a step gets a small batch that does not count, so that the script's own code runs in every update on every worker.

In evaluation all workers go through equally many blocks, each of which is one batch per worker, so that calls such as
``gather_for_metrics`` inside the loop meet. Every sample comes once; workers' parts, in order, are the dataset's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler

from paceline.adapters.accelerate.refusals import NotCopied, in_words_of_accelerate
from paceline.errors import MisuseError
from paceline.feed import Source
from paceline.feed.loader_settings import read_settings
from paceline.feed.micro_batches import front_of
from paceline.feed.randomness import generators_kept
from paceline.feed.source import move
from paceline.pace.shares import proportional
from paceline.settings import must_agree
from paceline.step.steps import StepLoop
from paceline.training.evaluate import AgreedSpeeds, facts_of, length_of

if TYPE_CHECKING:
    from paceline.adapters.accelerate.accelerator import Accelerator

UNCOUNTED = 2
"""Samples of a batch that does not count: batch norm cannot train on one."""
POSITION = "accelerator.save_state and load_state keep the position in the data, for any number of workers"


@dataclass(frozen=True)
class EvaluationBatch:
    """This worker's batch of the block that an evaluation is in."""

    rows: int
    """Samples that count; 0 where the set has fewer samples than there are workers."""
    batch_size: int
    alone: bool
    """Whether every worker goes through the complete set by itself."""


class FleetBatchSampler(BatchSampler):
    """The batch sampler of a prepared loader, with Accelerate's ``even_batches``."""

    def __init__(self, loader: FleetLoader) -> None:
        self._loader, self.batch_sampler = loader, loader.loader.batch_sampler
        state = loader._accelerator.state
        self.num_processes, self.process_index = int(state.num_processes), int(state.process_index)
        self.split_batches = bool(loader._accelerator.split_batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batch_sampler"], name)

    @property
    def even_batches(self) -> bool:
        """Whether workers have equal batches in an evaluation, and not batches by their speed."""
        return self._loader.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loader.even_batches = even

    @property
    def total_length(self) -> int:
        """Batches of the complete set, as the script's own sampler counts them."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        raise MisuseError(
            "a prepared loader's batch_sampler cannot be iterated: samples are dealt to workers update by update; "
            "iterate the loader, or the sampler from before prepare"
        )


class FleetLoader(NotCopied):
    """What ``accelerator.prepare`` returns for a DataLoader, whose other attributes it has."""

    instead = "use loader.loader, the DataLoader from before prepare"

    end_of_dataloader = False
    remainder = -1
    """Read by Accelerate's `GradientState`, as is ``end_of_dataloader``."""
    rng_types = synchronized_generator = None
    use_stateful_dataloader = False
    """Settings of Accelerate's own loaders, which stand still here: the fleet draws the order."""

    def __init__(self, accelerator: Accelerator, loader: Any, *, skip: int = 0) -> None:
        self.loader, self._accelerator, self._skip = loader, accelerator, skip
        self._even: bool | None = None
        self._settings = read_settings(loader)
        self._seen: tuple[Any, int] | None = None
        """The last micro-batch, and its samples."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.loader)  # so that isinstance(loader, DataLoader) holds, as of Accelerate's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return self._length(self.per_batch if self._accelerator.trains else self._block)

    def _length(self, per_batch: int) -> int:
        settings = self._settings
        drawn = settings.batches if settings.batches is not None else settings.sampler
        if drawn is None and settings.length is None:
            raise TypeError(f"{type(settings.dataset).__name__} is an IterableDataset, which has no length")
        count = settings.length if drawn is None else len(drawn)
        assert count is not None
        return count // per_batch if settings.drop_last else -(-count // per_batch)

    def skipping(self, batches: int) -> FleetLoader:
        """Return this loader without its first batches."""
        other = FleetLoader(self._accelerator, self.loader, skip=batches)
        other._even = self._even
        return other

    @property
    def even_batches(self) -> bool:
        """Whether workers have equal batches in an evaluation, and not batches by their speed."""
        return bool(self._accelerator.even_batches) if self._even is None else self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even

    @property
    def batch_sampler(self) -> FleetBatchSampler | None:
        """The loader's batch sampler, with ``even_batches``; None where the loader has none."""
        return None if self.loader.batch_sampler is None else FleetBatchSampler(self)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.loader.dataset)

    @property
    def device(self) -> Any:
        """Device of the batches."""
        return self._accelerator.device

    @property
    def base_dataloader(self) -> Any:
        """The DataLoader from before ``prepare``."""
        return self.loader

    @property
    def gradient_state(self) -> Any:
        """Accelerate's own state of the accumulation."""
        return self._accelerator.gradient_state

    def get_sampler(self) -> Any:
        """Return the loader's sampler."""
        return self.loader.sampler

    def set_sampler(self, sampler: Any) -> None:
        """Raise MisuseError: the fleet deals what the loader's sampler draws."""
        raise MisuseError("set_sampler on a prepared loader: write DataLoader(dataset, sampler=...) before prepare")

    def state_dict(self) -> dict[str, Any]:
        """Raise MisuseError: the position in the data is the fleet's."""
        raise MisuseError(f"state_dict of a prepared loader: {POSITION}")

    def load_state_dict(self, state: Any) -> None:
        """Raise MisuseError: the position in the data is the fleet's."""
        raise MisuseError(f"load_state_dict of a prepared loader: {POSITION}")

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the fleet counts the passes over each dataset, and shuffles each anew."""

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch of all workers together."""
        return self.per_batch

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def _accumulation(self) -> int:
        return int(self._accelerator.gradient_accumulation_steps)

    @property
    def own_batch(self) -> int:
        """Samples that one process has at once, by the script's settings; with a batch sampler, one batch."""
        if self._settings.batches is not None:
            return 1
        size = self._settings.batch_size or 1
        return -(-size // int(self._accelerator.num_processes)) if self._accelerator.split_batches else size

    @property
    def global_batch(self) -> int:
        """Samples per update, over the whole fleet (batches, where a batch sampler gives them)."""
        accelerator = self._accelerator
        if accelerator.global_batch is not None:
            return accelerator.global_batch
        if accelerator.joined.context.elastic is not None:
            raise ValueError(
                "workers come and go, and batch_size * processes * gradient_accumulation_steps would change with them: "
                "write Accelerator(global_batch=...), the samples of one update"
            )
        size = self._settings.batch_size or 1
        if accelerator.split_batches and self._settings.batches is None:
            return size * self._accumulation
        return self.own_batch * int(accelerator.num_processes) * self._accumulation

    @property
    def per_batch(self) -> int:
        """Samples that all processes have at once, as the script counts them; an update accumulates several of them."""
        batches, rest = divmod(self.global_batch, self._accumulation)
        if rest:
            raise ValueError(
                f"global_batch={self.global_batch} is no multiple of gradient_accumulation_steps="
                f"{self._accumulation}: leave the latter out, or give a multiple"
            )
        return batches

    @property
    def processes(self) -> int:
        """How many processes of Accelerate's would have this global batch: a scheduler's steps per update."""
        if self._accelerator.split_batches:
            return 1
        number, rest = divmod(self.per_batch, self.own_batch)
        if rest:
            raise ValueError(
                f"global_batch={self.global_batch} is no multiple of batch_size={self.own_batch} times "
                f"gradient_accumulation_steps={self._accumulation}, so a scheduler that "
                "counts batches has no whole number of steps per update: give a multiple, or split_batches=True in "
                "DataLoaderConfiguration, with which it makes one"
            )
        return number

    @property
    def _block(self) -> int:
        return self.own_batch * int(self._accelerator.num_processes)

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self._train() if self._accelerator.trains else self._evaluate()

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Show Accelerate's own state which loader is iterated."""
        state: Any = self._accelerator.gradient_state
        self.end_of_dataloader = False
        state._add_dataloader(self)
        try:
            yield
        finally:
            state._remove_dataloader(self)

    def _train(self) -> Iterator[Any]:
        accelerator, updates = self._accelerator, self._accelerator.updates
        if updates.step is not None:
            raise MisuseError("a second training loop inside of one: one update has one loader's samples")
        if self._skip and not accelerator.goes_on(self._skip):
            return
        accelerator.before_training(self)
        steps = self._open()
        iterator = iter(steps)
        with self._active():
            try:
                for step in iterator:
                    if accelerator.joined.context.elastic is not None:
                        accelerator.joined.show_members()
                    self.end_of_dataloader = step.ends_epoch
                    updates.begin(step)
                    yield from self._micro_batches(step)
                    updates.end()
            finally:
                updates.leave()
                iterator.close()  # type: ignore[attr-defined]

    def _open(self) -> StepLoop:
        accelerator, stream = self._accelerator, self._settings.length is None
        steps = accelerator.joined.fleet.steps(
            self.loader,
            global_batch=self.global_batch,
            micro_batch=accelerator.micro_batch or (None if self._settings.batches is not None else self.own_batch),
            split=True if stream and accelerator.joined.several else None,
            fixed_micro_batch=True if accelerator.compiles else None,
        )._loop
        steps.leave_updates_to_script()
        return steps

    def _micro_batches(self, step: Any) -> Iterator[Any]:
        updates, device = self._accelerator.updates, self._accelerator.joined.fleet.device
        came = False
        with in_words_of_accelerate():
            for batch in step:
                came, self._seen = True, (batch, step.rows)
                updates.give(counts=True, device=device)
                yield batch
                if step.committed:
                    return
        if not came or not updates.sync:  # no share, or the rest of it was dealt to others
            updates.give(counts=False, device=device)
            yield self._uncounted()

    def _uncounted(self) -> Any:
        """Return a batch for a worker without a share in the step."""
        if self._seen is not None:
            batch, rows = self._seen
            front = front_of(batch, samples=rows, keep=min(UNCOUNTED, rows))
            return batch if front is None else front
        settings = self._settings
        if settings.length is None:
            raise MisuseError("this worker's part of the stream is empty: give a stream with samples for every worker")
        with generators_kept():
            samples = [settings.dataset[index] for index in range(min(UNCOUNTED, settings.length))]
            return move(settings.collate(samples), self._accelerator.joined.fleet.device)

    # -- evaluating ----------------------------------------------------------------------------------------------------

    def _evaluate(self) -> Iterator[Any]:
        accelerator, context = self._accelerator, self._accelerator.joined.context
        accelerator.updates.check_everybody_comes("a prepared loader iterated for an evaluation")
        source = Source(self.loader, device=context.device, seed=context.seed)
        try:
            if source.length is None:
                raise ValueError(
                    f"{source.name} is an IterableDataset, whose samples cannot be dealt once each in an evaluation: "
                    "give a dataset with a length"
                )
            alone = context.elastic is not None or context.transport.solitary
            rank, parts = (0, self._parts(source, [1])) if alone else (context.transport.rank, self._agree(source))
            with self._active():
                for number, (batch, counts) in enumerate(self._own_batches(source, parts, rank)):
                    self.end_of_dataloader = number == len(parts) - 1
                    if number >= self._skip:
                        rows = parts[number][rank] if counts else 0
                        accelerator.evaluation = EvaluationBatch(rows, source.batch_size or 1, alone)
                        yield batch
                        accelerator.check_no_gradients()
        finally:
            accelerator.evaluation = None
            source.close()

    def _agree(self, source: Source) -> list[list[int]]:
        """Check the data against the other workers'; return the rows of every worker in every block."""
        context, same = self._accelerator.joined.context, self._accelerator.joined.same_data
        speeds = AgreedSpeeds(context)
        facts = {
            **facts_of(source),
            "batch_size": source.batch_size,
            "skipped": self._skip,
            "even_batches": self.even_batches,
        }
        label = "an evaluation over a prepared loader"
        with context.meet(label):
            seen = same.look(source.dataset, source.length, source.look)
            answers = must_agree(context.transport, label, facts, also=speeds.own(), each=seen)
            same.check(label, source.name, answers, seen, source.look)
            speeds.take(answers)
        equal = [1] * context.transport.size
        return self._parts(source, equal if self.even_batches else speeds.of_members()[1])

    def _parts(self, source: Source, speeds: Sequence[int]) -> list[list[int]]:
        length, size = length_of(source), source.batch_size or 1
        if self._accelerator.split_batches:
            size = -(-size // len(speeds))
        if source.drop_last:
            length -= length % (size * len(speeds))
        return block_parts(length, size, speeds)

    def _own_batches(self, source: Source, parts: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[Any, bool]]:
        draws, pieces, start = source.once, [], 0
        for block in parts:
            first = start + sum(block[:rank])
            rows = range(first, first + block[rank]) if block[rank] else range(start, start + 1)
            indices = np.arange(rows.start, rows.stop, dtype=np.int64)
            indices = indices if isinstance(draws, int) else draws[rows.start : rows.stop]
            pieces.append((((rows.start, rows.stop),), indices))
            start += sum(block)
        if source.ahead:
            source.expect(0, pieces)
        for block, (piece, indices) in zip(parts, pieces, strict=True):
            yield source.take(0, piece, indices), block[rank] > 0


def block_parts(length: int, batch_size: int, speeds: Sequence[int]) -> list[list[int]]:
    """Return the rows of every worker in every block: the fastest has ``batch_size``, and no row is given twice.

    Every worker has a row in every block, unless there are fewer samples than workers. A last block that is too short
    for that takes from the one before.

    >>> block_parts(11, 2, [1, 1]), block_parts(9, 2, [1, 1]), block_parts(1, 4, [1, 1])
    ([[2, 2], [2, 2], [2, 1]], [[2, 2], [2, 1], [1, 1]], [[1, 0]])
    >>> block_parts(16, 6, [3, 1])
    [[6, 2], [6, 2]]
    """
    workers = len(speeds)
    full = [max(1, batch_size * speed // max(speeds)) for speed in speeds]
    whole, rest = divmod(length, sum(full))
    blocks = [sum(full)] * whole + ([rest] if rest else [])
    if len(blocks) > 1 and blocks[-1] < workers:
        blocks[-2] -= workers - blocks[-1]
        blocks[-1] = workers
    return [full if block == sum(full) else _shared(block, full, workers) for block in blocks]


def _shared(rows: int, full: Sequence[int], workers: int) -> list[int]:
    if rows < workers:
        return [int(worker < rows) for worker in range(workers)]
    least = np.ones(workers, dtype=np.int64)
    shares: list[int] = proportional(np.asarray(full, dtype=float), rows, minimum=least).tolist()
    return shares
