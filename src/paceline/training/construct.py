"""From the arguments of ``fleet.steps`` to a loop.

A `LoopBuilder` reads the data and settings and agrees with the others. A `StepsConstructor` makes the one `StepLoop`:
its gradients, its dealing, its membership, and its guards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from paceline import concurrency
from paceline.errors import MisuseError
from paceline.feed import Order, Source, batch_count_note
from paceline.feed.custom_orders import overlapped
from paceline.feed.dealing import BatchDealing, Dealing, make_dealing
from paceline.gradients import Gradients
from paceline.gradients.fleet_sums import bytes_on_wire, like_flats
from paceline.gradients.gradients import VaryingCount
from paceline.gradients.second_order import needs_graph
from paceline.machines.link import link_from_env
from paceline.pace.forecast import Learner
from paceline.records import LoopSettings
from paceline.settings import check_sync_batch_norm, has_batch_norm, is_compiled, must_agree, read_settings
from paceline.step.checks import schedules
from paceline.step.checks.sameness import check_order
from paceline.step.checks.user_code import hooks_text
from paceline.step.combine import CombineParts
from paceline.step.context import EpochLength, LoopContext, LoopPosition, MicroBatching, ReplicaAccess, RunNotes
from paceline.step.members import Membership
from paceline.step.micro_batch_size import Guard, SizeSearch, Sizing, device_name, first_size, shrink
from paceline.step.script_loops import ScriptLoop
from paceline.step.steps import StepLoop
from paceline.step.training_state import TrainingState
from paceline.training.combines import kind_of, merge_settings, name_of
from paceline.training.replica import AFTER
from paceline.transport import Alone
from paceline.transport.formats import format_of

if TYPE_CHECKING:
    from paceline.training.context import TrainingContext
    from paceline.training.loading import Loading
    from paceline.training.replica import Replica
    from paceline.training.same_data import SameData, Seen
    from paceline.training.saving import Saving
    from paceline.training.untracked import UntrackedChecks


@dataclass(frozen=True)
class LoopPlan:
    """The data and settings of a loop, read and agreed upon before its steps are made."""

    source: Source
    settings: LoopSettings
    order: Order | None
    fixed_micro_batch: bool | None
    varying: VaryingCount
    script_loop: ScriptLoop
    ahead: list[int]
    """Samples that each worker's loader prefers to hold."""
    sizes: list[int]
    """Micro-batch of each worker, in samples."""
    alike: bool
    """Whether all workers have the same kind of device."""
    agreed: Mapping[str, Any]
    """Facts that are equal on every worker, and must be on one that joins."""
    own_device: str
    devices: list[str]
    """Names of the devices of all workers."""


