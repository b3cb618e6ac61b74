"""TrainingArguments of a fleet: the size of its steps, its pace and device, and what is excluded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from paceline.adapters.launcher_variables import as_if_alone
from paceline.adapters.transformers.refusals import check_environment, check_settings
from paceline.fleet import Fleet
from paceline.renamed import names_present_keywords
from paceline.settings import choose_device, whole_number

USUAL_MICRO_BATCH: int = TrainingArguments.per_device_train_batch_size


@dataclass(repr=False)
class PacelineArguments(TrainingArguments):
    """TrainingArguments for `PacelineTrainer`.

    ``per_device_train_batch_size`` is the micro-batch: the samples that go through the model at once. A step has
    ``global_batch`` samples over the whole fleet, so ``gradient_accumulation_steps`` stays 1. Settings that contradict,
    or that a fleet cannot honour, raise a ValueError that states what to write.

    Args:
        global_batch: samples per step, over the whole fleet; required.
        micro_batch: another name of the micro-batch: a number, or "auto", with which each worker finds its own by
            measuring.
        pace: decides each worker's samples per step, by name, as in `paceline.join`.
        nonfinite: "stop" or "skip" the update when gradients are NaN or infinite.
        comm_dtype: number format in which gradients are sent over the network, as in `paceline.join`.
        quiet: if True, Paceline prints no live view and no closing verdict.

    Example:
        ```python
        args = PacelineArguments("out", global_batch=64, per_device_train_batch_size=8, num_train_epochs=3)
        PacelineTrainer(model, args, train_dataset=dataset).train()
        ```
    """

    global_batch: int | None = field(default=None, metadata={"help": "Samples per step, over the whole fleet."})
    micro_batch: int | str | None = field(
        default=None, metadata={"help": 'per_device_train_batch_size under its other name: a number, or "auto".'}
    )
    pace: str = field(default="auto", metadata={"help": "Decides each worker's samples per step, as in paceline.join."})
    nonfinite: str = field(default="stop", metadata={"help": 'What NaN gradients do: "stop" or "skip".'})
    comm_dtype: str = field(default="float32", metadata={"help": "Gradients' number format on the network."})
    quiet: bool = field(default=False, metadata={"help": "No live view and no closing verdict of Paceline's."})

    fleet: ClassVar[Fleet | None] = None
    """The fleet, set by the trainer; not a field, so that it is neither written nor copied."""

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
        """Return this worker's device as Paceline chooses it; Accelerate is set up for one process there."""
        device = choose_device("cpu" if self.use_cpu else None)
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
        """This worker's rank in the fleet: one worker of the whole fleet logs."""
        return self.process_index

    @property
    def should_save(self) -> bool:
        """Whether this worker writes files: only the leader does."""
        return self.fleet is None or self.fleet.is_leader

    @property
    def should_log(self) -> bool:
        """Whether this worker logs: only the leader does."""
        return self.should_save


PacelineArguments.__init__ = names_present_keywords(PacelineArguments.__init__)  # type: ignore[method-assign]
