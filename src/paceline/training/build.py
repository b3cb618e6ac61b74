"""From the arguments of ``fleet.steps`` to a loop: read the data and settings, agree with the others, make steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from paceline import concurrency
from paceline.errors import MisuseError
from paceline.feed import Order, Source, batch_count_note
from paceline.feed.dealing import BatchDealing
from paceline.gradients.fleet_sums import bytes_on_wire, like_flats
from paceline.gradients.mean import VaryingCount
from paceline.machines.link import link_from_env
from paceline.records import LoopSettings
from paceline.settings import check_sync_batch_norm, must_agree, read_settings
from paceline.step.checks import schedules
from paceline.step.micro_batch_size import device_name
from paceline.step.script_loops import ScriptLoop
from paceline.training.combines import kind_of
from paceline.training.construct import LoopPlan, StepsConstructor
from paceline.transport.formats import format_of

if TYPE_CHECKING:
    from paceline.step.steps import StepLoop
    from paceline.training.context import TrainingContext
    from paceline.training.loading import Loading
    from paceline.training.replica import Replica
    from paceline.training.untracked import UntrackedChecks


CROSSINGS = 8
"""Messages one after another, about, in a gather that follows another.

Through the store, where it is polled, each worker asks, asks again, fetches and puts. 166 ms were measured where one
message takes 20.
"""


class LoopBuilder:
    """Builder of the script's loops, one after another."""

    def __init__(
        self,
        context: TrainingContext,
        replica: Replica,
        untracked: UntrackedChecks,
        loading: Loading,
        constructor: StepsConstructor,
    ) -> None:
        self._context, self._replica, self._untracked = context, replica, untracked
        self._loading, self._constructor = loading, constructor
        self._warned_of: set[str] = set()
        """Classes of streams and of batch samplers that were warned of."""

    def build(
        self,
        data: Any,
        *,
        order: Order | None,
        split: bool | None,
        fixed_micro_batch: bool | None,
        lr_scaling: str,
        **asked: Any,
    ) -> StepLoop:
        """Build the loop of ``fleet.steps``; ``asked`` holds the arguments that `read_settings` reads."""
        context, micro_batch = self._context, asked["micro_batch"]
        if not context.models:
            raise MisuseError("fleet.steps before fleet.model: bring the model first")
        if context.elastic is not None and isinstance(micro_batch, Sequence) and not isinstance(micro_batch, str):
            raise ValueError('micro_batch is a list, and workers come and go: give one number, or "auto"')
        if context.transport.grouped and micro_batch == "auto":
            raise ValueError(
                'micro_batch="auto" lets each worker measure sizes of its own, and the processes of a worker started '
                "with --procs-per-worker go through the model together: give a number"
            )
        source = self._source(data, context.seed, split)
        try:
            self._check_split(source, split)
            settings = read_settings(source, rank=context.transport.rank, size=context.transport.size, **asked)
            varying = VaryingCount(lr_scaling, settings.global_batch)
            script_loop = self._next_loop(source, settings.epochs)
            if (seed := script_loop.seed(context.seed)) != context.seed:
                source.close()
                source = self._source(data, seed, split)
            order = _one_order(source, order, asked["shuffle"])
            context.steps = self._build(source, settings, order, fixed_micro_batch, varying, script_loop)
        except BaseException:
            source.close()
            raise
        context.tracking.state.loop_begins()
        context.passes.begin(script_loop, source.dataset, source.length)
        return context.steps

    def _source(self, data: Any, seed: int, split: bool | None) -> Source:
        context = self._context
        return Source(data, device=context.device, seed=seed, rank=context.identity, split=bool(split))

    def _check_split(self, source: Source, split: bool | None) -> None:
        """Check ``split`` against the data; warn where several workers draw from a stream and it is not given."""
        if source.length is not None and split is not None:
            raise ValueError("split= divides an IterableDataset: a dataset with a length is dealt anyway, leave it out")
        several = self._context.transport.size > 1 or self._context.elastic is not None
        if source.length is None and split is None and several and source.name not in self._warned_of:
            self._warned_of.add(source.name)
            self._context.warn(
                f"{source.name} is an IterableDataset and every worker draws all that it gives: unless it divides "
                "itself by worker and loader process, each sample is trained on once by every worker; "
                "fleet.steps(..., split=True) divides it, and split=False says that it is as you mean it"
            )

    def _next_loop(self, source: Source, epochs: int) -> ScriptLoop:
        """Return which of the script's loops this is."""
        context = self._context
        if context.steps is not None:
            context.steps.close()
            context.passes.note(context.steps.script_loop, context.steps.training.passes)
        self._loading.before_loop(source, epochs)
        return context.passes.next_loop(source.dataset)

    def _build(
        self,
        source: Source,
        settings: LoopSettings,
        order: Order | None,
        fixed: bool | None,
        varying: VaryingCount,
        script_loop: ScriptLoop,
    ) -> StepLoop:
        context, transport = self._context, self._context.transport
        self._replica.spread_new_parameters()
        agreed = {key: value for key, value in vars(settings).items() if key != "micro_batch"}
        facts = {"dataset length": source.length, **agreed, "order": order is not None, "lr_scaling": varying.rule}
        facts |= {"split": source.split, "batch_sampler": source.batched}
        must_agree(transport, "fleet.steps()", {**facts, "the loop": list(vars(script_loop).values())})
        device = device_name(context.device, context.machine.describe() if context.machine is not None else None)
        own = [source.ahead * settings.micro_batch, settings.micro_batch, context.device.type, device]
        began = concurrency.perf_counter()
        everybody = transport.gather("loading ahead", own)
        latency_s = (concurrency.perf_counter() - began) / CROSSINGS + (
            link.delay_s if (link := link_from_env()) else 0.0
        )
        ahead, sizes, kinds, devices = ([row[column] for row in everybody] for column in range(4))
        length = None if source.batched else source.length
        check_sync_batch_norm(context.models, pace=context.pacer.name, settings=settings, sizes=sizes, length=length)
        alike = len(set(kinds)) == 1
        plan = LoopPlan(
            source, settings, order, fixed, varying, script_loop, ahead, sizes, alike, facts, device, devices
        )
        steps = self._constructor.make(plan)
        try:
            self._report_unit(steps, plan)
            self._loading.continue_in(steps)
        except BaseException:
            steps.gradients.detach()
            raise
        self._constructor.guard(steps)
        self._announce(steps, plan, latency_s)
        return steps

    def _report_unit(self, steps: StepLoop, plan: LoopPlan) -> None:
        """Report what ``global_batch`` counts, once per kind of batch sampler."""
        if not isinstance(steps.dealing, BatchDealing):
            return
        assert plan.source.order is not None
        name = plan.source.order.name
        if name not in self._warned_of:
            self._warned_of.add(name)
            workers, batch = self._context.transport.size, plan.settings.global_batch
            level, text = batch_count_note(name, steps.dealing.batches, global_batch=batch, workers=workers)
            self._context.recorder.event("note", {"level": level, "text": text, "everywhere": True})

    def _announce(self, steps: StepLoop, plan: LoopPlan, latency_s: float) -> None:
        batched, settings = plan.source.batched, plan.settings
        self._context.recorder.event(
            "steps",
            {
                "length": plan.source.length,
                "global_batch": None if batched else settings.global_batch,
                "micro_batch": None if batched else plan.sizes,
                **({"batches": settings.global_batch} if batched else {}),
                "epochs": steps.training.end_epoch,
                "first_epoch": steps.training.first_epoch,
                "steps": steps.most,
                "first_step": steps.rounds,
                "dealt": None if plan.order is not None else steps.training.dealing.length,
                "round_bytes": self._round_bytes(steps),
                "latency_s": latency_s,
            },
        )

    def _round_bytes(self, steps: StepLoop) -> int:
        """Return the bytes of a round of gradients or parameters on the network; 0 for a worker alone."""
        context, gradients = self._context, steps.gradients
        if context.transport.solitary:
            return 0
        summed = like_flats(gradients.everything) if kind_of(context.combine).local else gradients.buckets.tensors()
        return bytes_on_wire(summed, format_of(context.comm_dtype))

    def check_end(self) -> None:
        """Check the training when the script leaves the fleet without an error.

        Raise MisuseError where it has not done what it seems to have done, and warn of schedules that are not at their
        end.
        """
        if (unreached := self._loading.unreached()) is not None:
            raise unreached
        steps = self._context.steps
        if steps is None or not steps.begun:
            return
        for name, thing in self._context.tracking.things.items() if steps.finished else ():
            if isinstance(thing, LRScheduler) and (text := schedules.unfinished(name, thing)):
                self._context.warn(text)
        self._untracked.at_the_end(steps)


def _one_order(source: Source, order: Order | None, shuffle: bool | None) -> Order | None:
    """Return the custom order, given by the script or by the DataLoader's sampler."""
    if source.order is None:
        return order
    if order is not None or shuffle is not None:
        given = "batch_sampler" if source.batched else "sampler"
        raise ValueError(f"the DataLoader's {given} gives the order: leave order= and shuffle= out, or the {given}")
    return source.order
