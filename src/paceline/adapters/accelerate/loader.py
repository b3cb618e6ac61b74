"""A prepared loader: the fleet's steps while the model trains, the set in blocks while it does not.

In training the loader yields this worker's micro-batches, one step of the fleet after the other. A worker that has none
in a step gets a small batch that does not count, so that the script's own code runs in every update on every worker.

In an evaluation all workers go through equally many blocks, each of which is one batch per worker, so that calls such
as ``gather_for_metrics`` inside the loop meet. Every sample comes once; workers' parts, in order, are the dataset's
order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from paceline.adapters.accelerate.refusals import NotCopied, in_words_of_accelerate
from paceline.errors import MisuseError
from paceline.feed import Source
from paceline.feed.loader_settings import read_settings
from paceline.feed.micro_batches import front_of
from paceline.feed.randomness import generators_kept
from paceline.feed.source import move
from paceline.feed.stream import set_epoch
from paceline.pace.shares import proportional
from paceline.settings import must_agree
from paceline.step.checks.sameness import is_readable, sampled_number
from paceline.step.steps import StepLoop
from paceline.training.evaluate import AgreedSpeeds, facts_of, length_of
from paceline.training.untracked import named_in_script

if TYPE_CHECKING:
    from paceline.adapters.accelerate.accelerator import Accelerator
    from paceline.adapters.accelerate.joined import JoinedFleet


UNCOUNTED = 2
"""Samples of a batch that does not count: batch norm cannot train on one."""
POSITION = "accelerator.save_state and load_state keep the position in the data, for any number of workers"


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
            "iterate the loader, or the sampler from before prepare; in place of accelerate.skip_first_batches write "
            "accelerator.skip_first_batches(loader, n)"
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
        """Front of this loop's last micro-batch, for a step in which this worker has none, and its samples."""
        self._trained = False
        """Whether a training loop went over it."""
        self._steps = 0
        """Steps of this loop so far."""
        self._asked_epoch: int | None = None
        """Number that the script has set for the next pass, which its dataset is given."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.loader)  # so that isinstance(loader, DataLoader) holds, as of Accelerate's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        settings, per_batch = self._settings, self.per_batch if self._for_training else self._block
        drawn = settings.batches if settings.batches is not None else settings.sampler
        if drawn is None and not hasattr(type(settings.dataset), "__len__"):
            raise TypeError(f"{type(settings.dataset).__name__} is an IterableDataset, which has no length")
        count = len(settings.dataset if drawn is None else drawn)
        whole = count // per_batch if settings.drop_last else -(-count // per_batch)
        return max(0, whole - self._skip)

    @property
    def _for_training(self) -> bool:
        """Whether the loader's length is counted in updates: once it has trained, else unless models evaluate."""
        accelerator, models = self._accelerator, self._accelerator.joined.context.models
        if accelerator.global_batch is None and accelerator.joined.context.elastic is not None:
            return False  # its training will be refused
        evaluates = bool(models) and not any(model.training for model in models)
        return self._trained or (torch.is_grad_enabled() and not evaluates)

    def skipping(self, batches: int) -> FleetLoader:
        """Return this loader without its first batches."""
        other = FleetLoader(self._accelerator, self.loader, skip=batches)
        other._even, other._trained = self._even, self._trained
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
        """Set the number that the dataset's own ``set_epoch`` gets before the next pass.

        The fleet counts the passes over each dataset, and shuffles each anew, whatever the number is.
        """
        self._asked_epoch = epoch

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
        """Samples of one block of an evaluation; where workers come and go, each goes through all by itself."""
        if self._accelerator.joined.context.elastic is not None:
            return 1 if self._settings.batches is not None else self._settings.batch_size or 1
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
        updates.check_left()
        if self._skip and not accelerator.goes_on(self._skip):
            return
        accelerator.before_training(self)
        self._trained = True
        steps = self._open()
        self._begin_pass(steps.dealing.epoch)
        iterator = iter(steps)
        updates.enter(iterator)
        with self._active():
            try:
                for self._steps, step in enumerate(iterator, 1):
                    if accelerator.joined.context.elastic is not None:
                        accelerator.joined.show_members()
                    self.end_of_dataloader = step.ends_epoch
                    updates.begin(step)
                    yield from self._micro_batches(step)
                    updates.end(iterator)
            finally:
                self._seen = None
                updates.leave(iterator)

    def _begin_pass(self, number: int) -> None:
        """Give the dataset the number of this pass, as Accelerate's own loader does."""
        if self._asked_epoch is not None:
            number, self._asked_epoch = self._asked_epoch, self._asked_epoch + 1
        if self._settings.length is not None:  # a stream gets it where it is drawn from
            set_epoch(self._settings.dataset, number)

    def _open(self) -> StepLoop:
        accelerator, stream = self._accelerator, self._settings.length is None
        own = None if self._settings.batches is not None else min(self.own_batch, self.global_batch)
        steps = accelerator.joined.fleet._loops.build(
            self.loader,
            global_batch=self.global_batch,
            micro_batch=accelerator.micro_batch or own,
            epochs=1,
            shuffle=None,
            drop_last=None,
            multiple_of=self.per_batch,
            order=None,
            split=True if stream and accelerator.joined.several else None,
            fixed_micro_batch=True if accelerator.compiles else None,
            lr_scaling="none",
        )
        steps.leave_updates_to_script()
        return steps

    def _micro_batches(self, step: Any) -> Iterator[Any]:
        updates, device = self._accelerator.updates, self._accelerator.joined.fleet.device
        came = False
        with in_words_of_accelerate():
            for batch in step:
                came, self._seen = True, _front(batch, step.rows)
                updates.give(counts=True, device=device)
                watched = None if updates.sync or self._steps > WATCHED else self._look()
                yield batch
                if step.committed:
                    return
                if watched is not None and not updates.sync:
                    watched.check()
        if not came or not updates.sync:  # no share, or the rest of it was dealt to others
            updates.give(counts=False, device=device)
            yield self._uncounted()

    def _look(self) -> ModulesBetweenUpdates:
        return ModulesBetweenUpdates(self._accelerator.joined.context.models)

    def _uncounted(self) -> Any:
        """Return a batch for a worker without a share in the step."""
        if self._seen is not None:
            return _front(*self._seen)[0]
        settings = self._settings
        if settings.length is None:
            raise MisuseError("this worker's part of the stream is empty: give a stream with samples for every worker")
        with generators_kept():
            samples = [settings.dataset[index] for index in range(min(UNCOUNTED, settings.length))]
            return move(settings.collate(samples), self._accelerator.joined.fleet.device)

    def _evaluate(self) -> Iterator[Any]:
        accelerator = self._accelerator
        accelerator.updates.check_everybody_comes("a prepared loader iterated for an evaluation")
        evaluation = BlockEvaluation(
            accelerator.joined,
            self.loader,
            skip=self._skip,
            even_batches=self.even_batches,
            split_batches=bool(accelerator.split_batches),
        )
        try:
            batches = evaluation.begin()
            with self._active():
                for batch, accelerator.evaluation, self.end_of_dataloader in batches:
                    yield batch
                    accelerator.check_no_gradients()
        finally:
            accelerator.evaluation = None
            evaluation.close()


