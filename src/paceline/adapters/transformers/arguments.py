"""TrainingArguments of a fleet: the size of its steps, its pace, and the device; what it rules out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from paceline import devices
from paceline.adapters.transformers.refusals import check_environment, check_settings
from paceline.fleet import Fleet
from paceline.settings import whole_number

_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *_MPI)
"""Variables by which Accelerate would find other processes, and make a group of its own."""
USUAL_MICRO_BATCH: int = TrainingArguments.per_device_train_batch_size


@contextmanager
def as_if_alone(**variables: str) -> Iterator[None]:
    """Inside, the environment names no other process, and has these variables."""
    hidden = {*LAUNCHER, *variables}
    before = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in hidden:
            os.environ.pop(name, None)
        os.environ.update(before)


@dataclass(repr=False)
class PacelineArguments(TrainingArguments):
    """TrainingArguments for `PacelineTrainer`.

    ``per_device_train_batch_size`` is the micro-batch: the samples that go through the model at once. A step has
    ``global_batch`` samples over the whole fleet, so ``gradient_accumulation_steps`` stays 1. Settings that contradict,
    or that a fleet cannot honour, are a ValueError that says what to write.

    Args:
        global_batch: samples a step, over the whole fleet; it must be given.
        micro_batch: the micro-batch under its other name: a number, or "auto", with which each worker finds its own by
            measuring.
        pace: who does how many samples, by name, as in `paceline.join`.
        nonfinite: "stop" or "skip" the update when gradients are NaN or infinite.
        wire: what gradients travel as, as in `paceline.join`.
        quiet: no live view and no closing verdict of Paceline's.

    Example:
        ```python
        args = PacelineArguments("out", global_batch=64, per_device_train_batch_size=8, num_train_epochs=3)
        PacelineTrainer(model, args, train_dataset=dataset).train()
        ```
    """

    global_batch: int | None = field(default=None, metadata={"help": "Samples a step, over the whole fleet."})
    micro_batch: int | str | None = field(
        default=None, metadata={"help": 'per_device_train_batch_size under its other name: a number, or "auto".'}
    )
    pace: str = field(default="auto", metadata={"help": "Who does how many samples, as in paceline.join."})
    nonfinite: str = field(default="stop", metadata={"help": 'What NaN gradients do: "stop" or "skip".'})
    wire: str = field(default="float32", metadata={"help": "What gradients travel as, as in paceline.join."})
    quiet: bool = field(default=False, metadata={"help": "No live view and no closing verdict of Paceline's."})

    fleet: ClassVar[Fleet | None] = None
    """Set by the trainer; not a field, for it is neither written nor copied."""

    def __post_init__(self) -> None:
        check_environment()
        check_settings(self)
        self._read_sizes()
        with as_if_alone():
            super().__post_init__()

    def _read_sizes(self) -> None:
        if self.global_batch is None:
            raise ValueError(
                "PacelineArguments needs global_batch=: the samples of one step over the whole fleet, which was "
                "per_device_train_batch_size * devices * gradient_accumulation_steps"
            )
        self.global_batch = whole_number("global_batch", self.global_batch)
        if self.micro_batch is None:
            return
        asked = self.micro_batch
        if asked != "auto":
            asked = whole_number("micro_batch", int(asked) if str(asked).isdigit() else asked)
        usual = getattr(self, "per_device_train_batch_size")  # noqa: B009
        if usual not in (USUAL_MICRO_BATCH, asked):
            raise ValueError(
                f"micro_batch={asked!r} and per_device_train_batch_size={usual} contradict: "
                "they are two names of one thing, the samples that go through the model at once; give one"
            )
        self.micro_batch = asked
        if isinstance(asked, int):
            self.per_device_train_batch_size = asked

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "fleet"}

    # -- what the Trainer asks -------------------------------------------------------------------------------------

    @cached_property
    def _setup_devices(self) -> torch.device:
        """This worker's device as Paceline chooses it; Accelerate is set up for one process there."""
        device = devices.choose("cpu" if self.use_cpu else None)
        with as_if_alone(ACCELERATE_TORCH_DEVICE=str(device)):
            super()._setup_devices  # noqa: B018
        self._n_gpu = int(device.type == "cuda")  # more would mean DataParallel
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @property
    def process_index(self) -> int:
        """This worker's rank in the fleet."""
        return 0 if self.fleet is None else self.fleet.rank

    @property
    def local_process_index(self) -> int:
        """As `process_index`: one worker of the whole fleet speaks."""
        return self.process_index

    @property
    def should_save(self) -> bool:
        """Only the leader writes."""
        return self.fleet is None or self.fleet.is_leader

    @property
    def should_log(self) -> bool:
        """Only the leader speaks."""
        return self.should_save
