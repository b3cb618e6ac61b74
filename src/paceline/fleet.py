"""A worker's life in the fleet: join, bring the model, track what has state, take steps, leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline import devices, machines
from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.autosave import Autosaver, Schedule
from paceline.checkpoint.load import Found, fetch
from paceline.combine import Gradients
from paceline.combine.averaging.local import LocalSteps
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.choose import check_combine, failures_from_env, make_combine
from paceline.combine.gradients.scaling import give_back
from paceline.combine.gradients.second_order import needs_graph
from paceline.combine.gradients.varying import VaryingCount
from paceline.errors import FleetError, MisuseError
from paceline.exit import end_with_one_line
from paceline.feed import Batches, Order, Source, unit_said
from paceline.feed.dealing import FromBatches, make_dealing
from paceline.feed.overlap import overlapped
from paceline.loop import evaluate as evaluating
from paceline.loop import gather as gathering
from paceline.loop import replicas, schedules
from paceline.loop.membership import Members
from paceline.loop.memory import Guard
from paceline.loop.passes import Passes, Place, told_from_json
from paceline.loop.resume import LOOPS, Resume, told_again
from paceline.loop.steps import Steps
from paceline.loop.tracking import Living, Tracked
from paceline.loop.user_code import hooks_text
from paceline.loop.values import Values
from paceline.observe.exports.trackers import Trackers
from paceline.pace import Pacer, may_set_deadlines
from paceline.pace import make as make_pacer
from paceline.pace.shares import proportional
from paceline.records import History
from paceline.run_recorder import Witness
from paceline.settings import (
    LoopSettings,
    check_sync_batch_norm,
    has_batch_norm,
    is_compiled,
    must_agree,
    read_settings,
    whole_number,
)
from paceline.signals import leave_on_sigterm
from paceline.transport import Alone, Fixed, Transport, launched
from paceline.transport.elastic import transport as elastic

logger = logging.getLogger("paceline")

Model = TypeVar("Model", bound=torch.nn.Module)
"""The user's own class."""


def join(
    pace: str | Pacer = "adaptive",
    *,
    combine: str | Averaging | ElasticAverage = "gradients",
    device: str | torch.device | None = None,
    seed: int = 0,
    nonfinite: str = "stop",
    name: str | None = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
) -> Fleet:
    """Join the fleet that ``paceline run``, torchrun or another launcher started, or be one alone.

    Args:
        pace: who does how many samples, until when: "adaptive" (shares follow the measured speeds), "equal" (as DDP),
            "fixed:1,1,2" (ratios of work), "epoch" (new shares once an epoch), "joint" (shares and a deadline: nobody
            waits for a worker that stalls), "cutoff" (P3: the first shares count), or an object with settings:
            `paceline.Adaptive`, `Equal`, `Fixed`, `Epoch`, `Joint` or `Cutoff`. PACELINE_PACE overrides it, and the
            run says so.
        combine: how the work merges: "gradients" (one mean gradient every step), "average" or "elastic-average"
            (parameters, now and then: for slow networks), or an object with settings: `paceline.Averaging` or
            `paceline.ElasticAverage`. PACELINE_COMBINE overrides it, and the run says so.
        device: where this worker computes; a GPU of its own where there is one, unless given.
        seed: of the shuffle and of everything random in the loop; the same on every worker.
        nonfinite: "stop" (an error that names the worker) or "skip" the update when gradients are NaN or infinite.
        name: of the run, for its folder and log.
        run_dir: the run's folder; ``runs/<time>-<name>`` unless given.
        quiet: no live view and no closing verdict.

    Raises:
        ValueError: for a pace, combine or device that is unknown or does not fit the fleet.
        FleetError: when the others do not come, or came with other settings.

    Example:
        ```python
        with paceline.join(paceline.Joint(least_gain=0.05), seed=7) as fleet:
            model = fleet.model(Net())
        ```
    """
    return Fleet(pace, combine, device=device, seed=seed, nonfinite=nonfinite, name=name, run_dir=run_dir, quiet=quiet)


