"""The fleet's steps as the Trainer's loader: a step of the fleet is a batch, and epochs end where the fleet's do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from paceline.errors import MisuseError
from paceline.fleet import Fleet
from paceline.pace import deadlines_needed
from paceline.step.step import Step
from paceline.step.steps import StepLoop

MORE = 1000
"""Steps that an epoch may have beyond its number, for workers that are lost in its last step."""


class FleetEpochs:
    """The fleet's steps, iterated once per epoch. It has a length, so that no batch is fetched ahead."""

    def __init__(self, steps: StepLoop, loader: DataLoader[Any], epochs: int) -> None:
        self.steps, self.dataset, self.epochs = steps, loader.dataset, epochs
        self.each = len(steps) // epochs
        """Steps per epoch, as far as no worker is lost."""
        self.last: Step | None = None
        """The step that the Trainer is in, or was in."""
        self.in_epoch = 0
        """Steps of this epoch that are done."""
        self._iterator: Iterator[Step] | None = None

    def __len__(self) -> int:
        return self.each

    def __iter__(self) -> Iterator[Step]:
        if self._iterator is None:
            self._iterator = iter(self.steps)
        elif self.last is not None and not self.last.ends_epoch:
            raise MisuseError(
                "an epoch was left before its end (should_epoch_stop), and a fleet deals every sample of an epoch: set "
                "control.should_training_stop, or train on a shorter dataset"
            )
        return self._epoch(self._iterator)

    def _epoch(self, iterator: Iterator[Step]) -> Iterator[Step]:
        for step in iterator:
            self.last = step
            yield step
            if step.ends_epoch:
                return

    def commit(self) -> None:
        """Commit the step: the update is made."""
        assert self.last is not None
        self.last.commit()
        self.in_epoch = 0 if self.last.ends_epoch else self.in_epoch + 1

    @property
    def epoch(self) -> float:
        """Return the epochs done, as the Trainer counts: the steps of this one over those that an epoch has."""
        if self.last is None:
            return 0.0
        done = 1.0 if self.last.ends_epoch else min(self.in_epoch / self.each, 1.0)
        return self.last.epoch - self.steps.script_loop.first_epoch + done

    def close(self) -> None:
        """End the steps: the Trainer makes no more."""
        iterator, self._iterator = self._iterator, iter(())
        if iterator is None or not hasattr(iterator, "close"):
            return
        if self.steps.finished:
            next(iterator, None)
        iterator.close()


class TrainingOrder(Sampler[int]):
    """A sampler that draws by the epoch of this training, as the Trainer counts.

    The fleet continues to count passes over a dataset from one training to the next. All state lies in slots: a sampler
    is searched for changes in every epoch, attribute by attribute, and one of Accelerate's holds the whole dataset.
    """

    __slots__ = ("_draw", "_epoch", "_first", "_length")

    def __init__(self, draw: Callable[[int], Iterable[int]], length: int) -> None:
        self._draw, self._length = draw, length
        self._first: int | None = None
        """The epoch with which the fleet began this training."""
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._first = epoch if self._first is None else self._first
        self._epoch = epoch - self._first

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw(self._epoch))

    def __len__(self) -> int:
        return self._length


def ordered_by_epoch(sampler: Any) -> TrainingOrder:
    """Return the order of a sampler that draws by its seed and the epoch given by ``set_epoch``."""

    def draw(epoch: int) -> Iterable[int]:
        sampler.set_epoch(epoch)
        return cast(Iterable[int], sampler)

    return TrainingOrder(draw, len(sampler))


def grouped_by_length(
    lengths: Sequence[int], batch: int, *, seed: int, before: int, evaluations: Callable[[int], int] = lambda epoch: 0
) -> TrainingOrder:
    """Return the order of ``group_by_length`` for steps of ``batch`` samples.

    The plain Trainer draws it from torch's global generator, which it has seeded: in each epoch a seed for loader
    processes, and then a permutation; and a seed for each of the epoch's ``evaluations``. ``before``: epochs of earlier
    trainings.
    """

    def draw(epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(seed)

        def draw_seeds(number: int) -> None:
            for _ in range(number):
                torch.empty((), dtype=torch.int64).random_(generator=generator)

        draw_seeds(evaluations(-1))
        for past in range(-before, epoch):
            draw_seeds(1)
            torch.randperm(len(lengths), generator=generator)
            draw_seeds(evaluations(past) if past >= 0 else 0)
        draw_seeds(1)
        return cast(Iterable[int], get_length_grouped_indices(lengths, batch, generator=generator))

    return TrainingOrder(draw, len(lengths))


def evaluations_in(epoch: int, each: int, args: Any) -> int:
    """Return how often the Trainer evaluates in an epoch of ``each`` steps; in epoch -1, before the first."""
    if epoch < 0:
        return int(bool(args.eval_on_start))
    if args.eval_strategy == "epoch":
        return int(args.eval_delay <= epoch + 1)
    if args.eval_strategy != "steps":
        return 0
    total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * each)
    every = args.eval_steps if args.eval_steps >= 1 else math.ceil(args.eval_steps * total)
    steps = range(epoch * each + 1, (epoch + 1) * each + 1)
    return sum(step % every == 0 and step >= args.eval_delay for step in steps)


def make_epochs(
    fleet: Fleet, loader: DataLoader[Any], args: Any, *, before: int = 0, evaluated: int = 1
) -> FleetEpochs:
    """Return the steps of a training with these arguments.

    ``before``: epochs of the trainer's earlier trainings. ``evaluated``: datasets of an evaluation.
    """
    batches: Any = loader.batch_sampler
    draws = len(batches.sampler)
    per_epoch = (math.floor if args.dataloader_drop_last else math.ceil)(draws / args.global_batch)
    if isinstance(batches.sampler, LengthGroupedSampler):
        batches.sampler = grouped_by_length(
            batches.sampler.lengths,
            args.global_batch,
            seed=args.seed,
            before=before,
            evaluations=lambda epoch: evaluated * evaluations_in(epoch, per_epoch, args),
        )
    elif callable(getattr(batches.sampler, "set_epoch", None)):
        batches.sampler = ordered_by_epoch(batches.sampler)
    if per_epoch < 1:
        raise ValueError(
            f"{draws} samples are less than a step of global_batch={args.global_batch}, and dataloader_drop_last "
            "leaves the rest out: nothing is left to train on"
        )
    epochs = math.ceil(args.max_steps / per_epoch if args.max_steps > 0 else args.num_train_epochs)
    if epochs < 1:
        raise ValueError(f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps} make no step")
    if args.max_steps > 0 and deadlines_needed(fleet.pacer):
        epochs = 2 * epochs + 1  # steps with a deadline may count more samples, and epochs have fewer steps
    steps = fleet.steps(
        loader,
        global_batch=args.global_batch,
        micro_batch="auto" if args.micro_batch == "auto" else None,
        epochs=epochs,
        fixed_micro_batch=True if args.torch_compile else None,
    )
    return FleetEpochs(steps._loop, loader, epochs)
