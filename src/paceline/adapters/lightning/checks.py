"""Settings of a Trainer or LightningModule that a fleet cannot honour, or would get wrong: refused, with advice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
CALLBACKS: dict[type, str] = {
    GradientAccumulationScheduler: "a step has as many micro-batches as global_batch asks for: leave it out",
    StochasticWeightAveraging: "it takes gradients away from a later epoch: use EMAWeightAveraging or WeightAveraging",
    BatchSizeFinder: 'PacelineStrategy(micro_batch="auto") finds the size of micro-batches on each worker',
    LearningRateFinder: "it trains several times in one process: find the rate with a Trainer without this strategy",
}
"""Callbacks that change what a step is, and what to do instead."""


def check_trainer(trainer: Trainer, device: torch.device) -> None:
    """Raise ValueError with the first of the Trainer's settings that contradicts a fleet."""
    for text in (*_devices(trainer, device), *_precision(trainer), *_data(trainer)):
        raise ValueError(text)
    for callback in trainer.callbacks:
        for kind, advice in CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"the callback {type(callback).__name__} beside PacelineStrategy: {advice}")


def check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Raise ValueError with the first setting that concerns training alone and contradicts a fleet."""
    for text in (*_training(trainer), *_module(module)):
        raise ValueError(text)


def several_optimizers() -> str:
    """Return the refusal of several optimisers; Lightning's own advice, manual optimisation, would not work."""
    return (
        "configure_optimizers gives several optimisers, and a step of PacelineStrategy has one: give one with several "
        "parameter groups, or write the loop with paceline.join() (docs/sharding.md)"
    )


def _devices(trainer: Trainer, device: torch.device) -> Iterator[str]:
    connector, accelerator = trainer._accelerator_connector, trainer.accelerator
    nodes, devices = connector._num_nodes_flag, len(connector._parallel_devices)
    if nodes > 1:
        yield (
            f"Trainer(num_nodes={nodes}) beside PacelineStrategy: leave num_nodes out, the launcher says "
            "how many workers there are (paceline run, torchrun)"
        )
    if devices not in (1, accelerator.auto_device_count()):  # "auto" is all GPUs there are
        yield (
            f"Trainer(devices={devices}) beside PacelineStrategy: write devices=1, each worker is a process with one "
            f"device (paceline run -n {devices} starts {devices})"
        )
    if accelerator.name() != device.type:
        fitting = "cpu" if device.type == "cpu" else "gpu"
        yield (
            f"the Trainer's accelerator is {accelerator.name()!r} and the fleet's device is {str(device)!r}: write "
            f'Trainer(accelerator="{fitting}"), or PacelineStrategy(device="{accelerator.name()}")'
        )
    if connector._layer_sync is not None:
        yield (
            "Trainer(sync_batchnorm=True) beside PacelineStrategy: leave it out, batch norm's running statistics are "
            "the fleet's already (docs/gradients.md)"
        )


def _precision(trainer: Trainer) -> Iterator[str]:
    plugin: Any = trainer.precision_plugin
    if type(plugin) not in PRECISIONS:
        yield f'precision by {type(plugin).__name__} is not known to PacelineStrategy: use "bf16-mixed" or "32-true"'
    if getattr(plugin, "scaler", None) is not None or plugin.precision in ("16-mixed", "16-true"):
        yield (
            f'precision="{plugin.precision}" beside PacelineStrategy: float16 needs a loss scale for the whole fleet, '
            'and the Trainer\'s is for one process; use precision="bf16-mixed"'
        )


def _data(trainer: Trainer) -> Iterator[str]:
    if trainer.overfit_batches:
        yield (
            "Trainer(overfit_batches=...) beside PacelineStrategy: give fit a DataLoader over "
            "torch.utils.data.Subset(dataset, range(n)) instead"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "Trainer(reload_dataloaders_every_n_epochs=...) beside PacelineStrategy: a run deals one dataset; change "
            "what it gives in on_train_epoch_start"
        )


def _training(trainer: Trainer) -> Iterator[str]:
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) beside PacelineStrategy: use "
            "global_batch, the samples of one update over the whole fleet, whatever fits in memory at once"
        )
    if trainer.limit_train_batches not in (0, 1.0) and not trainer.fast_dev_run:
        yield (
            f"Trainer(limit_train_batches={trainer.limit_train_batches}) beside PacelineStrategy: an epoch deals every "
            "sample once; give a DataLoader over torch.utils.data.Subset(dataset, range(n)), or max_steps"
        )
    if isinstance(getattr(trainer, "_val_check_time_interval", None), (int, float, timedelta)):
        yield (
            "Trainer(val_check_interval) by the clock beside PacelineStrategy: workers' clocks differ, and all "
            "validate together; give a number of steps or a part of an epoch"
        )


def _module(module: LightningModule) -> Iterator[str]:
    name = type(module).__name__
    if not module.automatic_optimization:
        yield (
            f"{name} optimises manually, and PacelineStrategy makes the updates: set automatic_optimization = True, or "
            "write the loop with paceline.join() (docs/sharding.md)"
        )
    if is_overridden("backward", module):
        yield f"{name}.backward is overridden, and PacelineStrategy calls backward itself: put it into the loss"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield f"{name}.training_step takes dataloader_iter, and PacelineStrategy deals the samples: take a batch"
