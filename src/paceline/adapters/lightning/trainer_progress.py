"""The progress of Lightning's loops and loggers, which a worker that joins or comes to lead takes over.

A newcomer's Trainer requests its first batch where the others request their next: with their counters, their callbacks'
states and what they have logged in this epoch it is at the same point.
"""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import _Loop
from lightning.pytorch.trainer import call

from paceline.adapters.lightning.logs import FleetResults, meta_of, name_of


class TrainerProgress:
    """A Trainer's progress, tracked by the fleet."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, connector = self._trainer, self._trainer._logger_connector
        loops = {**trainer.fit_loop.state_dict(), "state_dict": {}}  # the fleet tracks the position in the data
        return {
            "loops": loops,
            "callbacks": copy.deepcopy(call._call_callbacks_state_dict(trainer)),
            "logged": _logged(trainer.fit_loop.epoch_loop._results),
            "first_batch": connector._first_loop_iter,
            "hook": connector._current_fx,
            "metrics": {name: float(value) for name, value in connector._callback_metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        _load(trainer.fit_loop, state["loops"])
        fetcher: Any = trainer.fit_loop._data_fetcher
        if fetcher is not None:
            fetcher.fetched = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for callback in trainer.callbacks:
            theirs = state["callbacks"].get(callback.state_key)
            if theirs is None:
                continue
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = theirs.get("dirpath", callback.dirpath)
            callback.load_state_dict(copy.deepcopy(theirs))
        _take(trainer.fit_loop.epoch_loop._results, state["logged"])
        connector._first_loop_iter, connector._current_fx = state["first_batch"], state["hook"]
        device = trainer.strategy.root_device
        metrics = {name: torch.tensor(value, device=device) for name, value in state["metrics"].items()}
        connector._callback_metrics.update(metrics)


def _load(loop: _Loop, state: Mapping[str, Any], prefix: str = "") -> None:
    """Load the counters alone: this is no restart from a checkpoint."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, part in vars(loop).items():
        if isinstance(part, _Loop):
            _load(part, state, f"{prefix}{name}.")


def _logged(results: Any) -> list[list[Any]]:
    """Return the figures of the epoch so far."""
    if not isinstance(results, FleetResults):
        return []
    return [
        [key, one.meta.fx, name_of(one.meta), float(one.value), float(getattr(one, "cumulated_batch_size", 0))]
        for key, one in results.items()
        if one.is_tensor and not one.has_reset
    ]


def _take(results: Any, logged: list[list[Any]]) -> None:
    if not isinstance(results, FleetResults):
        return
    for key, fx, name, value, weight in logged:
        meta = meta_of(name)
        assert meta is not None
        results.register(key, {"fx": fx, **meta})
        one = results[key]
        one.value = one.value.new_tensor(value)
        if one.meta.is_mean_reduction:
            one.cumulated_batch_size = one.cumulated_batch_size.new_tensor(int(weight))
        one.has_reset, one._computed = False, None


def continue_csv_files(loggers: Iterable[Any]) -> None:
    """Continue the CSV files that another worker began.

    Lightning's writer removes a file that it finds, and has only the columns that it wrote itself: here the file is
    kept, and its columns are those that it has by now.
    """
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        path, text = os.path.join(logger.log_dir, _ExperimentWriter.NAME_METRICS_FILE), ""
        if logger._fs.isfile(path):
            with logger._fs.open(path, "r", newline="") as file:
                text = file.read()
        writer = logger.experiment
        if not text:
            continue
        if not logger._fs.isfile(path):
            with logger._fs.open(path, "w", newline="") as file:
                file.write(text)
        writer.metrics_keys = next(csv.reader(text.splitlines()))
