"""A worker's life in the fleet: join, bring the model, track what has state, take steps, leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from paceline import checkpoint, devices, evaluating, machines, replicas, sealing
from paceline.autosave import Autosaver, Schedule
from paceline.combine import Gradients
from paceline.combine.averaging_settings import Averaging, ElasticAverage
from paceline.combine.scaling import give_back, take_over
from paceline.combine.second_order import needs_graph
from paceline.combine.varying import VaryingCount
from paceline.combining import check_combine, failures_from_env, make_combine
from paceline.dealing import make_dealing
from paceline.endings import end_with_one_line
from paceline.errors import FleetError, MisuseError
from paceline.feed import Source
from paceline.feed.overlap import overlapped
from paceline.local import LocalSteps
from paceline.loop import Steps
from paceline.members import Members
from paceline.memory import Guard
from paceline.pace import Pacer, may_set_deadlines
from paceline.pace import make as make_pacer
from paceline.pace.shares import proportional
from paceline.records import History
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
from paceline.transport import Alone, Fixed, Transport, elastic, launched
from paceline.witness import Witness

logger = logging.getLogger("paceline")


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
        pace: who does how many samples: "equal", "epoch", "adaptive", "fixed:1,1,2" or an object such as
            `paceline.Fixed`. PACELINE_PACE overrides it, and the run says so.
        combine: how the work merges: "gradients" (every step), "average" or "elastic-average" (parameters, now and
            then), or an object such as `paceline.Averaging`. PACELINE_COMBINE overrides it, and the run says so.
        device: where this worker computes; a GPU of its own where there is one, unless given.
        seed: of the shuffle and of everything random in the loop; the same on every worker.
        nonfinite: "stop" (an error that names the worker) or "skip" the update when gradients are NaN or infinite.
        name: of the run, for its folder and log.
        run_dir: the run's folder; ``runs/<time>-<name>`` unless given.
        quiet: no live view and no closing verdict.
    """
    return Fleet(pace, combine, device=device, seed=seed, nonfinite=nonfinite, name=name, run_dir=run_dir, quiet=quiet)


