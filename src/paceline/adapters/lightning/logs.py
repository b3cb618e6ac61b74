"""What ``self.log`` gives, as the fleet's: each sample counts once, whichever worker processed it.

Inside a micro-batch values are only collected. In training they travel in the step's round, as ``step.add`` does; the
result is then logged once, the same on every worker. The name of a sum contains how it was logged, so that a worker
that had no micro-batch, or a newcomer, can log it as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

_NAME = re.compile(r"(?P<name>.*) \[(?P<rule>mean|sum|min|max)(?P<of>, samples)?\](?P<flags>\w*)", re.DOTALL)
AT_THE_END = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
"""Hooks in which modules log what they have collected."""
_FLAGS = {"s": "on_step", "e": "on_epoch", "p": "prog_bar", "l": "logger"}


@dataclass
class LoggedValue:
    """Values of one name, merged by its rule: ``mean`` is ``sum(value * weight) / sum(weight)``."""

    rule: str
    total: Any = 0.0
    weight: float = 0.0

    def add(self, value: Any, weight: float) -> None:
        if self.rule in ("min", "max") and self.weight:
            pick = torch.minimum if self.rule == "min" else torch.maximum
            self.total = pick(torch.as_tensor(self.total), torch.as_tensor(value))
        elif self.rule in ("min", "max"):
            self.total = value
        else:
            self.total = self.total + (value * weight if self.rule == "mean" else value)
        self.weight += weight

    def merge(self, total: float, weight: float) -> None:
        """Add another worker's part."""
        if self.rule in ("min", "max"):
            self.add(total, weight)
        elif weight:
            self.total, self.weight = self.total + total, self.weight + weight

    @property
    def value(self) -> Any:
        return self.total / self.weight if self.rule == "mean" else self.total


class FleetResults(_ResultCollection):
    """Replacement of Lightning's own collection. While ``parts`` is a dict, values are collected in it, by key."""

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.parts: dict[str, LoggedValue] | None = None
        self.rows: int | None = None
        """Samples in the micro-batch: the weight of a value unless ``self.log(batch_size=...)`` sets it."""
        self.dtype = torch.float32
        """Type of what is logged, whatever it was summed in."""
        self.everybody: Callable[[str, float], list[float]] = lambda label, value: [value]
        """Returns every worker's value, at a point that all workers reach."""

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log as Lightning does, but never sum values over processes once more."""
        new = set(self)
        if self.parts is not None and self.training and isinstance(value, Metric):
            raise ValueError(
                f"self.log({name!r}, <{type(value).__name__}>) in training_step: the metric knows this worker's "
                f"samples alone; log its value for the batch, self.log({name!r}, metric(...)), whose mean over the "
                "fleet is logged"
            )
        if fx in AT_THE_END and isinstance(value, torch.Tensor) and not options.get("rank_zero_only"):
            self._must_agree(fx, name, float(value))
        ours = {"sync_dist": True, "sync_dist_fn": _Sync.no_op, "sync_dist_group": None, "rank_zero_only": False}
        super().log(fx, name, value, *args, **{**options, **ours})
        if self.parts is not None and not isinstance(value, Metric):
            for key in set(self) - new:
                self[key].has_reset = True  # it has no value yet

    def _must_agree(self, fx: str, name: str, value: float) -> None:
        """Raise ValueError if workers log unlike values.

        Of what a module has collected itself, each worker has its own part.
        """
        values = self.everybody(f"self.log({name!r}) in {fx}", value)
        if not np.allclose(values, values[0], rtol=1e-5, equal_nan=True):
            listed = ", ".join(f"{one:.6g}" for one in values)
            raise ValueError(
                f"self.log({name!r}) in {fx}: the workers' values differ ({listed}), because each has gone through its "
                "own part of the data; log in the step itself, or use a torchmetrics metric in validation_step"
            )

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is None and self.rows is not None:
            return self.rows
        return int(super()._extract_batch_size(value, batch_size, meta))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self.parts is None or isinstance(value, Metric):
            super().update_metrics(key, value, batch_size)
            return
        rule = self[key].meta.reduce_fx.__name__
        if self.training and rule in ("min", "max"):
            raise ValueError(
                f"self.log({self[key].meta.name!r}, reduce_fx={rule!r}) in training_step: a step sums over the fleet; "
                "log a mean or a sum there, or the extreme in validation_step"
            )
        self.parts.setdefault(key, LoggedValue(rule)).add(value.detach().to(torch.float64), float(batch_size))

    def give(self, key: str, value: Any, weight: float) -> None:
        """Log the fleet's value, once."""
        tensor = torch.as_tensor(value, dtype=self.dtype, device=self[key].value.device)
        super().update_metrics(key, tensor, int(weight) if float(weight).is_integer() else weight)

    def register(self, key: str, meta: dict[str, Any], *, is_tensor: bool = True) -> None:
        """Create the key on a worker that has not logged it itself."""
        if key not in self:
            made = _Metadata(**meta)
            made.sync = _Sync(fn=_Sync.no_op, _should=True)
            self[key] = _ResultMetric(made, is_tensor)
            self[key].has_reset = True

    def objects(self) -> list[list[Any]]:
        """Return the metrics that this worker logged as objects, as JSON.

        Each is the key, how it was logged, and the metric's name in the module.
        """
        metas = [(key, one.meta) for key, one in self.items() if not one.is_tensor and not one.has_reset]
        return [[key, meta.fx, meta.dataloader_idx, name_of(meta), meta.metric_attribute] for key, meta in metas]

    def give_object(self, key: str, meta: dict[str, Any], metric: Metric) -> None:
        """Log a metric as an object on a worker that has not, because it had no batch."""
        self.register(key, meta, is_tensor=False)
        one = self[key]
        one.value, one._computed, one._update_count, one.has_reset = metric, None, max(1, one._update_count), False


