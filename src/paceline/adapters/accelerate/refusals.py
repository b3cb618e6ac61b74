"""Settings of an Accelerator that a fleet cannot honour: each is refused in a sentence that states what to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs
from accelerate.utils.dataclasses import DDPCommunicationHookType

from paceline.errors import MisuseError
from paceline.pace import Pacer, deadlines_needed

INSTEAD = "Paceline combines the gradients of the whole fleet itself, and every worker holds the whole model"
UNSET: dict[str, str] = {
    "deepspeed_plugin": f"{INSTEAD}: leave it out",
    "deepspeed_plugins": f"{INSTEAD}: leave it out",
    "fsdp_plugin": f"{INSTEAD}: leave it out; `paceline run --procs-per-worker` divides a model (docs/sharding.md)",
    "torch_tp_plugin": f"{INSTEAD}: leave it out",
    "megatron_lm_plugin": f"{INSTEAD}: leave it out",
    "parallelism_config": f"{INSTEAD}: leave it out",
}
"""Arguments that must not be given, and what to write instead."""


_IN_THIS_LOOP = (
    "In Accelerate's loop every batch goes through accelerator.backward(loss), optimizer.step() makes the update, the "
    "fleet is accelerator.fleet, and what follows an update (a projection of weights, a teacher) stands behind "
    "optimizer.step(), under `if accelerator.sync_gradients:`"
)


@contextmanager
def in_words_of_accelerate() -> Iterator[None]:
    """Complete a refusal of the step, which names methods that this script does not call."""
    try:
        yield
    except MisuseError as error:
        raise MisuseError(f"{error}. {_IN_THIS_LOOP}") from error


class NotCopied:
    """Base of what a worker holds for itself: pickling and copying it raise MisuseError with ``instead``."""

    instead = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MisuseError(f"{self.instead}: it belongs to this worker of the fleet, and cannot be pickled or copied")


def without_mesh(name: str) -> property:
    """Return a property that refuses a rank in a device mesh."""

    def refuse(_: Any) -> int:
        raise MisuseError(
            f"accelerator.{name} is a place in a device mesh, and in a fleet every worker holds the whole model: use "
            "accelerator.process_index"
        )

    return property(refuse, doc="Raise MisuseError: there is no device mesh.")


def check_state_made_before(workers: int | None) -> None:
    """Raise MisuseError for Accelerate's state from before the fleet, if it has counted other than its ``workers``.

    Workers that come and go are None: no state can have counted them.
    """
    known = PartialState._shared_state
    if known and "fleet" not in known and known["num_processes"] != workers:
        raise MisuseError(
            f"PartialState() before Accelerator() has counted {known['num_processes']} process(es), and the fleet has "
            f"{'workers that come and go' if workers is None else workers}: make the Accelerator first"
        )


def refuse_split(*_: Any, **__: Any) -> NoReturn:
    """Raise MisuseError: the part of a worker that is lost would be missing."""
    raise MisuseError(
        "split_between_processes where workers come and go: the part of one that is lost would be missing; use "
        "accelerator.fleet.predict(predict, dataset)"
    )


def check_settings(given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of an Accelerator's own arguments that cannot be honoured."""
    for name, advice in UNSET.items():
        if given.get(name) is not None:
            raise ValueError(f"Accelerator({name}=...) does not go with a fleet: {advice}")
    if given.get("device_placement") is False:
        raise ValueError(
            "Accelerator(device_placement=False) does not go with a fleet, which puts models and batches on its "
            'device: leave it out, or write Accelerator(device="cpu")'
        )
    if str(given.get("mixed_precision")) == "fp8" or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        raise ValueError('mixed_precision="fp8" does not go with a fleet: use "bf16" or "fp16"')
    plugin = given.get("gradient_accumulation_plugin")
    if plugin is not None and not plugin.sync_with_dataloader:
        raise ValueError(
            "GradientAccumulationPlugin(sync_with_dataloader=False) does not go with a fleet: a step ends where the "
            "epoch does; leave it out"
        )
    loading = given.get("dataloader_config")
    if getattr(loading, "use_stateful_dataloader", False):
        raise ValueError(
            "DataLoaderConfiguration(use_stateful_dataloader=True) does not go with a fleet: save_state keeps the "
            "position in the data, for any number of workers; leave it out"
        )
    for handler in given.get("kwargs_handlers") or ():
        _check_handler(handler)
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"ACCELERATE_USE_{name} is set, and {INSTEAD}: configure accelerate launch without it, or start the "
                "script by paceline run or torchrun"
            )


def _check_handler(handler: Any) -> None:
    name = type(handler).__name__
    if "Recipe" in name:
        raise ValueError(f'{name} does not go with a fleet: use mixed_precision="bf16" or "fp16"')
    if isinstance(handler, DistributedDataParallelKwargs) and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}) does not go with a fleet: write "
            'Accelerator(comm_dtype="bf16") or comm_dtype="fp16", which halves what rounds send'
        )


def check_parameters(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError for an optimizer of parameters whose gradients no round combines."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers, 1):
        if any(id(parameter) not in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"optimizer {number} ({type(optimizer).__name__}) has parameters of a module that was not prepared, so "
                "the fleet would not combine their gradients: give the module to accelerator.prepare too"
            )


def check_pace(pacer: Pacer) -> None:
    """Raise ValueError for a pace whose steps have a deadline."""
    if deadlines_needed(pacer):
        raise ValueError(
            f"pace {pacer.name!r} sets deadlines, and Accelerate's loop must know before its backward which "
            'micro-batch is the last of an update: use pace="adaptive", "equal", "fixed:1,3" or "epoch", or write the '
            "loop over fleet.steps"
        )