class Fleet:
    """This worker's hold on the fleet. Use it as a context manager: ``with paceline.join() as fleet:``."""

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
        self._tracked: dict[str, Any] = {}
        self._scaler: torch.amp.GradScaler | None = None
        self._hooks: list[Any] = []
        self._guards: list[Guard] = []
        self._history = History()
        self._overlap = True
        self._steps: Steps | None = None
        self._resume: dict[str, Any] | None = None
        self._autosaver: Autosaver | None = None
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
        from paceline.learning.background import Learner  # takes a while to import, and few runs need it

        return Learner.for_pacer(self.pacer)

    # -- who is here -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    @property
    def is_leader(self) -> bool:
        return self._transport.rank == 0 and not self._outside

    @property
    def run_id(self) -> str:
        return self._witness.run_id

    @property
    def run_dir(self) -> Path:
        return self._witness.run_dir

    @property
    def history(self) -> History:
        """The records of the steps so far."""
        return self._history

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the fleet; the context manager does it for you."""
        if self._steps is not None:
            self._steps.close(orderly=error is None)
        if self._scaler is not None:
            give_back(self._scaler)
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
            self._witness.close(error)
            if isinstance(error, FleetError):
                end_with_one_line(error)

    # -- what is trained -------------------------------------------------------------------------------------------

    def model(self, module: torch.nn.Module, *, overlap: bool = True) -> Any:
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
        if not is_compiled(module):
            self._hooks.append(module.register_forward_pre_hook(_refuse_ddp))
        self._overlap = self._overlap and overlap
        return module

    def track(self, **objects: Any) -> None:
        """Name what has state (optimizer, scheduler, scaler, your own): it is saved, loaded and sent along."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ValueError(f"fleet.track({name}=...): it has no state_dict and load_state_dict")
            if name in self._tracked and self._tracked[name] is not thing:
                raise ValueError(f"fleet.track({name}=...): that name is taken by another object")
        tracked = self._tracked | objects
        scalers = {id(thing): thing for thing in tracked.values() if isinstance(thing, torch.amp.GradScaler)}
        if len(scalers) > 1:
            raise ValueError("fleet.track knows more than one GradScaler: one loss scale serves the whole step")
        self._tracked = tracked
        for scaler in scalers.values():
            take_over(scaler)
            self._scaler = scaler
        if self._steps is not None:
            self._steps.gradients.next_scaler = self._scaler

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
        order: Callable[[int], Sequence[int]] | None = None,
        whole: bool | None = None,
        varying_count: str = "none",
    ) -> Steps:
        """The training's steps over a Dataset or DataLoader.

        Args:
            global_batch: samples a step, over the whole fleet.
            micro_batch: samples that go through the model at once: a number, one per worker, or "auto".
            shuffle, drop_last: as the DataLoader says, else True and False.
            order: ``order(epoch)`` gives the dataset indices to train on; each draw counts once.
            whole: shares are whole micro-batches, of one size; on by itself for compiled models, which would compile
                each size anew.
            varying_count: how the learning rate follows a step that counted more or fewer samples than global_batch,
                as steps with a deadline do: "none", "linear" or "gain" (docs/joint.md).
        """
        if not self._models:
            raise MisuseError("fleet.steps before fleet.model: bring the model first")
        if self._elastic is not None and isinstance(micro_batch, Sequence) and not isinstance(micro_batch, str):
            raise ValueError('micro_batch is a list, and workers come and go: give one number, or "auto"')
        source = Source(data, device=self.device, seed=self.seed, rank=self._identity)
        try:
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
            if self._steps is not None:
                self._steps.close()
            varying = VaryingCount(varying_count, settings.global_batch)
            self._steps = self._build_steps(source, settings, order, whole, varying)
        except BaseException:
            source.close()
            raise
        return self._steps

    def _build_steps(
        self,
        source: Source,
        settings: LoopSettings,
        order: Callable[[int], Sequence[int]] | None,
        whole: bool | None,
        varying: VaryingCount,
    ) -> Steps:
        agreed = {key: value for key, value in vars(settings).items() if key != "micro_batch"}
        facts = {"dataset length": source.length, **agreed, "order": order is not None, "varying_count": varying.rule}
        must_agree(self._transport, "fleet.steps()", facts)
        ahead = self._transport.gather("loading ahead", [source.ahead * settings.micro_batch, settings.micro_batch])
        sizes = [size for _, size in ahead]
        check_sync_batch_norm(self._models, pace=self.pacer.name, settings=settings, sizes=sizes, length=source.length)
        gradients = self._gradients(settings.auto)
        gradients.varying = varying
        try:
            steps = self._new_steps(source, settings, order, whole, gradients, ahead)
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
                "global_batch": settings.global_batch,
                "micro_batch": sizes,
                "epochs": settings.epochs,
                "steps": len(steps) if source.length is not None else None,
                "first_step": steps.rounds,
                "dealt": None if order is not None else steps.books.dealing.length,
            },
        )
        return steps

    def _new_steps(
        self,
        source: Source,
        settings: LoopSettings,
        order: Callable[[int], Sequence[int]] | None,
        whole: bool | None,
        gradients: Gradients,
        ahead: list[list[int]],
    ) -> Steps:
        compiled = any(is_compiled(model) for model in self._models)
        local: dict[str, Any] = {}
        if not isinstance(self.combine, str):
            local = {"combine": self.combine, "models": self._models, "failures": self._failures, "lengths": ()}
            local["first_round"] = self._steps.rounds if self._steps is not None else 0
            part = getattr(self.combine, "overlap", 0.0) if isinstance(self.combine, ElasticAverage) else 0.0
            if part:
                if order is not None or source.length is None:
                    raise ValueError("an overlap deals the dataset in an order of its own: leave order= out")
                mixed: Any = overlapped(source.length, workers=self.size, part=part, seed=self.seed)
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
                seed=self.seed,
                rank=self.rank,
                size=self.size,
                ahead=[more for more, _ in ahead],
                identity=self._identity,
            ),
            settings=settings,
            unit=max(size for _, size in ahead) if (compiled if whole is None else whole) else 1,
            avoid_singles=any(has_batch_norm(model) for model in self._models),
            seed=self.seed,
            device=self.device,
            machine=self.machine,
            nonfinite=self.nonfinite,
            history=self._history,
            first_index=self._steps.index if self._steps is not None else 0,
            observe=self._witness.event,
            repair=lambda: replicas.spread(self._transport, self._models),
            tracked=lambda: {id(thing) for thing in self._tracked.values()},
            snapshot=self._replica,
            restore=lambda state: checkpoint.restore(Path("a peer's state"), state, self._tracked, self._models),
        )
        self._learn(steps)
        steps.dataset_length, steps.at_boundary = source.length, self._at_boundary
        return steps

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
            agreed={**agreed, **own},
            witness=self._witness,
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
        gradients = Gradients(transport, self._models, overlap=self._overlap and not auto)
        gradients.next_scaler = self._scaler
        optimizers = [thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer)]
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

    def evaluate(self, score: Callable[..., Any], data: Any, *, batch_size: int | None = None) -> dict[str, Any]:
        """Deal ``data`` over the fleet and return exact sums over the whole of it, the same on every worker.

        ``score(*batch)`` returns a dict of sums over the batch; the result has those names and "count". The models
        are in evaluation mode and no gradients are kept. All workers call it.
        """
        with self._meeting("fleet.evaluate()"):
            return self._evaluate(score, data, batch_size)

    def _meeting(self, label: str) -> AbstractContextManager[Any]:
        """All workers at one point of the training, with the parameters that are to be shown."""
        return self._steps.meet(label) if self._steps is not None else nullcontext()

    def _evaluate(self, score: Callable[..., Any], data: Any, batch_size: int | None) -> dict[str, Any]:
        source = Source(data, device=self.device, seed=self.seed)
        try:
            if source.length is None:
                raise ValueError("fleet.evaluate needs a dataset with a length, so that every sample counts once")
            must_agree(self._transport, "fleet.evaluate()", {"dataset length": source.length})
            own = self._steps.settings.micro_batch if self._steps else 64
            size = whole_number("batch_size", (source.batch_size or own) if batch_size is None else batch_size)
            tracked = [thing for thing in self._tracked.values() if isinstance(thing, torch.nn.Module)]

            def mine() -> dict[str, Any]:
                """This worker's part among those who are there; once more when some are lost meanwhile."""
                speeds = (0, 1) if self._outside else self._speeds()
                shares = proportional(np.asarray(speeds, dtype=float), source.length or 0).tolist()
                with evaluating.evaluation_mode([*self._models, *tracked]):
                    return evaluating.own_sums(score, source, shares=shares, rank=self.rank, batch_size=size)

            sums = self._transport.gather("the sums of fleet.evaluate()", mine)
        finally:
            source.close()
        result = evaluating.total(sums[:1] if self._outside else sums)
        self._witness.event("evaluate", {"step": self._steps.index if self._steps else 0, "result": result})
        return result

    def _speeds(self) -> tuple[int, ...]:
        """In proportion to which work is dealt outside the steps: the last full shares, or equal parts."""
        shares = self._steps.full_shares if self._steps is not None else ()
        return shares if any(shares) else (1,) * self.size

    def agree(self, flag: bool) -> bool:
        """True on every worker when any of them says True: for stopping together. All workers call it."""
        with self._meeting("fleet.agree()"):
            return any(self._transport.gather("fleet.agree()", bool(flag)))

    def save(self, path: str | Path, *, extra: Any = None) -> None:
        """Write everything that is needed to go on: models, tracked objects, the data's position, the pace.

        All workers call it, the leader writes. ``extra`` is yours: plain values and tensors.
        """
        path = Path(path)
        with self._meeting("fleet.save()"):
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
            sealing.write(path, self._content(extra))
        except OSError as error:
            return ["OSError", f"cannot write {path}: {error.strerror or error}"]
        except ValueError as error:
            return ["ValueError", f"fleet.save: {error}"]
        self._witness.event("save", {"step": self._steps.index if self._steps else 0, "path": str(path)})
        return None

    def _replica(self) -> dict[str, Any]:
        """What makes this worker's replica: its models and everything tracked."""
        return {
            "models": [checkpoint.plain(model.state_dict(), "the model's state") for model in self._models],
            "tracked": {
                name: checkpoint.plain(t.state_dict(), f"the state of {name}") for name, t in self._tracked.items()
            },
        }

    def _content(self, extra: Any) -> dict[str, Any]:
        return {
            **self._replica(),
            "steps": self._steps_state(),
            "pace": {"name": self.pacer.name, "state": self._pace_state()},
            "seed": self.seed,
            "extra": checkpoint.plain(extra, "extra"),
        }

    def _steps_state(self) -> dict[str, Any] | None:
        if self._steps is None:
            return self._resume
        return {**self._steps.state_dict(), "dataset_length": self._steps.dataset_length}

    def _pace_state(self) -> dict[str, Any]:
        return self.pacer.state_dict() if self._steps is None else self._steps.pace_state()

    def load(self, path: str | Path, *, missing_ok: bool = False) -> Any:
        """Go on from a checkpoint, at any fleet size; returns its ``extra``. Call it before the first step.

        A folder stands for the newest whole checkpoint that ``fleet.autosave`` left in it. With ``missing_ok`` nothing
        there means a new training: nothing is changed, and None comes back. All workers call it; the leader reads the
        file and hands it to the others.
        """
        if self._steps is not None and self._steps.begun and not self._steps.finished:
            raise MisuseError("fleet.load in the middle of a training: call it before the first step")
        if self._outside:
            return self._load_outside(Path(path))
        found = checkpoint.fetch(
            self._transport, Path(path), device=self.device, missing_ok=missing_ok, warn=self._warn_everywhere
        )
        return None if found is None else self._take_over(*found)

    def _load_outside(self, path: Path) -> Any:
        """A worker that waits to enter gets a peer's state: of the file it needs what is the script's own, if that."""
        try:
            found = checkpoint.fetch(
                Alone(), path, device=self.device, missing_ok=True, warn=lambda text: logger.warning("%s", text)
            )
            return None if found is None else self._take_over(*found)
        except ValueError as error:
            logger.warning("%s: a peer's state comes instead", error)
            return None

    def _take_over(self, path: Path, content: dict[str, Any]) -> Any:
        checkpoint.must_match(path, content, self._tracked, self._models)
        checkpoint.check_length(path, content["steps"], self._steps.dataset_length if self._steps else None)
        self._take_seed(path, content["seed"])
        checkpoint.restore(path, content, self._tracked, self._models)
        if content["pace"]["name"] == self.pacer.name:
            self.pacer.load_state_dict(content["pace"]["state"])
        self._resume = content["steps"]
        if self._steps is not None and not self._steps.begun:
            self._go_on(self._steps)
        self._witness.event("load", {"step": (content["steps"] or {}).get("step", 0), "path": str(path)})
        return content["extra"]

    def _take_seed(self, path: Path, seed: int) -> None:
        """The epoch's order and every sample's noise depend on the seed: a resumed run keeps it."""
        if seed == self.seed:
            return
        if self._steps is not None:
            raise ValueError(f"{path} was made with seed {seed}: join with that seed, or load before fleet.steps")
        self._note("info", f"the seed is now {seed}, as in the checkpoint: the epoch's order depends on it")
        self.seed = seed

    def _go_on(self, steps: Steps) -> None:
        if self._resume is not None:
            checkpoint.check_length("the checkpoint", self._resume, steps.dataset_length)
            steps.load_state_dict(self._resume)
            steps.gradients.statistics_were_set()
            self._resume = None

    def _warn_everywhere(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self._witness.event("note", {"level": "warning", "text": text, "everywhere": True})

    def _note(self, level: str, text: str) -> None:
        self._witness.event("note", {"level": level, "text": text})


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