class Fleet:
    """This worker's hold on the fleet. Use it as a context manager: ``with paceline.join() as fleet:``.

    Attributes:
        device (torch.device): where this worker computes; models and micro-batches are put there.
        seed (int): of the shuffle and of everything random in the loop; a checkpoint that is loaded brings its own.
        pacer (Pacer): decides the shares: the object given to `paceline.join`, or the one of that name.
        combine (str | Averaging | ElasticAverage): how the work merges: "gradients", or the settings of an average.
        nonfinite (str): "stop" or "skip": what happens when gradients are NaN or infinite.
        machine (Machine | None): the machine that this worker plays under ``--emulate``; None when it plays none.
    """

    def __init__(
        self,
        pace: str | Pacer,
        combine: str | Averaging | ElasticAverage,
        *,
        device: str | torch.device | None,
        seed: int,
        nonfinite: str,
        name: str | None,
        run_dir: str | Path | None,
        quiet: bool,
    ) -> None:
        asked, overridden = pace, os.environ.get("PACELINE_PACE")
        self.pacer = make_pacer(overridden or pace)
        other_combine = os.environ.get("PACELINE_COMBINE")
        self.combine = make_combine(other_combine or combine)
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f'nonfinite must be "stop" or "skip", got {nonfinite!r}')
        self.device = devices.choose(device)
        self.seed = int(seed)
        self.nonfinite = nonfinite
        try:
            self.machine = machines.from_env(_slot(), around=elastic.asked_for())
            self._transport = self._make_transport()
        except FleetError as error:
            end_with_one_line(error)
            raise
        try:
            self._set_up(name, run_dir, quiet)
            if overridden:
                self._note("info", f"pace is {self.pacer.name!r} as PACELINE_PACE says, not {_pace_name(asked)!r}")
            if other_combine:
                self._note("info", f"combine is {other_combine!r} as PACELINE_COMBINE says")
        except BaseException as error:
            self._transport.close(failure=error)
            if isinstance(error, FleetError):
                end_with_one_line(error)
            raise

    def _make_transport(self) -> Transport:
        # Rounds with a deadline, and overlapped ones, run beside the user's kernels, which NCCL was not seen to bear.
        aside = may_set_deadlines(self.pacer) or (isinstance(self.combine, Averaging) and self.combine.overlap)
        backend = "gloo" if aside else None
        if elastic.asked_for():
            emulated = self.machine.describe() if self.machine else None
            return elastic.Elastic(self.device, emulated=emulated, backend=backend)
        return Fixed(self.device, backend=backend) if launched() else Alone()

    @property
    def _elastic(self) -> elastic.Elastic | None:
        return self._transport if isinstance(self._transport, elastic.Elastic) else None

    @property
    def _outside(self) -> bool:
        """Whether this worker waits to enter a running fleet: until its first step its calls concern itself alone."""
        return self._elastic is not None and self._elastic.outside

    def _set_up(self, name: str | None, run_dir: str | Path | None, quiet: bool) -> None:
        if self._elastic is None:
            self.pacer.check(self.size)
        check_combine(self.combine, self.pacer, self.size, elastic=self._elastic is not None)
        self._learner = self._make_learner()
        self._failures = failures_from_env(self.seed)
        self._at_the_end = ExitStack()
        if self._elastic is not None:
            self._at_the_end.enter_context(leave_on_sigterm(self._elastic))
        self._models: list[torch.nn.Module] = []
        self._tracking = Tracked(lambda: (p for model in self._models for p in model.parameters()))
        self._known: list[torch.nn.Parameter] = []
        """Parameters that were made equal on all workers."""
        self._looked_for: tuple[Any, list[str]] = (None, [])
        """What was tracked and how far the script was when a checkpoint was written; and what was not tracked."""
        self._loaded: tuple[str, int | None] | None = None
        """The last checkpoint that was loaded, and the first loop that made steps since."""
        self._hooks: list[Any] = []
        self._guards: list[Guard] = []
        self._history = History()
        self._overlap = True
        self._steps: Steps | None = None
        self._passes = Passes()
        self._resume: Resume | None = None
        """A checkpoint that was loaded, until the script is where it was saved."""
        self._warned_of: set[str] = set()
        """Classes of streams that do not say whether they divide themselves."""
        self._autosaver: Autosaver | None = None
        self._trackers = Trackers(leads=lambda: self.is_leader, observe=lambda *event: self._witness.event(*event))
        combine = self.combine if isinstance(self.combine, str) else self.combine.name
        settings = {"pace": self.pacer.name, "combine": combine, "seed": self.seed, "nonfinite": self.nonfinite}
        must_agree(self._transport, "paceline.join()", {**settings, "combine": repr(self.combine)})
        emulated = self.machine.describe() if self.machine else None
        self._witness = Witness(
            self._transport,
            name=name,
            run_dir=run_dir,
            quiet=quiet,
            settings=settings,
            device=self.device,
            emulated=emulated,
        )

    def _make_learner(self) -> Any:
        """The leader's, when the pacer's forecast learns while the run goes on."""
        if not self.is_leader or not getattr(getattr(self.pacer, "forecast", None), "learns", False):
            return None
        from paceline.deep.learning.background import Learner  # takes a while to import, and few runs need it

        return Learner.for_pacer(self.pacer)

    # -- who is here -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among those present, from 0 to ``size - 1``; in an elastic fleet it may change."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many workers are in the fleet now."""
        return self._transport.size

    @property
    def is_leader(self) -> bool:
        """Whether this is the worker that plans, writes the log and saves: that of the lowest rank. Exactly one is, but
        in an elastic fleet not the same one for ever."""
        return self._transport.rank == 0 and not self._outside

    @property
    def run_id(self) -> str:
        """The run's name, the same on every worker: that of its folder."""
        return self._witness.run_id

    @property
    def run_dir(self) -> Path:
        """The run's folder: the event log is in it, and a place for files of your own."""
        return self._witness.run_dir

    @property
    def history(self) -> History:
        """The records of the last thousand steps, the same on every worker but for ``wall_s`` and ``round_s``."""
        return self._history

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the fleet; the context manager does it for you."""
        if error is None and self._passing is not None and self._passing.replays and self._steps is not None:
            self._leave(unreached := _unreached(self._passing))
            raise unreached
        if error is None and self._steps is not None and self._steps.finished and self._steps.begun:
            for name, thing in self._tracking.things.items():
                if isinstance(thing, LRScheduler) and (text := schedules.unfinished(name, thing)):
                    self._warn_everywhere(text)
        try:
            if error is None and self._steps is not None and self._steps.begun:
                self._refuse_begun_anew(self._steps)
        except MisuseError as misuse:
            self._leave(misuse)
            raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._steps is not None:
            self._steps.close(orderly=error is None)
        self._tracking.close()
        if self._tracking.scaler is not None:
            give_back(self._tracking.scaler)
        for attached in (*self._hooks, *self._guards):
            attached.remove()
        if self._learner is not None:
            self._learner.close()
        try:
            self._transport.close(failure=error)
        except FleetError as lost:
            error = lost
            raise
        finally:
            self._at_the_end.close()
            if self._steps is not None:
                self._steps.await_proxy()
            if self._autosaver is not None:
                self._autosaver.close()
            self._trackers.close()
            self._witness.close(error)
            if isinstance(error, FleetError):
                end_with_one_line(error)

    # -- what is trained -------------------------------------------------------------------------------------------

    def model(self, module: Model, *, overlap: bool = True) -> Model:
        """Your own module back: on ``fleet.device``, with the leader's weights on every worker.

        ``overlap=False`` starts the sums only when backward is over (for models whose parameters get their gradient
        in several parts, such as re-entrant checkpoints over shared layers).
        """
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"fleet.model takes a torch.nn.Module, got {type(module).__name__}")
        wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
        wrapped = next((part for part in module.modules() if isinstance(part, wrappers)), None)
        if wrapped is not None:
            raise ValueError(
                f"the model is wrapped in {type(wrapped).__name__}: pass the plain module, Paceline combines the "
                "gradients itself"
            )
        if self._steps is not None:
            raise MisuseError("fleet.model after fleet.steps: bring every model before the first step")
        module = module.to(self.device)
        replicas.check_same_shape(self._transport, module)
        if self.size > 1 and not self._outside:
            replicas.spread(self._transport, [module])
        self._models.append(module)
        self._known += module.parameters()
        if not is_compiled(module):
            self._hooks.append(module.register_forward_pre_hook(_refuse_ddp))
        self._overlap = self._overlap and overlap
        return module

    def track(self, **objects: Any) -> None:
        """Name what has state (optimizer, scheduler, scaler, your own): it is saved, loaded and sent along.

        Everybody tracks the same names, before the first step where workers come and go: one that joins takes over what
        the others track. Plain values have a place in `state`.
        """
        if self._elastic is not None and self._steps is not None and self._steps.begun and not self._steps.left:
            raise MisuseError(
                "fleet.track after the first step: a worker that joins takes over what is tracked at its own first "
                "step; track everything before the loop"
            )
        self._tracking.add(objects)
        if self._steps is not None:
            self._steps.gradients.next_scaler = self._tracking.scaler

    @property
    def state(self) -> Values:
        """Plain values of your own that belong to the training: ``fleet.state.best = 0.0``. They are saved with every
        checkpoint, loaded with it, and handed to a worker that joins or returns. Set them before ``fleet.load``."""
        return self._tracking.state

    # -- steps -----------------------------------------------------------------------------------------------------

    def steps(
        self,
        data: Any,
        *,
        global_batch: int,
        micro_batch: int | str | Sequence[int] | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        order: Order | None = None,
        split: bool | None = None,
        whole: bool | None = None,
        varying_count: str = "none",
    ) -> Steps:
        """The training's steps over a Dataset or DataLoader.

        Args:
            data: a Dataset, or a DataLoader, whose dataset, collate function and loader processes are used.
            global_batch: samples a step, over the whole fleet. With a DataLoader whose ``batch_sampler`` gives the
                batches, a step is so many of its *batches*: each is one micro-batch and counts by its samples.
            micro_batch: samples that go through the model at once: a number, one per worker, or "auto".
            epochs: passes over the data; each sample counts once in each.
            shuffle: a new order every epoch; as the DataLoader says, else True.
            drop_last: leave the epoch's last, smaller step out; as the DataLoader says, else False.
            order: ``order(epoch)`` gives the dataset indices to train on; each draw counts once.
            split: of an IterableDataset: True divides it, each sample goes to one worker and one loader process; False
                says that it divides itself, or that every worker is meant to draw all of it. Unless given, a fleet of
                several workers warns.
            whole: shares are whole micro-batches, of one size; on by itself for compiled models, which would compile
                each size anew.
            varying_count: how the learning rate follows a step that counted more or fewer samples than global_batch,
                as steps with a deadline do: "none", "linear" or "gain" (docs/joint.md).
        """
        if not self._models:
            raise MisuseError("fleet.steps before fleet.model: bring the model first")
        if self._elastic is not None and isinstance(micro_batch, Sequence) and not isinstance(micro_batch, str):
            raise ValueError('micro_batch is a list, and workers come and go: give one number, or "auto"')
        source = self._source(data, self.seed, split)
        try:
            self._check_split(source, split)
            settings = read_settings(
                source,
                global_batch=global_batch,
                micro_batch=micro_batch,
                epochs=epochs,
                shuffle=shuffle,
                drop_last=drop_last,
                rank=self.rank,
                size=self.size,
            )
            varying = VaryingCount(varying_count, settings.global_batch)
            place = self._next_place(source, settings.epochs)
            if (seed := place.seed(self.seed)) != self.seed:
                source.close()
                source = self._source(data, seed, split)
            order = self._one_order(source, order, shuffle)
            self._steps = self._build_steps(source, settings, order, whole, varying, place)
        except BaseException:
            source.close()
            raise
        self.state.loop_begins()
        self._passes.begin(place, source.dataset, source.length)
        return self._steps

    def _source(self, data: Any, seed: int, split: bool | None) -> Source:
        return Source(data, device=self.device, seed=seed, rank=self._identity, split=bool(split))

    def _next_place(self, source: Source, epochs: int) -> Place:
        """Which of the script's loops this is."""
        if self._steps is not None:
            self._steps.close()
            self._passes.note(self._steps.place, self._steps.books.passes)
        if self._resume is not None:
            self._settle_resume(self._resume, source, epochs)
        return self._passes.place(source.dataset)

    def _one_order(self, source: Source, order: Order | None, shuffle: bool | None) -> Order | None:
        """A custom order, from whoever gives one."""
        if source.order is None:
            return order
        if order is not None or shuffle is not None:
            given = "batch_sampler" if source.batched else "sampler"
            raise ValueError(f"the DataLoader's {given} gives the order: leave order= and shuffle= out, or the {given}")
        return source.order

    def _check_split(self, source: Source, split: bool | None) -> None:
        """Whether a stream is divided must be said where there are several to draw from it."""
        if source.length is not None and split is not None:
            raise ValueError("split= divides an IterableDataset: a dataset with a length is dealt anyway, leave it out")
        several = self.size > 1 or self._elastic is not None
        if source.length is None and split is None and several and source.name not in self._warned_of:
            self._warned_of.add(source.name)
            self._warn_everywhere(
                f"{source.name} is an IterableDataset and every worker draws all that it gives: unless it divides "
                "itself by worker and loader process, each sample is trained on once by every worker; "
                "fleet.steps(..., split=True) divides it, and split=False says that it is as you mean it"
            )

    def _build_steps(
        self,
        source: Source,
        settings: LoopSettings,
        order: Order | None,
        whole: bool | None,
        varying: VaryingCount,
        place: Place,
    ) -> Steps:
        self._spread_what_is_new()
        agreed = {key: value for key, value in vars(settings).items() if key != "micro_batch"}
        facts = {"dataset length": source.length, **agreed, "order": order is not None, "varying_count": varying.rule}
        facts |= {"split": source.split, "batch_sampler": source.batched}
        must_agree(self._transport, "fleet.steps()", {**facts, "the loop": list(vars(place).values())})
        own = [source.ahead * settings.micro_batch, settings.micro_batch, self.device.type]
        everybody = self._transport.gather("loading ahead", own)
        ahead, sizes, devices_there = ([row[column] for row in everybody] for column in range(3))
        length = None if source.batched else source.length
        check_sync_batch_norm(self._models, pace=self.pacer.name, settings=settings, sizes=sizes, length=length)
        gradients = self._gradients(settings.auto)
        gradients.varying = varying
        try:
            steps = self._new_steps(source, settings, order, whole, gradients, ahead, sizes, place)
            steps.alike = len(set(devices_there)) == 1
            self._follow_members(steps, ahead=source.ahead * settings.micro_batch, agreed=facts)
            self._go_on(steps)
        except BaseException:
            gradients.detach()
            raise
        self._guard(steps)
        self._witness.event(
            "steps",
            {
                "length": source.length,
                "global_batch": None if source.batched else settings.global_batch,
                "micro_batch": None if source.batched else sizes,
                **({"batches": settings.global_batch} if source.batched else {}),
                "epochs": steps.books.end_epoch,
                "first_epoch": steps.books.first_epoch,
                "steps": steps.most,
                "first_step": steps.rounds,
                "dealt": None if order is not None else steps.books.dealing.length,
            },
        )
        return steps

    def _spread_what_is_new(self) -> None:
        """Layers may have been replaced or added since the last loop: every worker gets the leader's weights there."""
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        known = {id(parameter) for parameter in self._known}
        new = sum(id(parameter) not in known for parameter in parameters)
        facts = {"the number of parameters": len(parameters), "of them new since fleet.model": new}
        must_agree(self._transport, "fleet.steps()", facts)
        if new:
            for model in self._models:
                model.to(self.device)
                replicas.check_same_shape(self._transport, model)
            if self.size > 1 and not self._outside:
                replicas.spread(self._transport, self._models)
            self._note("info", f"{new} new parameters: every worker has the leader's")
        self._known = parameters

    def _new_steps(
        self,
        source: Source,
        settings: LoopSettings,
        order: Order | None,
        whole: bool | None,
        gradients: Gradients,
        ahead: list[int],
        sizes: list[int],
        place: Place,
    ) -> Steps:
        compiled = any(is_compiled(model) for model in self._models)
        local: dict[str, Any] = {}
        if not isinstance(self.combine, str):
            if source.batched:
                raise ValueError(
                    f'combine="{self.combine.name}" weighs workers by samples, and a batch_sampler deals batches: '
                    'use combine="gradients", or a DataLoader with batch_size'
                )
            local = {"combine": self.combine, "models": self._models, "failures": self._failures, "lengths": ()}
            local["first_round"] = self._steps_so_far("round")
            part = getattr(self.combine, "overlap", 0.0) if isinstance(self.combine, ElasticAverage) else 0.0
            if part:
                if order is not None or source.length is None:
                    raise ValueError("an overlap deals the dataset in an order of its own: leave order= out")
                mixed: Any = overlapped(source.length, workers=self.size, part=part, seed=place.seed(self.seed))
                order, local["lengths"] = mixed
        kind: Any = LocalSteps if local else Steps
        steps: Steps = kind(
            **local,
            transport=self._transport,
            pacer=self.pacer,
            gradients=gradients,
            dealing=make_dealing(
                source,
                settings,
                order=order,
                seed=place.seed(self.seed),
                rank=self.rank,
                size=self.size,
                ahead=ahead,
                identity=self._identity,
                epoch=place.first_epoch,
            ),
            settings=settings,
            unit=max(sizes) if (compiled if whole is None else whole) else 1,
            avoid_singles=not source.batched and any(has_batch_norm(model) for model in self._models),
            seed=place.seed(self.seed),
            device=self.device,
            machine=self.machine,
            nonfinite=self.nonfinite,
            history=self._history,
            first_index=self._steps_so_far("step"),
            place=place,
            observe=self._witness.event,
            repair=self._make_equal,
            tracking=self._tracking,
            snapshot=self._replica,
            restore=lambda state: self._put_back(Path("a peer's state"), state),
        )
        self._learn(steps)
        steps.dataset_length, steps.at_boundary = source.length, self._at_boundary
        if source.length is not None and source.batch_size is not None:
            steps.micro_batches = settings.epochs * -(-source.length // source.batch_size)
        if isinstance(steps.dealing, FromBatches):
            batches = steps.dealing.batches
            steps.micro_batches = settings.epochs * len(batches)
            self._say_unit(source, settings, batches)
        steps.before_first, steps.after_first = self._before_first_step, self._check_tracked
        return steps

    def _say_unit(self, source: Source, settings: LoopSettings, batches: Batches) -> None:
        """What ``global_batch`` counts is said once for each kind of batch sampler."""
        assert source.order is not None
        if source.order.name not in self._warned_of:
            self._warned_of.add(source.order.name)
            level, text = unit_said(source.order.name, batches, global_batch=settings.global_batch, workers=self.size)
            self._witness.event("note", {"level": level, "text": text, "everywhere": True})

    def _before_first_step(self, steps: Steps) -> None:
        """What a loop needs is there by now: everybody tracks the same, and everything where it may be handed over."""
        self._tracking.must_agree(self._transport, "the first step")
        for name, thing in self._tracking.things.items():
            if isinstance(thing, LRScheduler) and steps.dataset_length is not None:
                schedules.check_length(name, thing, steps=steps.most, micro_batches=steps.micro_batches)
        if steps.hands_over_state or len(self._passes.lengths) < 2:
            self._tracking.note_averages(living := Living())
        if steps.hands_over_state:
            self._check_tracked(steps, living)

    def _refuse_begun_anew(self, steps: Steps, living: Living | None = None) -> None:
        """A checkpoint was loaded, and by now it shows what the script uses and does not track. What a later loop makes
        for itself may be new; an average of the weights seldom is."""
        if self._loaded is None:
            return
        path, first = self._loaded[0], steps.place.loop if self._loaded[1] is None else self._loaded[1]
        self._loaded = path, first
        missing = [
            name for name in self._tracking.missing(living) if first == steps.place.loop or name.startswith("ema=")
        ]
        if missing:
            raise _begun_anew(path, missing)

    def _check_tracked(self, steps: Steps, living: Living | None = None) -> None:
        living = living or Living()
        self._refuse_begun_anew(steps, living)
        if not steps.hands_over_state:
            return
        missing = self._tracking.missing(living, optimizers=self._elastic is None)
        # Of an optimiser that has not stepped yet nobody knows whether it will: then a copy is not safe.
        steps.copyable = not missing
        if missing and self._elastic is not None:
            raise MisuseError(
                "a worker that joins could not take over the state of what is not tracked: call "
                f"fleet.track({', '.join(missing)}) before the first step, with your own objects"
            )

    def _make_equal(self) -> replicas.Repair:
        """Every worker takes over the leader's models and everything tracked."""
        state = replicas.hand_round(self._transport, self._replica(), device=self.device)
        mine = {"device": self.device.type, "distance": replicas.distance(self._models, state["models"])}
        self._put_back(Path("the leader's state"), state)
        found = self._transport.gather("how far replicas were apart", mine)
        return replicas.Repair([one["distance"] for one in found], [one["device"] for one in found])

    def _steps_so_far(self, what: str) -> int:
        """Steps, or rounds, of the loops before a new one."""
        if self._steps is not None:
            return self._steps.index if what == "step" else self._steps.rounds
        rest = self._resume is not None and self._resume.loops == "rest"
        return int(self._resume.saved.get(what, 0)) if rest and self._resume is not None else 0

    @property
    def _identity(self) -> int:
        """This worker's number for good; in a fleet of fixed size its rank."""
        return self._elastic.id if self._elastic is not None else self.rank

    def _follow_members(self, steps: Steps, *, ahead: int, agreed: Mapping[str, Any]) -> None:
        if self._elastic is None:
            return
        shapes = blake2b(repr([replicas.shape_of(model) for model in self._models]).encode(), digest_size=16)
        own = {"pace": self.pacer.name, "combine": repr(self.combine), "the models' shapes": shapes.hexdigest()}
        steps.members = Members(
            self._elastic,
            steps,
            ahead=ahead,
            agreed=lambda: {**agreed, **own, **self._tracking.facts()},
            witness=self._witness,
            passes=self._passes,
            leads=lambda: self._learn(steps),
            before_leaving=lambda: self._save_last(steps),
        )

    def _learn(self, steps: Steps) -> None:
        """Where the pacer's forecast learns, the leader of the moment lets it."""
        self._learner = self._learner or self._make_learner()
        steps.learn_with(self._learner.after if self._learner is not None else None)

    def _save_last(self, steps: Steps) -> None:
        """This worker leaves: where automatic saving is on and it leads, the others may all be gone soon too."""
        if self._autosaver is not None and self.is_leader:
            self._autosaver.boundary(steps.index, last=True)
            if steps.members is None or steps.members.all_leave:  # nobody waits, and nobody else will tell of it
                self._autosaver.close()

    def _gradients(self, auto: bool) -> Gradients:
        alone = not isinstance(self.combine, str)  # a local step's gradient is this worker's own
        transport = Alone() if alone else self._transport
        if text := hooks_text(self._models):
            self._warn_everywhere(text)
        gradients = Gradients(transport, self._models, overlap=self._overlap and not auto)
        gradients.next_scaler = self._tracking.scaler
        optimizers = self._tracking.optimizers.values()
        gradients.keep_graph = transport.size == 1 and any(needs_graph(optimizer) for optimizer in optimizers)
        gradients.whole = auto
        return gradients

    def _guard(self, steps: Steps) -> None:
        """Models that may run out of memory, for real ("auto") or on an emulated machine."""
        for guard in self._guards:
            guard.remove()
        emulated = self.machine.check_memory if self.machine and self.machine.memory_samples else None
        if not steps.auto and emulated is None:
            self._guards = []
            return
        shrink = (lambda samples: steps.shrink(samples, again=False)) if steps.auto else None
        self._guards = [Guard(model, enter=emulated or (lambda samples: None), shrink=shrink) for model in self._models]

    # -- together --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        score: Callable[..., Any],
        data: Any,
        *,
        batch_size: int | None = None,
        tables: str | Sequence[str] = (),
    ) -> dict[str, Any]:
        """Deal ``data`` over the fleet and return exact sums over the whole of it, the same on every worker.

        ``score(*batch)`` returns a dict of sums over the batch; the result has those names and "count". The models
        are in evaluation mode and no gradients are kept. All workers call it.

        Args:
            batch_size: samples that go through at once; else the DataLoader's, else the training's micro-batch.
            tables: names of those sums that are tables, such as a confusion matrix: tensors of one shape, added
                element by element. Everything else must be a number; predictions are `gather`'s.
        """
        with self._meeting("fleet.evaluate()"):
            names = evaluating.table_names(tables)
            call = lambda: self._evaluate(score, data, batch_size, names)  # noqa: E731
            return dict(self._between_loops("evaluate", call))

    def _between_loops(self, kind: str, call: Callable[[], Any]) -> Any:
        """The call's result, remembered where it lies between two loops: a run that goes on from a checkpoint and makes
        it again, with parameters that are already further on, gets it from there."""
        if not (self._steps is None or self._steps.left):
            return call()
        number, passing = len(self._passes.told), self._passing
        if self._outside and self._elastic is not None:  # the fleet has made these calls before
            known = told_again(told_from_json(self._elastic.fleets_told()), kind, number)
        else:
            known = passing.told_again(kind, number) if passing is not None else []
        result = known[0] if known else call()
        self._passes.remember(kind, checkpoint.plain(result, f"the result of fleet.{kind}"))
        return result

    @property
    def _passing(self) -> Resume | None:
        """The checkpoint that was loaded, while the script passes over loops on its way to where it was saved."""
        return self._resume if self._resume is not None and self._resume.passing else None

    def gather(self, predict: Callable[..., Any], data: Any, *, batch_size: int | None = None, to: str = "all") -> Any:
        """Predictions of the whole of ``data``, in the dataset's order, each sample once: for AUC, F1 or mAP.

        ``predict(*batch)`` returns a tensor with one row a sample, or a tuple or dict of such. The result is the same
        with ``len(dataset)`` rows, on the CPU. The models are in evaluation mode and no gradients are kept. All
        workers call it.

        Args:
            batch_size: samples that go through at once; else the DataLoader's, else the training's micro-batch.
            to: "all" workers get the result, or the "leader" alone and the others None.
        """
        if to not in ("all", "leader"):
            raise ValueError(f'fleet.gather(to=...) is "all" or "leader", got {to!r}')
        steps, passing = self._steps, self._passing
        if steps is not None and passing is not None and passing.passes_over(steps.place.loop):
            raise MisuseError(
                f"fleet.gather behind loop {steps.place.loop + 1} of the script, which is passed over: the predictions "
                f"would be those of {passing.path}, not of that time, and no checkpoint holds them; call fleet.gather "
                'in the loop (if step.ends_epoch:), or go on with fleet.load(..., loops="rest")'
            )
        with self._meeting("fleet.gather()"):
            return self._gather(predict, data, batch_size, to)

    def _meeting(self, label: str) -> AbstractContextManager[Any]:
        """All workers at one point of the training, with the parameters that are to be shown."""
        return self._steps.meet(label) if self._steps is not None else nullcontext()

    def _evaluate(
        self, score: Callable[..., Any], data: Any, batch_size: int | None, tables: tuple[str, ...]
    ) -> dict[str, Any]:
        with self._whole_of(data, batch_size, "fleet.evaluate", tables=tables) as (source, size):

            def mine() -> dict[str, Any]:
                """This worker's part among those who are there; once more when some are lost meanwhile."""
                with self._evaluation_mode():
                    return evaluating.own_sums(
                        score, source, shares=self._parts(source), rank=self.rank, batch_size=size, tables=tables
                    )

            sums = self._transport.gather("the sums of fleet.evaluate()", mine)
        result = evaluating.total(sums[:1] if self._outside else sums, tables=tables)
        self._witness.event("evaluate", {"step": self._steps.index if self._steps is not None else 0, "result": result})
        return result

    def _gather(self, predict: Callable[..., Any], data: Any, batch_size: int | None, to: str) -> Any:
        with self._whole_of(data, batch_size, "fleet.gather", to=to) as (source, size):

            def mine() -> gathering.Part:
                with self._evaluation_mode():
                    return gathering.own_part(
                        predict, source, shares=self._parts(source), rank=self.rank, batch_size=size
                    )

            length = evaluating.length_of(source)
            whole = gathering.gathered(Alone() if self._outside else self._transport, mine, length)
        return whole if to == "all" or self.is_leader else None

    @contextmanager
    def _whole_of(self, data: Any, batch_size: int | None, call: str, **facts: Any) -> Iterator[tuple[Source, int]]:
        """A dataset to be gone through once by all, and how many samples at once. ``facts`` are the same everywhere."""
        source = Source(data, device=self.device, seed=self.seed)
        try:
            if source.length is None:
                raise ValueError(f"{call} needs a dataset with a length, so that every sample counts once")
            must_agree(self._transport, f"{call}()", {**evaluating.facts_of(source), **facts})
            own = self._steps.dealing.at_once if self._steps is not None else 64
            yield source, whole_number("batch_size", (source.batch_size or own) if batch_size is None else batch_size)
        finally:
            source.close()

    def _evaluation_mode(self) -> AbstractContextManager[None]:
        tracked = [thing for thing in self._tracking.things.values() if isinstance(thing, torch.nn.Module)]
        return evaluating.evaluation_mode([*self._models, *tracked])

    def _parts(self, source: Source) -> list[int]:
        """How many samples of the whole each of those who are there takes."""
        speeds = (0, 1) if self._outside else self._speeds()
        parts: list[int] = proportional(np.asarray(speeds, dtype=float), evaluating.length_of(source)).tolist()
        return parts

    def _speeds(self) -> tuple[int, ...]:
        """In proportion to which work is dealt outside the steps: the last full shares, or equal parts."""
        shares = self._steps.full_shares if self._steps is not None else ()
        return shares if any(shares) else (1,) * self.size

    def agree(self, flag: bool) -> bool:
        """True on every worker when any of them says True: for stopping together. All workers call it."""
        with self._meeting("fleet.agree()"):
            call = lambda: any(self._transport.gather("fleet.agree()", bool(flag)))  # noqa: E731
            return bool(self._between_loops("agree", call))

    def log(self, figures: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
        """Note figures: ``fleet.log(loss=step.loss)`` or ``fleet.log({"train/loss": step.loss})``.

        They go into the run's log and to whatever ``fleet.log_to`` named. Any worker may call it, the leader of the
        moment writes, and nobody waits: give figures that are the fleet's, such as ``step.loss`` and ``step.sums``.
        ``step``: the index of the step that the loop is in, unless given.
        """
        if step is None:
            step = self._steps.current_index if self._steps is not None else 0
        self._trackers.log({**(figures or {}), **named}, step)

    def log_to(self, writer: Any = None, *, make: Callable[[], Any] | None = None) -> None:
        """Where ``fleet.log`` writes: a TensorBoard SummaryWriter, a wandb run, the mlflow module, or a function of
        (figures, step). Only the leader's is used; a worker without one gives None.

        ``make``: a function that makes one, called when this worker first has something to write as the leader, and
        ended when it leaves the fleet: where workers come and go, who leads later has its own.
        """
        self._trackers.add(writer, make)

    def save(self, path: str | Path, *, extra: Any = None) -> None:
        """Write everything that is needed to go on: models, tracked objects, the data's position, the pace.

        All workers call it, the leader writes. ``extra`` is yours: plain values and tensors.
        """
        path = Path(path)
        if self._steps is not None:
            self._passes.saves += self._steps.left
            if (passing := self._passing) is not None:
                self._come_by_save(passing, self._steps, path)
                return
        with self._meeting("fleet.save()"):
            must_agree(self._transport, "fleet.save()", {**self._tracking.facts(), **self._tracking.values_facts()})
            problem = self._transport.gather("fleet.save()", lambda: self._write(path, extra))[0]
        if problem:
            kind, text = problem
            raise OSError(text) if kind == "OSError" else ValueError(text)

    def autosave(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        extra: Any = None,
    ) -> None:
        """Save into ``folder`` from now on, between steps and beside the training; ``fleet.load(folder)`` goes on.

        All workers call it, the leader of the moment writes. Trouble with the disk warns, and the training goes on.

        Args:
            every_steps: at every multiple of so many steps.
            every_s: so many seconds after the last time. With both: whichever comes first.
            keep: how many checkpoints stay.
            extra: yours, as in ``fleet.save``; or a function that gives it, called at the time of saving.
        """
        autosaver = Autosaver(
            Path(folder),
            schedule=Schedule(every_steps=every_steps, every_s=every_s),
            keep=keep,
            leads=lambda: self.is_leader,
            content=lambda: self._shown_content(extra),
            observe=self._witness.event,
        )
        if self._autosaver is not None:
            self._autosaver.close()
        self._autosaver = autosaver

    @contextmanager
    def _shown_content(self, extra: Any) -> Iterator[dict[str, Any]]:
        with self._steps.shown() if self._steps is not None else nullcontext():
            yield self._content(extra() if callable(extra) else extra)

    def _at_boundary(self, steps: Steps) -> None:
        """Between two steps, the user's own code after a commit included."""
        if self._autosaver is not None and steps is self._steps:
            self._autosaver.boundary(steps.index, last=steps.finished)

    def _write(self, path: Path, extra: Any) -> list[str] | None:
        """The leader writes the checkpoint; returns what went wrong."""
        if not self.is_leader:  # neither is one that waits to enter
            return None
        try:
            checkpoint_file.write(path, self._content(extra))
        except OSError as error:
            return ["OSError", f"cannot write {path}: {error.strerror or error}"]
        except ValueError as error:
            return ["ValueError", f"fleet.save: {error}"]
        self._witness.event("save", {"step": self._steps.index if self._steps is not None else 0, "path": str(path)})
        return None

    def _replica(self) -> dict[str, Any]:
        """What makes this worker's replica: its models and everything tracked."""
        return {
            "models": [checkpoint.plain(model.state_dict(), "the model's state") for model in self._models],
            "tracked": {
                name: checkpoint.plain(t.state_dict(), f"the state of {name}")
                for name, t in self._tracking.things.items()
            },
            "state": self.state.state_dict(),
        }

    def _content(self, extra: Any) -> dict[str, Any]:
        return {
            **self._replica(),
            "steps": self._steps_state(),
            "pace": {"name": self.pacer.name, "state": self._pace_state()},
            "seed": self.seed,
            "extra": checkpoint.plain(extra, "extra"),
            "untracked": self._not_held(),
        }

    def _steps_state(self) -> dict[str, Any] | None:
        steps = self._steps
        if steps is None:
            return dict(self._resume.saved) if self._resume is not None else None
        return {
            **steps.state_dict(),
            "dataset_length": steps.dataset_length,
            "loop": steps.place.loop,
            "data": steps.place.data,
            "epochs": steps.settings.epochs,
            "passes": self._passes_now(steps),
        }

    def _passes_now(self, steps: Steps) -> dict[str, Any]:
        self._passes.note(steps.place, steps.books.passes)
        return self._passes.state_dict()

    def _pace_state(self) -> dict[str, Any]:
        return self.pacer.state_dict() if self._steps is None else self._steps.pace_state()

    def load(self, path: str | Path, *, missing_ok: bool = False, loops: str | None = None) -> Any:
        """Go on from a checkpoint, at any fleet size; returns its ``extra``. Call it before the first step.

        All workers call it; the leader reads the file and hands it to the others. After a loop of this run, models and
        tracked objects are set back, and the next loop begins as usual.

        Args:
            path: a file, or a folder: the newest whole checkpoint that ``fleet.autosave`` left in it.
            missing_ok: nothing there means a new training: nothing is changed, and None comes back.
            loops: which of its loops over ``fleet.steps`` the script makes now: "all" (those that were over are passed
                over) or "rest" (it begins with the one where the checkpoint was saved, or with the next if that was
                over). It needs to be said only where the checkpoint does not tell.
        """
        over = self._steps if self._steps is not None and self._steps.begun else None
        if over is not None and not (over.finished or over.left):
            raise MisuseError("fleet.load in the middle of a loop: call it before the first step, or behind the loop")
        if loops not in (None, *LOOPS):
            raise ValueError(f'loops must be "all" or "rest", got {loops!r}')
        self._refuse_untracked(path)
        if self._outside:
            return self._load_outside(Path(path), loops)
        if over is not None:
            over.meet("fleet.load()")
        self._tracking.must_agree(self._transport, "fleet.load()")
        found = fetch(
            self._transport, Path(path), device=self.device, missing_ok=missing_ok, warn=self._warn_everywhere
        )
        if found is None:
            return None
        self._refuse_averages(found)
        self._loaded = str(path), None
        return self._take_over(*found, loops=loops)

    def _refuse_untracked(self, path: str | Path) -> None:
        """Whatever the checkpoint has for them, they would begin anew."""
        # Whether an average that is alive is of this training, its first update will tell.
        self._tracking.note_averages(living := Living())
        missing = self._tracking.missing(living, optimizers=True)
        if not missing:
            return
        said = f"fleet.load({str(path)!r}) does not give back the state of what is not tracked"
        advice = f"call fleet.track({', '.join(missing)}) before it, with your own objects"
        if self._steps is None or not self._steps.begun:
            raise MisuseError(f"{said}: {advice}")
        self._warn_everywhere(f"{said}, which stays as it is now: {advice}, if the training is to go on from there")

    def _refuse_averages(self, found: Found) -> None:
        """An average of the weights that the checkpoint should hold and does not: it would begin anew. Which of those
        alive are of this training shows in their updates alone, and there may be none after loading."""
        lacks = any(name.startswith("ema=") for name in found.content.get("untracked", ()))
        if lacks and (averages := self._tracking.averages()):
            raise _begun_anew(str(found.path), averages)

    def _not_held(self) -> list[str]:
        """What a checkpoint that is written now lacks, because it is not tracked; a warning says so, once."""
        over = self._steps is not None and self._steps.finished
        now = (tuple(self._tracking.things), min(2, len(self._passes.lengths)), over)
        if self._looked_for[0] == now:
            return self._looked_for[1]
        before, missing = self._looked_for[1], self._tracking.missing()
        self._looked_for = now, missing
        if missing and missing != before:
            self._warn_everywhere(
                "the checkpoint does not hold the state of what is not tracked, which a run that goes on from it would "
                f"begin anew: call fleet.track({', '.join(missing)}) with your own objects"
            )
        return missing

    def _load_outside(self, path: Path, loops: str | None) -> Any:
        """A worker that waits to enter gets a peer's state: of the file it needs what is the script's own, if that."""
        try:
            found = fetch(
                Alone(), path, device=self.device, missing_ok=True, warn=lambda text: logger.warning("%s", text)
            )
            return None if found is None else self._take_over(*found, loops=loops)
        except ValueError as error:
            logger.warning("%s: a peer's state comes instead", error)
            return None

    def _take_over(self, path: Path, content: dict[str, Any], *, loops: str | None) -> Any:
        if self._passing is not None and self._steps is not None:
            self._note("info", f"fleet.load({str(path)!r}): nothing is loaded, because its loop is passed over")
            return content["extra"]
        steps = self._steps
        fresh = steps is None or not (steps.begun or steps.finished)  # else it only goes back to what was
        resume = Resume(path, content, loops=loops) if fresh and content["steps"] is not None else None
        if resume is not None and steps is not None:
            resume.must_be_in(steps.place.loop, steps.dataset_length)
        self._take_seed(path, content["seed"])
        if resume is not None:
            resume.before = deepcopy({key: self._replica()[key] for key in ("tracked", "state")})
        self._restore(path, content, later=loops == "all" and resume is not None and resume.passing)
        if content["pace"]["name"] == self.pacer.name:
            self.pacer.load_state_dict(content["pace"]["state"])
        self._resume = resume
        if resume is not None and steps is not None:
            self._go_on(steps)
        if self._steps is not None and self._steps.begun:
            self._steps.models_were_set()
        self._witness.event("load", {"step": (content["steps"] or {}).get("step", 0), "path": str(path)})
        return content["extra"]

    def _restore(self, path: Path, content: Mapping[str, Any], *, later: bool = False) -> bool:
        """``later``: what does not fit yet may do so once the script is where the checkpoint was saved; False then."""
        try:
            checkpoint.must_match(path, content, self._tracking.things, self._models)
        except ValueError as misfit:
            if not later:
                raise ValueError(
                    f'{misfit}. (If the script changes its model between loops, say fleet.load(..., loops="all"))'
                ) from None
            self._note("info", f"{misfit}; it is looked at again where the checkpoint was saved")
            return False
        self._put_back(path, content, guard=True)
        return True

    def _put_back(self, path: Path, content: Mapping[str, Any], *, guard: bool = False) -> None:
        content = {**content, "tracked": deepcopy(content["tracked"])}  # some keep what they are given
        checkpoint.restore(path, content, self._tracking.things, self._models)
        self.state.load_state_dict(content.get("state", {}), guard=guard)

    def _take_seed(self, path: Path, seed: int) -> None:
        """The epoch's order and every sample's noise depend on the seed: a resumed run keeps it."""
        if seed == self.seed:
            return
        if self._steps is not None:
            raise ValueError(f"{path} was made with seed {seed}: join with that seed, or load before fleet.steps")
        self._note("info", f"the seed is now {seed}, as in the checkpoint: the epoch's order depends on it")
        self.seed = seed

    # -- on the way to where a checkpoint was saved -------------------------------------------------------------------

    def _settle_resume(self, resume: Resume, source: Source, epochs: int) -> None:
        """The first loop after loading: find out which of the script's loops it is."""
        guessed = resume.loops is None
        resume.settle(source.length, epochs)
        if self._steps is not None:
            return
        if resume.loops == "rest":
            self._passes.go_on_after(resume.passes, loop=resume.first)
            if source.length == resume.lengths[-1] and resume.same_data:
                self._passes.recognise(source.dataset, resume.data)
            if guessed:
                self._warn_everywhere(f"after {resume.path} the script goes on with its loop {resume.first + 1}")
        elif resume.replays:  # it begins again where it began
            checkpoint.restore_tracked(resume.path, resume.before["tracked"], self._tracking.things)
            self.state.replace(resume.before["state"])
            text = f"{resume.path} was saved in the script's loop {resume.loop + 1}"
            self._warn_everywhere(f"{text}: those before it are passed over, they give no steps")

    def _go_on(self, steps: Steps) -> None:
        """A loop was made after loading: pass it over, go on in it, or find that everything is behind."""
        resume, loop = self._resume, steps.place.loop
        if resume is None:
            return
        if resume.passes_over(loop):
            steps.pass_over(resume.saved["step"])
            return
        if loop == resume.loop:
            checkpoint.check_length(resume.path, resume.saved, steps.dataset_length)
            steps.load_state_dict(resume.saved)
            steps.gradients.statistics_were_set()
            if not steps.finished or resume.saved_in_the_loop:
                self._arrive(resume)
            return
        if resume.passing:
            resume.must_have_come_by_save()
        self._arrive(resume)

    def _come_by_save(self, resume: Resume, steps: Steps, path: Path) -> None:
        """``fleet.save`` while loops are passed over: everything is further on than the script, so nothing is written.
        In the very call that wrote the checkpoint, the script is where it was saved."""
        if steps.place.loop == resume.loop and resume.saved_here():
            self._arrive(resume)
        else:
            self._note("info", f"fleet.save({str(path)!r}): not written, because its loop is passed over")

    def _arrive(self, resume: Resume) -> None:
        """The script is where the checkpoint was saved: undo what it did to tracked things on its way."""
        self._resume = None
        if resume.passing:
            # What was tracked only after loading was meant to begin anew.
            known = {name: thing for name, thing in self._tracking.things.items() if name in resume.content["tracked"]}
            checkpoint.must_match(resume.path, resume.content, known, self._models)
            self._put_back(resume.path, resume.content)
            if self._steps is not None:
                self._steps.gradients.statistics_were_set()
        self._passes.load_state_dict(resume.passes)

    def _warn_everywhere(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self._witness.event("note", {"level": "warning", "text": text, "everywhere": True})

    def _note(self, level: str, text: str) -> None:
        self._witness.event("note", {"level": level, "text": text})


def _unreached(resume: Resume) -> MisuseError:
    return MisuseError(
        f"the script ended before it came to where {resume.path} was saved (loop {resume.loop + 1}), so nothing was "
        'trained: if it begins with a later loop by itself, load with fleet.load(..., loops="rest")'
    )


def _begun_anew(path: str, missing: Sequence[str]) -> MisuseError:
    return MisuseError(
        f"fleet.load({path!r}) did not give back the state of what is not tracked, and it began anew: call "
        f"fleet.track({', '.join(missing)}) with your own objects, before fleet.load; if they are meant to begin anew, "
        "make and track them after it"
    )


def _refuse_ddp(module: torch.nn.Module, inputs: Any) -> None:
    if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise MisuseError(
            "the fleet's model runs inside DistributedDataParallel, which would wait for gradients of its own: delete "
            "the wrapper, Paceline combines the gradients"
        )


def _slot() -> int:
    """Which of the emulated machines this worker plays."""
    text = os.environ.get("PACELINE_WORKER" if elastic.asked_for() else "RANK", "0")
    return int(text) if text.isdigit() else 0


def _pace_name(pace: str | Pacer) -> str:
    return pace if isinstance(pace, str) else pace.name