# -- by the name of a sum ----------------------------------------------------------------------------------------------


def name_of(meta: Any) -> str:
    """Return a sum's name: what was logged, by which rule, and with which of on_step, on_epoch, prog_bar and logger.

    >>> name_of(_Metadata("training_step", "loss", on_step=True, on_epoch=False))
    'loss [mean]sl'
    """
    flags = "".join(letter for letter, field in _FLAGS.items() if getattr(meta, field))
    return f"{meta.name} [{meta.reduce_fx.__name__}]{flags}"


def meta_of(name: str) -> dict[str, Any] | None:
    """Return what `name_of` was made of; None for another sum."""
    found = _NAME.fullmatch(name)
    if found is None or found["of"]:
        return None
    flags = {field: letter in found["flags"] for letter, field in _FLAGS.items()}
    return {"name": found["name"], "reduce_fx": found["rule"], **flags}


def weight_name(name: str) -> str:
    """Return the name of the sum of a mean's weights."""
    return name.replace("[mean]", "[mean, samples]")


def sums_of(results: FleetResults, parts: Mapping[str, LoggedValue]) -> Iterator[tuple[str, Any]]:
    """Yield what one micro-batch logged, for ``step.add``."""
    for key, logged in parts.items():
        name = name_of(results[key].meta)
        yield name, logged.total
        if logged.rule == "mean":
            yield weight_name(name), logged.weight


def give_sums(results: FleetResults, sums: Mapping[str, float]) -> None:
    """Log what the round summed, the same on every worker."""
    for name, total in sums.items():
        meta = meta_of(name)
        if meta is None:
            continue
        key = f"training_step.{meta['name']}"
        results.register(key, {"fx": "training_step", **meta})
        if meta["reduce_fx"] != "mean":
            results.give(key, total, 1)
        elif weight := sums[weight_name(name)]:
            results.give(key, total / weight, weight)
