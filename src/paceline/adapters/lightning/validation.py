"""Validation and testing through the fleet: each batch is processed once, by one worker.

The batches are those of one process. Each worker takes a contiguous part of them by its speed, and reports what it
logged and what its metrics hold; when workers are lost meanwhile, those left process all batches again. Lightning's
loop gets an iterator that makes the complete pass when its first batch is requested, with all hooks of every batch, and
gives none. The states that every worker's part left in torchmetrics are merged into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from paceline.adapters.lightning.logs import FleetResults, LoggedValue, meta_of, name_of
from paceline.feed import Source
from paceline.pace.shares import proportional
from paceline.settings import must_agree
from paceline.training.context import TrainingContext
from paceline.training.evaluate import AgreedSpeeds, facts_of, length_of, parts_of_fleet

if TYPE_CHECKING:
    from paceline.adapters.lightning.strategy import PacelineStrategy


class EvaluationData:
    """Replacement of a DataLoader for validation or testing."""

    def __init__(self, strategy: PacelineStrategy, context: TrainingContext, trainer: Trainer, loader: Any) -> None:
        self.loader, self._strategy, self._context, self._trainer = loader, strategy, context, trainer
        self.sampler = getattr(loader, "sampler", None)
        self._speeds = AgreedSpeeds(context)
        with _closing(self._source()) as source:
            if source.length is None:
                raise ValueError(
                    f"{source.name} has no length, so PacelineStrategy cannot deal its samples once each for "
                    "validation or testing: give a dataset with a length"
                )
            self._batches = _batches(source)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        self._pass()
        yield from ()

    # -- the pass ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        loop: Any = self._trainer._evaluation_loop
        loaders = loop._combined_loader.flattened
        number = next(n for n, one in enumerate(loaders) if one is self)
        if number:
            loop._store_dataloader_outputs()
        count = int(min(loop.max_batches[number], self._batches))
        with _closing(self._source()) as source:
            if self._trainer.sanity_checking or not count:
                self._strategy.metrics.alone()
                self._go_through(loop, source, range(count), number)
                return
            self._together(loop, source, count, number)

    def _together(self, loop: Any, source: Source, count: int, number: int) -> None:
        results, metrics, context = loop._results, self._strategy.metrics, self._context
        metrics.begin()
        with context.meet("validation"):
            if not context.outside:
                facts, same = {**facts_of(source), "batches": count}, self._strategy.same_data
                seen = same.look(source.dataset, source.length, source.look)
                answers = must_agree(context.transport, "validation", facts, also=self._speeds.own(), each=seen)
                same.check("validation", source.name, answers, seen, source.look)
                self._speeds.take(answers)

            def mine() -> dict[str, Any]:
                results.parts, alone = {}, context.outside
                metrics.restart()
                try:
                    self._go_through(loop, source, range(count) if alone else self._own(count), number)
                    return {
                        "alone": alone,
                        "logged": _logged_values(results),
                        "metrics": metrics.part(),
                        "objects": results.objects(),
                    }
                finally:
                    results.parts = None

            parts = parts_of_fleet(context.transport.gather("what validation found", mine))
        metrics.end([one["metrics"] for one in parts])
        _give(results, [one["logged"] for one in parts])
        for key, fx, dataloader, name, metric in (row for one in parts for row in one["objects"]):
            meta = {"fx": fx, "dataloader_idx": dataloader, "metric_attribute": metric, **(meta_of(name) or {})}
            results.give_object(key, meta, metrics.named(metric))

    def _own(self, count: int) -> range:
        """Return this worker's batches: a contiguous part by its speed."""
        rank, speeds = self._speeds.of_members()
        ends = np.cumsum([0, *proportional(np.asarray(speeds, dtype=float), count)])
        return range(int(ends[rank]), int(ends[rank + 1]))

    def _go_through(self, loop: Any, source: Source, batches: range, number: int) -> None:
        draws, length, size = source.once, length_of(source), source.batch_size or 1
        pieces = []
        for batch in batches:
            start, stop = batch * size, min((batch + 1) * size, length)
            indices = np.arange(start, stop, dtype=np.int64) if isinstance(draws, int) else draws[start:stop]
            pieces.append((((start, stop),), indices))
        if source.ahead:
            source.expect(0, pieces)
        try:
            for batch, (piece, indices) in zip(batches, pieces, strict=True):
                loop.batch_progress.is_last_batch = batch == batches[-1]
                loop._results.rows = len(indices)
                loop._evaluation_step(source.take(0, piece, indices), batch, number, None)
        finally:
            loop._results.rows = None

    def _source(self) -> Source:
        return Source(self.loader, device=self._context.device, seed=self._context.seed)


class _closing:
    def __init__(self, source: Source) -> None:
        self._source = source

    def __enter__(self) -> Source:
        return self._source

    def __exit__(self, *_: Any) -> None:
        self._source.close()


def _batches(source: Source) -> int:
    length = length_of(source)
    size = source.batch_size or 1
    return length // size if source.drop_last else -(-length // size)


# -- what was logged ---------------------------------------------------------------------------------------------------


def _logged_values(results: FleetResults) -> list[list[Any]]:
    """Return as JSON, per value: the key, how it was logged, and the figures."""
    assert results.parts is not None
    return [
        [key, results[key].meta.fx, results[key].meta.dataloader_idx, name_of(results[key].meta), *_figures(logged)]
        for key, logged in results.parts.items()
    ]


def _figures(logged: LoggedValue) -> tuple[float, float]:
    return float(torch.as_tensor(logged.total).item()), logged.weight


def _give(results: FleetResults, parts: list[list[list[Any]]]) -> None:
    """Merge all workers' figures, in the order of the first that had them, and log them once."""
    merged: dict[str, LoggedValue] = {}
    for key, fx, dataloader, name, total, weight in (one for part in parts for one in part):
        meta = meta_of(name)
        assert meta is not None
        results.register(key, {"fx": fx, "dataloader_idx": dataloader, **meta})
        merged.setdefault(key, LoggedValue(meta["reduce_fx"])).merge(total, weight)
    for key, logged in merged.items():
        if logged.weight:
            results.give(key, logged.value, logged.weight)


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