class StepsConstructor:
    """Maker of a loop's steps, and owner of what lives as long as the fleet: learner, memory guards and sizes found."""

    def __init__(
        self,
        context: TrainingContext,
        replica: Replica,
        untracked: UntrackedChecks,
        saving: Saving,
        same_data: SameData,
    ) -> None:
        self._context, self._replica, self._untracked, self._saving = context, replica, untracked, saving
        self._same_data = same_data
        self._seen: Seen | None = None
        """Fingerprints that this process took of the newest loop's dataset."""
        self._guards: list[Guard] = []
        self._learner: Learner | None = None
        self._logged_once: set[str] = set()
        self._searches: dict[tuple[int, int], SizeSearch] = {}
        """Searches for micro-batch sizes, by number of the dataset and global batch: loops over it share one."""

    def make(self, plan: LoopPlan) -> StepLoop:
        self._seen = None
        gradients = self._gradients(plan.settings.auto)
        gradients.varying = plan.varying
        try:
            steps = self._new_steps(plan, gradients)
            self._follow_members(steps, plan)
        except BaseException:
            gradients.detach()
            raise
        return steps

    def _gradients(self, auto: bool) -> Gradients:
        context = self._context
        transport = Alone() if kind_of(context.combine).local else context.transport
        if text := hooks_text(context.models):
            if context.transport.shards > 1:
                raise ValueError(f"{text.partition(',')[0]}, which torch does not call in a sharded model: {AFTER}")
            context.warn(text)
        gradients = Gradients(
            transport,
            context.models,
            overlap=self._replica.overlap and not auto,
            wire_format=format_of(context.comm_dtype),
            shared=context.shared,
        )
        gradients.next_scaler = context.tracking.scaler
        optimizers = context.tracking.optimizers.values()
        if context.transport.grouped and any(needs_graph(optimizer) for optimizer in optimizers):
            raise ValueError(
                "an optimiser that needs second derivatives (AdaHessian) sees no graph of a sharded model: use another "
                "with workers started with --procs-per-worker"
            )
        gradients.keep_graph = transport.size == 1 and any(needs_graph(optimizer) for optimizer in optimizers)
        gradients.atomic = auto
        return gradients

    def _new_steps(self, plan: LoopPlan, gradients: Gradients) -> StepLoop:
        context, source, settings = self._context, plan.source, plan.settings
        script_loop, order = plan.script_loop, plan.order
        combine, transport = context.combine, context.transport
        kind, lengths = kind_of(combine), ()
        if kind.local and source.batched:
            raise ValueError(
                f'combine="{name_of(combine)}" weighs workers by samples, and a batch_sampler deals batches: '
                'use combine="gradients", or a DataLoader with batch_size'
            )
        if part := merge_settings(combine).shared_part:
            if order is not None or source.length is None:
                raise ValueError("an overlap deals the dataset in an order of its own: leave order= out")
            mixed: Any = overlapped(
                source.length, workers=transport.size, part=part, seed=script_loop.seed(context.seed)
            )
            order, lengths = mixed
        dealing = make_dealing(
            source,
            settings,
            order=order,
            seed=script_loop.seed(context.seed),
            rank=transport.rank,
            size=transport.size,
            ahead=plan.ahead,
            identity=context.identity,
            epoch=script_loop.first_epoch,
            part=(transport.shard, transport.shards),
        )
        loop = self._loop_context(plan, gradients, dealing)
        parts = CombineParts(
            context.models, context.failures, lengths, self._done_before("round"), format_of(context.comm_dtype)
        )
        steps = StepLoop(loop, kind.make(loop, combine, parts))
        self._learn(steps)
        steps.dataset_length, loop.save_if_due = source.length, partial(self._saving.save_if_due, steps)
        if source.length is not None and source.batch_size is not None:
            steps.micro_batches = settings.epochs * -(-source.length // source.batch_size)
        if isinstance(steps.dealing, BatchDealing):
            steps.micro_batches = settings.epochs * len(steps.dealing.batches)
        loop.epoch_length = self._epoch_length(steps, source)
        loop.singles = not (settings.auto or source.batched) and settings.global_batch > max(plan.sizes) == 1
        steps.schedule_watch = self._watch_schedules(steps, source)
        steps.before_first = partial(self._before_first_step, source)
        steps.after_first = self._untracked.after_first_step
        return steps

    def _epoch_length(self, steps: StepLoop, source: Source) -> EpochLength | None:
        """Return how long the script's own loader and an epoch's updates are, where both are known."""
        if steps.most is None or steps.micro_batches is None:
            return None
        batches, updates = (number // steps.settings.epochs for number in (steps.micro_batches, steps.most))
        if not source.batched and source.batch_size is not None:
            samples = (source.length if source.order is None else steps.dealing.length) or 0
            batches = samples // source.batch_size if source.drop_last else -(-samples // source.batch_size)
        return EpochLength(batches, updates)

    def _watch_schedules(self, steps: StepLoop, source: Source) -> schedules.ScheduleWatch | None:
        """Return the watch that compares schedules with the loop's length, where that is known."""
        context, settings = self._context, steps.settings
        if source.length is None:
            return None
        lengths: dict[int, str] = {}
        if not source.batched:
            equal_share = -(-settings.global_batch // context.transport.size)  # a number that no script counts by
            sizes = {source.batch_size, None if settings.micro_batch == equal_share else settings.micro_batch}
            lengths = schedules.loader_lengths(
                source.length,
                epochs=settings.epochs,
                batch_sizes=[int(size) for size in sizes if size is not None and size >= 1],
                workers=context.transport.size,
            )
        elif steps.micro_batches is not None:
            lengths = {steps.micro_batches: "epochs * len(loader)"}
        return schedules.ScheduleWatch(
            schedules.LoopLength(steps.most, settings.epochs, lengths),
            find=context.tracking.schedules,
            warn=self._warn_once,
        )

    def _warn_once(self, text: str) -> None:
        """Warn of what may be so in each of the script's loops."""
        if text not in self._logged_once:
            self._logged_once.add(text)
            self._context.warn(text)

    def _loop_context(self, plan: LoopPlan, gradients: Gradients, dealing: Dealing) -> LoopContext:
        context, script_loop, models = self._context, plan.script_loop, self._context.models
        compiled = any(is_compiled(model) for model in models)
        unit = max(plan.sizes) if (compiled if plan.fixed_micro_batch is None else plan.fixed_micro_batch) else 1
        avoid_singles = not plan.source.batched and any(has_batch_norm(model) for model in models)
        dealing.smallest = 2 if avoid_singles else 1
        first = self._done_before("step")
        training = TrainingState(
            transport=context.transport,
            pacer=context.pacer,
            dealing=dealing,
            settings=plan.settings,
            unit=unit,
            avoid_singles=avoid_singles,
            history=context.history,
            first_index=first,
            first_epoch=script_loop.first_epoch,
            log_event=context.recorder.event,
        )
        return LoopContext(
            transport=context.transport,
            training=training,
            gradients=gradients,
            dealing=dealing,
            settings=plan.settings,
            script_loop=script_loop,
            device=context.device,
            machine=context.machine,
            seed=script_loop.seed(context.seed),
            nonfinite=context.nonfinite,
            tracking=context.tracking,
            notes=RunNotes(context.recorder.event, self._logged_once),
            replica=ReplicaAccess(
                repair=self._replica.make_equal,
                snapshot=self._replica.state,
                restore=self._replica.take_over,
                contents=self._replica.contents,
                alike=plan.alike,
                holding=self._replica.holding,
            ),
            micro_batches=MicroBatching(
                dealing,
                auto=plan.settings.auto,
                uncut=unit > 1,
                sizing=self._sizing(plan, dealing, fixed=unit > 1),
                own_device=plan.own_device,
                devices=tuple(plan.devices),
            ),
            position=LoopPosition(first),
        )

    def _sizing(self, plan: LoopPlan, dealing: Dealing, *, fixed: bool) -> Sizing | None:
        """Return the search for the size of this worker's micro-batches, where ``"auto"`` may change it."""
        context, settings = self._context, plan.settings
        if not settings.auto:
            return None
        if fixed:
            context.inform(
                'micro_batch="auto" looks for no size: micro-batches are whole (a compiled model, or '
                "fixed_micro_batch=True). It begins with an equal share, and is halved where memory runs out"
            )
            return None
        search = SizeSearch(first_size(settings.micro_batch, normalises=dealing.smallest > 1))
        found = self._searches.setdefault((plan.script_loop.dataset, settings.global_batch), search)
        return Sizing(found, dealing, context.device)

    def _before_first_step(self, source: Source, steps: StepLoop) -> None:
        """Check, before a loop's first step, that all workers track the same and have the same data.

        Schedules must have the loop's length.
        """
        tracking, look = self._context.tracking, steps.dealing.look
        self._seen = self._same_data.look(source.dataset, source.length, look)
        answers = self._replica.must_be_equal(steps, each=self._seen)
        self._same_data.check("fleet.steps()", source.name, answers, self._seen, look)
        if kind_of(self._context.combine).local:  # with gradients, every epoch's first step compares the orders
            check_order(self._context.transport, steps.dealing)
        for name, thing in tracking.things.items():
            if isinstance(thing, LRScheduler) and steps.dataset_length is not None:
                schedules.check_length(name, thing, steps=steps.most, micro_batches=steps.micro_batches)
        self._untracked.before_first_step(steps)
        self._check_state(steps)

    def _check_state(self, steps: StepLoop) -> None:
        """Check whether a peer can be given what is tracked: better now than when somebody joins, or is late."""
        try:
            if steps.combine.hands_over_state:
                self._replica.check_state()
        except Exception:
            if self._context.elastic is not None:
                raise
            steps.loop.script.plain = False

    def _done_before(self, what: str) -> int:
        """Return the number of steps, or rounds, of the loops before a new one."""
        steps, resume = self._context.steps, self._context.resume
        if steps is not None:
            return steps.index if what == "step" else steps.rounds
        return int(resume.saved.get(what, 0)) if resume is not None and resume.loops == "rest" else 0

    def _follow_members(self, steps: StepLoop, plan: LoopPlan) -> None:
        context = self._context
        if context.elastic is None:
            return
        own = {
            **plan.agreed,
            "pace": context.pacer.name,
            "combine": repr(context.combine),
            "comm_dtype": context.comm_dtype,
            "started with --procs-per-worker": context.transport.grouped,
            "the models' shapes": self._replica.shapes_digest(),
        }
        steps.loop.membership = Membership(
            context.elastic,
            steps,
            ahead=plan.source.ahead * plan.settings.micro_batch,
            agreed=lambda: {**own, **context.tracking.facts()},
            recorder=context.recorder,
            passes=context.passes,
            seen=lambda: self._seen,
            check_seen=partial(self._check_newcomer, steps, plan.source.name),
            leads=lambda: self._learn(steps),
            before_leaving=lambda: self._saving.before_leaving(steps),
        )

    def _check_newcomer(self, steps: StepLoop, name: str, theirs: Seen | None) -> None:
        if theirs is not None and self._seen is not None:
            self._same_data.check_newcomer(name, theirs, self._seen, steps.dealing.look)

    # -- what lives as long as the fleet -------------------------------------------------------------------------------

    def guard(self, steps: StepLoop) -> None:
        """Guard models that may run out of memory, for real ("auto") or on an emulated machine."""
        for guard in self._guards:
            guard.remove()
        machine = self._context.machine
        emulated = machine.check_memory if machine and machine.memory_samples else None
        if not steps.settings.auto and emulated is None:
            self._guards = []
            return
        halve = (lambda samples: shrink(steps.loop, samples, again=False)) if steps.settings.auto else None
        enter = emulated or (lambda samples: None)
        self._guards = [Guard(model, enter=enter, shrink=halve) for model in self._context.models]

    def _learn(self, steps: StepLoop) -> None:
        """Let the present leader's pacer learn from the run, where it has something that does."""
        if self._learner is None and self._context.is_leader:
            self._learner = self._context.pacer.learner()
        steps.training.learn = self._learner.after if self._learner is not None else None

    def close(self) -> None:
        for guard in self._guards:
            guard.remove()
        if self._learner is not None:
            self._learner.close()


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
        self._loading.check_schedules()
        self._untracked.at_the_end(steps)


def _one_order(source: Source, order: Order | None, shuffle: bool | None) -> Order | None:
    """Return the custom order, given by the script or by the DataLoader's sampler."""
    if source.order is None:
        return order
    if order is not None or shuffle is not None:
        given = "batch_sampler" if source.batched else "sampler"
        raise ValueError(f"the DataLoader's {given} gives the order: leave order= and shuffle= out, or the {given}")
    return source.order
