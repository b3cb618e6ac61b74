"""TrainingArguments of a fleet: the size of its steps, its pace and device, and what is excluded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from paceline.fleet import Fleet
from paceline.renamed import names_present_keywords
from paceline.settings import choose_device, whole_number
from paceline.training.join import as_if_alone

USUAL_MICRO_BATCH: int = TrainingArguments.per_device_train_batch_size
INSTEAD = "Paceline combines the gradients of the whole fleet itself"

UNSET: dict[str, str] = {
    "deepspeed": f"{INSTEAD}: leave deepspeed out",
    "fsdp": f"{INSTEAD}, and every worker holds the whole model: leave fsdp out",
    "fsdp_config": f"{INSTEAD}, and every worker holds the whole model: leave fsdp_config out",
    "parallelism_config": f"{INSTEAD}, and every worker holds the whole model: leave parallelism_config out",
    "ddp_find_unused_parameters": f"{INSTEAD}, and unused parameters need no setting: leave it out",
    "ddp_bucket_cap_mb": f"{INSTEAD}: leave it out",
    "ddp_broadcast_buffers": f"{INSTEAD}: leave it out",
    "ddp_static_graph": f"{INSTEAD}: leave it out",
    "ddp_backend": f"{INSTEAD}, over the network that it finds: leave it out",
    "fp16": "its loss scale is Accelerate's: use bf16=True, or float32",
    "fp16_full_eval": "it would turn the fleet's model into float16: leave it out",
    "bf16_full_eval": "it would turn the fleet's model into bfloat16: use bf16=True, which evaluates in bfloat16 too",
    "auto_find_batch_size": 'it begins the training anew: use micro_batch="auto"',
    "torch_empty_cache_steps": "micro-batches are Paceline's: leave it out",
    "batch_eval_metrics": "batches are evaluated by unlike workers: leave it out; compute_metrics gets all predictions",
    "enable_jit_checkpoint": "a worker that gets SIGTERM leaves after its step, and the others go on: leave it out",
    "save_on_each_node": "the leader writes, and hands what it reads to the others: leave it out",
    "ignore_data_skip": "a resumed training goes on where its data stood: leave it out",
    "use_liger_kernel": "it replaces the model after Paceline has taken it in: apply it to the model before",
}
"""Settings, by name, that must have the Trainer's default, and what to write instead."""
ACCELERATOR = ("split_batches", "dispatch_batches", "use_configured_state", "gradient_accumulation_kwargs")
IN_BACKWARD = ("lomo", "adalomo")
"""Optimisers that update while backward runs, before the fleet has combined anything."""


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


def check_settings(args: Any) -> None:
    """Raise ValueError for the first setting that cannot be honoured."""
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a step has global_batch samples, and "
            "each worker accumulates its share of them; leave it at 1 and set global_batch"
        )
    for name, advice in UNSET.items():
        given = getattr(args, name, None)
        if given or (given is not None and name.startswith("ddp_")):  # of these, False is a setting too
            raise ValueError(f"{name}={given!r} does not go with PacelineTrainer: {advice}")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "load_best_model_at_end with save_only_model: every worker gets the best weights from the leader's "
            "checkpoint, which save_only_model leaves out; give one of them"
        )
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' draws one worker's part, and Paceline deals the parts: use "
            "'random', 'sequential' or 'group_by_length'"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in IN_BACKWARD or optim.endswith("layerwise"):
        raise ValueError(f"optim={optim!r} updates while backward runs, before the fleet has combined: use another")
    _check_accelerator(args.accelerator_config)


def _check_accelerator(config: Any) -> None:
    given = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
    for name in ACCELERATOR:
        if given.get(name):
            raise ValueError(f"accelerator_config's {name} does not go with PacelineTrainer, which deals the batches")


def check_environment() -> None:
    """Raise ValueError where ``accelerate launch`` asked for an engine of its own."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"ACCELERATE_USE_{name} is set, and {INSTEAD}: start the script by paceline run or torchrun, not by "
                "accelerate launch"
            )
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        raise ValueError(f"ACCELERATE_MIXED_PRECISION=fp16: {UNSET['fp16']}")


def check_dataset(dataset: Any) -> None:
    """Raise ValueError for a dataset without a length, such as a stream."""
    if dataset is None:
        raise ValueError("PacelineTrainer.train needs a train_dataset")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"{type(dataset).__name__} has no length: PacelineTrainer deals every sample of an epoch once; give a "
            "dataset with __len__ and __getitem__, or write the loop over fleet.steps, which takes streams"
        )