def _front(batch: Any, rows: int) -> tuple[Any, int]:
    """Return the first samples of a batch, in containers of their own, and their number; all where it cannot be cut."""
    keep = min(UNCOUNTED, rows)
    front = front_of(batch, samples=rows, keep=keep)
    return (copy.copy(batch), rows) if front is None else (front, keep)


@dataclass(frozen=True)
class EvaluationBatch:
    """This worker's batch of the block that an evaluation is in."""

    rows: int
    """Samples that count; 0 where the set has fewer samples than there are workers."""
    batch_size: int
    alone: bool
    """Whether every worker goes through the complete set by itself."""


class BlockEvaluation:
    """One pass over the data of a ``loader`` from before ``prepare``, without its first ``skip`` batches."""

    def __init__(self, joined: JoinedFleet, loader: Any, *, skip: int, even_batches: bool, split_batches: bool) -> None:
        self._joined, self._skip, self._even, self._split = joined, skip, even_batches, split_batches
        context = joined.context
        self._source = Source(loader, device=context.device, seed=context.seed)

    def begin(self) -> Iterator[tuple[Any, EvaluationBatch, bool]]:
        """Agree with the other workers; return this one's batches, what each is, and whether it is the last."""
        context, source = self._joined.context, self._source
        if source.length is None:
            raise ValueError(
                f"{source.name} is an IterableDataset, whose samples cannot be dealt once each in an evaluation: "
                "give a dataset with a length"
            )
        alone = context.elastic is not None or context.transport.solitary
        rank, parts = (0, self._parts([1])) if alone else (context.transport.rank, self._agree())
        return self._batches(parts, rank, alone)

    def close(self) -> None:
        """End the loader processes."""
        self._source.close()

    def _batches(
        self, parts: Sequence[Sequence[int]], rank: int, alone: bool
    ) -> Iterator[tuple[Any, EvaluationBatch, bool]]:
        for number, (batch, counts) in enumerate(self._own_batches(parts, rank)):
            if number >= self._skip:
                rows = parts[number][rank] if counts else 0
                yield batch, EvaluationBatch(rows, self._source.batch_size or 1, alone), number == len(parts) - 1

    def _agree(self) -> list[list[int]]:
        """Check the data against the other workers'; return the rows of every worker in every block."""
        context, same, source = self._joined.context, self._joined.same_data, self._source
        speeds = AgreedSpeeds(context)
        facts = {
            **facts_of(source),
            "batch_size": source.batch_size,
            "skipped": self._skip,
            "even_batches": self._even,
        }
        label = "an evaluation over a prepared loader"
        with context.meet(label):
            seen = same.look(source.dataset, source.length, source.look)
            answers = must_agree(context.transport, label, facts, also=speeds.own(), each=seen)
            same.check(label, source.name, answers, seen, source.look)
            speeds.take(answers)
        equal = [1] * context.transport.size
        return self._parts(equal if self._even else speeds.of_members()[1])

    def _parts(self, speeds: Sequence[int]) -> list[list[int]]:
        length, size = length_of(self._source), self._source.batch_size or 1
        if self._split:
            size = -(-size // len(speeds))
        if self._source.drop_last:
            length -= length % (size * len(speeds))
        return block_parts(length, size, speeds)

    def _own_batches(self, parts: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[Any, bool]]:
        source, draws, pieces, start = self._source, self._source.once, [], 0
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


WATCHED = 3
"""Steps at the beginning of a loop in which modules are looked at."""


class ModulesBetweenUpdates:
    """The modules of the script that are not trained, as they were when it got a micro-batch.

    They stay as they are between two updates: the script's own code runs once per micro-batch, workers have unlike
    numbers of them, and an average of weights by hand moves once per update.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        """Look at all modules but parts of these ``models``."""
        trained = {id(parameter) for model in models for parameter in model.parameters()}
        self._found: dict[str, tuple[Sequence[torch.Tensor], tuple[int, int]]] = {}
        for name, thing in named_in_script():
            if isinstance(thing, torch.nn.Module):
                own = [
                    p for p in thing.parameters() if id(p) not in trained and is_readable(p) and not p.is_inference()
                ]
                if own:
                    self._found[name] = own, _state_of(own)

    def check(self) -> None:
        """Raise MisuseError for a module whose parameters have changed since."""
        for name, (parameters, state) in self._found.items():
            if _state_of(parameters) != state:
                raise MisuseError(
                    f"{name} was changed in a micro-batch that is not the last of its update, and workers have unlike "
                    "numbers of them: write `if accelerator.sync_gradients:` before what changes it, so that it runs "
                    "once per update"
                )


def _state_of(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return numbers that change with the parameters; torch counts no change through ``p.data``."""
    return sum(parameter._version for parameter in parameters), sampled_number(parameters)
