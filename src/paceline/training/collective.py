"""Calls that all workers make between steps: evaluating, predicting, agreeing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.checkpoint.content import plain
from paceline.checkpoint.shards import reshard
from paceline.errors import MisuseError
from paceline.feed import EvaluationNumbers, Source
from paceline.pace.shares import proportional
from paceline.settings import must_agree, whole_number
from paceline.step.checks.sameness import parameters_of, unlike_text
from paceline.step.script_loops import CallResults
from paceline.training import evaluate as evaluating
from paceline.training import predict as predicting
from paceline.training.combines import kind_of

if TYPE_CHECKING:
    from paceline.training.context import TrainingContext
    from paceline.training.same_data import SameData

USUAL_BATCH = 64
"""Samples that go through the model at once where neither script nor DataLoader sets it."""


class CollectiveCalls:
    """The calls that deal a dataset over the fleet once, outside the steps; their result is equal on every worker."""

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
        """Run ``fleet.evaluate``."""
        kinds = evaluating.Kinds.read(sums, tables)
        with self._context.meet("fleet.evaluate()"):
            noise = (
                EvaluationNumbers.draw()
            )  # also where the result is remembered: the script's own numbers go on alike
            return dict(self._remembered("evaluate", lambda: self._evaluate(score, data, batch_size, kinds, noise)))

    def predict(self, predict: Callable[..., Any], data: Any, *, batch_size: int | None, to: str) -> Any:
        """Run ``fleet.predict``."""
        if to not in ("all", "leader"):
            raise ValueError(f'fleet.predict(to=...) is "all" or "leader", got {to!r}')
        steps, passing = self._context.steps, self._context.passing
        if steps is not None and passing is not None and passing.passes_over(steps.script_loop.number):
            raise MisuseError(
                f"fleet.predict behind loop {steps.script_loop.number + 1} of the script, which is passed over: the "
                f"predictions would be those of {passing.path}, not of that time, and no checkpoint holds them; "
                'call fleet.predict in the loop (if step.ends_epoch:), or go on with fleet.load(..., loops="rest")'
            )
        with self._context.meet("fleet.predict()"):
            return self._predict(predict, data, batch_size, to)

    def any(self, flag: bool) -> bool:
        """Run ``fleet.any``."""
        transport = self._context.transport
        with self._context.meet("fleet.any()"):
            label = "fleet.any()"
            mine = lambda: any(transport.collect(label, bool(flag)))  # noqa: E731
            call = lambda: any(transport.gather(label, mine))  # noqa: E731
            return bool(self._remembered("any", call))

    def barrier(self) -> None:
        """Run ``fleet.barrier``."""
        transport, label = self._context.transport, "fleet.barrier()"
        with self._context.meet(label):
            mine = lambda: len(transport.collect(label, None))  # noqa: E731
            self._remembered("barrier", lambda: len(transport.gather(label, mine)))

    def _remembered(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the call's result, and store it if the call lies between two loops.

        A run that resumes from a checkpoint and makes the call again, with parameters that are already further on, gets
        the stored result.
        """
        context = self._context
        if not (context.steps is None or context.steps.left):
            return call()
        known = self._known_results().find(name, len(context.passes.call_results))
        result = known[0] if known else call()
        context.passes.call_results.add(name, plain(result, f"the result of fleet.{name}"))
        return result

    def _known_results(self) -> CallResults:
        """Return results of earlier calls, made by the fleet or by the run that this one resumes."""
        context = self._context
        if context.outside and context.elastic is not None:
            return CallResults.from_json(context.elastic.loop.call_results_of_fleet())
        return context.passing.call_results if context.passing is not None else CallResults()

    # -- over a whole dataset ----------------------------------------------------------------------------------------

    def _evaluate(
        self, score: Callable[..., Any], data: Any, batch_size: int | None, kinds: evaluating.Kinds, noise: int
    ) -> dict[str, Any]:
        context, transport = self._context, self._context.transport
        with self._dataset(data, batch_size, "fleet.evaluate", noise, **kinds.facts()) as (source, size, noise):

            def mine() -> dict[str, Any]:
                """Return this worker's part among those present, or all of it; called again when some are lost."""
                alone = context.outside
                with self._evaluation_mode():
                    own = evaluating.own_sums(score, self._own_batches(source, size, noise, alone=alone), kinds)
                sums = evaluating.sum_of_processes(transport.collect("the sums of fleet.evaluate()", own))
                return {"alone": alone, "sums": sums}

            answers = transport.gather("the sums of fleet.evaluate()", mine)
        parts = [one["sums"] for one in evaluating.parts_of_fleet(answers)]
        result = evaluating.final_figures(parts, kinds)
        means = [name for name in result if name not in (*kinds.added, "count")]
        context.recorder.event("evaluate", {"step": context.step, "result": result, "means": means})
        return result

    def _predict(self, predict: Callable[..., Any], data: Any, batch_size: int | None, to: str) -> Any:
        context, transport = self._context, self._context.transport
        with self._dataset(data, batch_size, "fleet.predict", EvaluationNumbers.draw(), to=to) as (source, size, noise):

            def mine() -> predicting.Part:
                with self._evaluation_mode():
                    batches = self._own_batches(source, size, noise, alone=context.outside)
                    return predicting.own_part(predict, batches)

            length = evaluating.length_of(source)
            rows = predicting.gathered(transport, mine, length, outside=context.outside)
        return rows if to == "all" or context.is_leader else None

    @contextmanager
    def _dataset(
        self, data: Any, batch_size: int | None, call: str, noise: int, **facts: Any
    ) -> Iterator[tuple[Source, int, int]]:
        """Yield a dataset that all workers go through once, the samples per batch and the number of its noise.

        That is the ``noise`` of worker 0.

        Raises ValueError unless all workers have these ``facts``.
        """
        context = self._context
        source = Source(data, device=context.device, seed=context.seed)
        try:
            if source.length is None:
                raise ValueError(f"{call} needs a dataset with a length, so that every sample counts once")
            facts = {**evaluating.facts_of(source), **facts}
            seen = self._same_data.look(source.dataset, source.length, source.look)
            also = {**self._speeds.own(), **self._weights(), "noise": noise}
            answers = must_agree(context.transport, f"{call}()", facts, also=also, each=seen)
            if len({one.get("weights") for one in answers}) > 1:
                self._refuse_unlike_weights(call)
            self._same_data.check(f"{call}()", source.name, answers, seen, source.look)
            self._speeds.take(answers)
            own = context.steps.dealing.at_once if context.steps is not None else USUAL_BATCH
            size = whole_number("batch_size", (source.batch_size or own) if batch_size is None else batch_size)
            yield source, size, answers[0]["noise"]
        finally:
            source.close()

    def _weights(self) -> dict[str, int]:
        """Return a number of the models' weights, where all workers must hold the same."""
        context, steps = self._context, self._context.steps
        rounds_differ = steps is not None and not steps.loop.replica.alike
        if context.transport.size == 1 or context.outside or context.transport.grouped or rounds_differ:
            return {}
        return {} if kind_of(context.combine).local else {"weights": parameters_of(context.models).sampled()}

    def _refuse_unlike_weights(self, call: str) -> None:
        """Raise MisuseError on every worker with what differs between their models."""
        models = self._context.models
        everybody = self._context.transport.gather("comparing models", lambda: parameters_of(models).by_name())
        when = f"at {call}()"
        causes = ["weights chosen or loaded by a worker's own figure: decide by step.loss or fleet.evaluate"]
        raise MisuseError(unlike_text(everybody, when=when, causes=causes) or f"{when} workers held unlike weights")

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        tracked = [thing for thing in self._context.tracking.things.values() if isinstance(thing, torch.nn.Module)]
        with evaluating.evaluation_mode([*self._context.models, *tracked]):
            yield
        reshard(self._context.models)

    def _own_batches(self, source: Source, size: int, noise: int, *, alone: bool) -> evaluating.PlacedBatches:
        """Return this worker's batches.

        Each worker present takes a part of the data by its speed; one that is not in the fleet takes all of it,
        ``alone``.
        """
        rank, speeds = (1, (0, 1)) if alone else self._speeds.of_members()
        shares = proportional(np.asarray(speeds, dtype=float), evaluating.length_of(source)).tolist()
        transport = self._context.transport
        part = (transport.shard, transport.shards)
        numbers = EvaluationNumbers(noise, self._context.device)
        return evaluating.each_batch(source, shares=shares, rank=rank, batch_size=size, numbers=numbers, part=part)
