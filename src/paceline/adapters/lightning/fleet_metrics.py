"""torchmetrics in a fleet: the states that every worker's part of a validation left, merged into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

_RULES: dict[Any, Any] = {dim_zero_sum: torch.sum, dim_zero_max: torch.amax, dim_zero_min: torch.amin}


class FleetMetrics:
    """The metrics of a module, by name.

    Outside a validation that is over, ``compute`` is refused where there are other workers: a metric's state is that of
    this worker's own samples.
    """

    def __init__(self, module: nn.Module) -> None:
        found = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._metrics: dict[str, Metric] = found
        self._before: dict[str, tuple[dict[str, Any], int]] = {}
        self._whole: set[str] = set()

    def named(self, name: str) -> Metric:
        return self._metrics[name]

    def guard(self, shared: Any) -> None:
        """Refuse ``compute`` on partial states where ``shared()`` returns that there are other workers."""
        for name, metric in self._metrics.items():
            metric.distributed_available_fn = lambda name=name: bool(shared()) and name not in self._whole
            metric.dist_sync_fn = _refuse

    def begin(self) -> None:
        """Begin a validation: what is gathered is this pass's alone."""
        self._before = {name: (_state(metric), metric._update_count) for name, metric in self._metrics.items()}

    def restart(self) -> None:
        """Reset the metrics for a pass, made for the first time or again with other members."""
        for metric in self._metrics.values():
            metric.reset()

    def part(self) -> dict[str, Any]:
        """Return this worker's part of the pass, as JSON, for the metrics that were updated in it."""
        used = {name: metric for name, metric in self._metrics.items() if metric._update_count}
        return {name: {"state": _plain(name, metric), "updates": metric._update_count} for name, metric in used.items()}

    def end(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Set every metric to the complete state: what it had before the pass, and all workers' parts."""
        for name, metric in self._metrics.items():
            before, updates = self._before[name]
            theirs = [part[name] for part in parts if name in part]
            states = [*([before] if updates else []), *(_tensors(metric, one["state"]) for one in theirs)]
            if states:
                for field in metric._defaults:
                    setattr(metric, field, _merged(metric, field, [state[field] for state in states]))
            metric._update_count, metric._computed = updates + sum(one["updates"] for one in theirs), None
            if theirs:
                self._whole.add(name)

    def alone(self) -> None:
        """Allow ``compute``: each worker processes a few batches by itself, to check that they work."""
        self._whole = set(self._metrics)

    def forget(self) -> None:
        """Refuse ``compute`` again: training continues, and what metrics gather is this worker's."""
        self._whole.clear()


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "a torchmetrics metric is computed outside of validation or testing, where its state is this worker's own: in "
        "training_step log its value for the batch, self.log(name, metric(...)), whose mean over the fleet is logged"
    )


def _state(metric: Metric) -> dict[str, Any]:
    values = {field: getattr(metric, field) for field in metric._defaults}
    return {name: list(value) if isinstance(value, list) else value.clone() for name, value in values.items()}


def _plain(name: str, metric: Metric) -> dict[str, Any]:
    for field, rule in metric._reductions.items():
        if rule not in (*_RULES, dim_zero_cat):
            raise ValueError(
                f"the metric {name} ({type(metric).__name__}) has a state that is neither a sum, an extreme nor a "
                "list, so parts of it cannot be put together: gather predictions with strategy.fleet.predict"
            )
        value = getattr(metric, field)
        if isinstance(value, list) and len(value) > 1:
            setattr(metric, field, [dim_zero_cat(value)])
    return {field: _listed(getattr(metric, field)) for field in metric._defaults}


def _listed(value: Any) -> Any:
    parts = value if isinstance(value, list) else [value]
    return [[part.tolist(), str(part.dtype).removeprefix("torch.")] for part in parts]


def _tensors(metric: Metric, state: Mapping[str, Any]) -> dict[str, Any]:
    def made(field: str) -> Any:
        where = metric.device
        parts = [torch.tensor(one, dtype=getattr(torch, kind), device=where) for one, kind in state[field]]
        return parts if isinstance(metric._defaults[field], list) else parts[0]

    return {field: made(field) for field in metric._defaults}


def _merged(metric: Metric, field: str, values: Sequence[Any]) -> Any:
    if isinstance(metric._defaults[field], list):
        return [part for value in values for part in value]
    rule: Any = metric._reductions[field]
    if rule is dim_zero_cat:
        return torch.cat(list(values))
    return _RULES[rule](torch.stack(list(values)), dim=0).to(values[0].dtype)
