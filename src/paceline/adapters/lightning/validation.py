"""Validation and testing through the fleet: each batch is processed once, by one worker.

The batches are those of one process. Each worker takes a contiguous part of them by its speed, and reports what it
logged and what its metrics hold; when workers are lost meanwhile, those left process all batches again. Lightning's
loop gets an iterator that makes the complete pass when its first batch is requested, with all hooks of every batch, and
gives none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer

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
