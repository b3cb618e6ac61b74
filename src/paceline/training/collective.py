"""Calls that all workers make between steps: evaluating, gathering predictions, agreeing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.checkpoint.content import plain
from paceline.checkpoint.shards import reshard
from paceline.errors import MisuseError
from paceline.feed import Source
from paceline.loop.call_results import CallResults
from paceline.pace.shares import proportional
from paceline.settings import must_agree, whole_number
from paceline.training import evaluate as evaluating
from paceline.training import gather as gathering

if TYPE_CHECKING:
    from paceline.training.context import TrainingContext
    from paceline.training.same_data import SameData

USUAL_BATCH = 64
"""Samples that go through at once where nobody says how many."""


class CollectiveCalls:
    """Deals a dataset over the fleet once, outside the steps, and hands every worker the same result."""

    def __init__(self, context: TrainingContext, same_data: SameData) -> None:
        self._context, self._same_data = context, same_data
        self._speeds = evaluating.AgreedSpeeds(context)

    def evaluate(
        self,
        score: Callable[..., Any],
        data: Any,
        *,
        batch_size: int | None,
        sums: str | Sequence[str],
        tables: str | Sequence[str],
    ) -> dict[str, Any]:
        """``fleet.evaluate``."""
        kinds = evaluating.Kinds.of(sums, tables)
        with self._context.meet("fleet.evaluate()"):
            return dict(self._remembered("evaluate", lambda: self._evaluate(score, data, batch_size, kinds)))

    def gather(self, predict: Callable[..., Any], data: Any, *, batch_size: int | None, to: str) -> Any:
        """``fleet.gather``."""
        if to not in ("all", "leader"):
            raise ValueError(f'fleet.gather(to=...) is "all" or "leader", got {to!r}')
        steps, passing = self._context.steps, self._context.passing
        if steps is not None and passing is not None and passing.passes_over(steps.place.loop):
            raise MisuseError(
                f"fleet.gather behind loop {steps.place.loop + 1} of the script, which is passed over: the predictions "
                f"would be those of {passing.path}, not of that time, and no checkpoint holds them; call fleet.gather "
                'in the loop (if step.ends_epoch:), or go on with fleet.load(..., loops="rest")'
            )
        with self._context.meet("fleet.gather()"):
            return self._gather(predict, data, batch_size, to)

    def agree(self, flag: bool) -> bool:
        """``fleet.agree``."""
        transport = self._context.transport
        with self._context.meet("fleet.agree()"):
            label = "fleet.agree()"
            mine = lambda: any(transport.collect(label, bool(flag)))  # noqa: E731
            call = lambda: any(transport.gather(label, mine))  # noqa: E731
            return bool(self._remembered("agree", call))

    def _remembered(self, name: str, call: Callable[[], Any]) -> Any:
        """The call's result, remembered where it lies between two loops: a run that goes on from a checkpoint and makes
        it again, with parameters that are already further on, gets it from there."""
        context = self._context
        if not (context.steps is None or context.steps.left):
            return call()
        known = self._known_results().find(name, len(context.passes.call_results))
        result = known[0] if known else call()
        context.passes.call_results.add(name, plain(result, f"the result of fleet.{name}"))
        return result

    def _known_results(self) -> CallResults:
        """Of calls that were made before: by the fleet, or by the run that this one goes on from."""
        context = self._context
        if context.outside and context.elastic is not None:
            return CallResults.from_json(context.elastic.loop.told_by_fleet())
        return context.passing.call_results if context.passing is not None else CallResults()

    # -- over a whole dataset ----------------------------------------------------------------------------------------

    def _evaluate(
        self, score: Callable[..., Any], data: Any, batch_size: int | None, kinds: evaluating.Kinds
    ) -> dict[str, Any]:
        context, transport = self._context, self._context.transport
        with self._whole_of(data, batch_size, "fleet.evaluate", **kinds.facts()) as (source, size):

            def mine() -> dict[str, Any]:
                """This worker's part among those who are there, or all of it; again when some are lost meanwhile."""
                alone = context.outside
                with self._evaluation_mode():
                    own = evaluating.own_sums(score, self._own_batches(source, size, alone=alone), kinds)
                sums = evaluating.of_worker(transport.collect("the sums of fleet.evaluate()", own))
                return {"alone": alone, "sums": sums}

            told = transport.gather("the sums of fleet.evaluate()", mine)
        parts = [one["sums"] for one in evaluating.of_fleet(told)]
        result = evaluating.whole(parts, kinds)
        means = [name for name in result if name not in (*kinds.added, "count")]
        context.recorder.event("evaluate", {"step": context.step, "result": result, "means": means})
        return result

    def _gather(self, predict: Callable[..., Any], data: Any, batch_size: int | None, to: str) -> Any:
        context, transport = self._context, self._context.transport
        with self._whole_of(data, batch_size, "fleet.gather", to=to) as (source, size):

            def mine() -> gathering.Part:
                with self._evaluation_mode():
                    return gathering.own_part(predict, self._own_batches(source, size, alone=context.outside))

            length = evaluating.length_of(source)
            whole = gathering.gathered(transport, mine, length, outside=context.outside)
        return whole if to == "all" or context.is_leader else None

    @contextmanager
    def _whole_of(self, data: Any, batch_size: int | None, call: str, **facts: Any) -> Iterator[tuple[Source, int]]:
        """A dataset to be gone through once by all, and how many samples at once. ``facts`` are the same everywhere."""
        context = self._context
        source = Source(data, device=context.device, seed=context.seed)
        try:
            if source.length is None:
                raise ValueError(f"{call} needs a dataset with a length, so that every sample counts once")
            facts = {**evaluating.facts_of(source), **facts}
            seen = self._same_data.look(source.dataset, source.length, source.look)
            told = must_agree(context.transport, f"{call}()", facts, also=self._speeds.own(), each=seen)
            self._same_data.check(f"{call}()", source.name, told, seen, source.look)
            self._speeds.take(told)
            own = context.steps.dealing.at_once if context.steps is not None else USUAL_BATCH
            yield source, whole_number("batch_size", (source.batch_size or own) if batch_size is None else batch_size)
        finally:
            source.close()

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        tracked = [thing for thing in self._context.tracking.things.values() if isinstance(thing, torch.nn.Module)]
        with evaluating.evaluation_mode([*self._context.models, *tracked]):
            yield
        reshard(self._context.models)

    def _own_batches(self, source: Source, size: int, *, alone: bool) -> evaluating.PlacedBatches:
        """Those of this worker: each of those who are there takes a part of the whole by its speed; one that is not in
        the fleet takes all of it, ``alone``."""
        speeds = (0, 1) if alone else self._speeds.of_those_here()
        shares = proportional(np.asarray(speeds, dtype=float), evaluating.length_of(source)).tolist()
        transport = self._context.transport
        part = (transport.shard, transport.shards)
        return evaluating.each_batch(source, shares=shares, rank=transport.rank, batch_size=size, part=part)
