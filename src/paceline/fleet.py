"""A worker's life in the fleet: join, bring the model, track what has state, take steps, leave.

The work is done by parts, each with a file of its own: loops are made (training/build.py), evaluated between
(training/collective.py), saved (training/saving.py) and gone on with (training/loading.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.autosave import Schedule
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.gradients.scaling import give_back
from paceline.errors import FleetError, MisuseError
from paceline.exit import end_with_one_line
from paceline.feed import Order
from paceline.loop.steps import Steps
from paceline.loop.values import Values
from paceline.machines import Machine
from paceline.observe.exports.trackers import Trackers
from paceline.pace import Pacer
from paceline.records import History
from paceline.training.build import LoopBuilder
from paceline.training.collective import CollectiveCalls
from paceline.training.construct import StepsConstructor
from paceline.training.context import TrainingContext
from paceline.training.join import join_training
from paceline.training.loading import Loading
from paceline.training.replica import Model, Replica
from paceline.training.same_data import SameData
from paceline.training.saving import Saving
from paceline.training.untracked import UntrackedChecks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join(
    pace: str | Pacer = "auto",
    *,
    combine: str | Averaging | ElasticAverage = "gradients",
    device: str | torch.device | None = None,
    seed: int = 0,
    nonfinite: str = "stop",
    wire: str = "float32",
    name: str | None = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
) -> Fleet:
    """Join the fleet that ``paceline run``, torchrun or another launcher started, or be one alone.

    Args:
        pace: who does how many samples, until when: "auto" (adaptive, and joint while a deadline pays), "adaptive"
            (shares follow the measured speeds, everybody is waited for), "equal" (as DDP), "fixed:1,1,2" (ratios of
            work), "epoch" (new shares once an epoch), "joint" (shares and a deadline: nobody waits for a worker that
            stalls), "cutoff" (P3: the first shares count), or an object with settings: `paceline.Auto`, `Adaptive`,
            `Equal`, `Fixed`, `Epoch`, `Joint` or `Cutoff`. PACELINE_PACE overrides it, and the run says so.
        combine: how the work merges: "gradients" (one mean gradient every step), "average" or "elastic-average"
            (parameters, now and then: for slow networks), or an object with settings: `paceline.Averaging` or
            `paceline.ElasticAverage`. PACELINE_COMBINE overrides it, and the run says so.
        device: where this worker computes; a GPU of its own where there is one, unless given.
        seed: of the shuffle and of everything random in the loop; the same on every worker.
        nonfinite: "stop" (an error that names the worker) or "skip" the update when gradients are NaN or infinite.
        wire: how what rounds sum crosses the network: "float32" (as it is), "bf16" or "fp16" (half the bytes), or
            "int8" (a quarter, for combine="average" alone). PACELINE_WIRE overrides it, and the run says so.
        name: of the run, for its folder and log.
        run_dir: the run's folder; ``runs/<time>-<name>`` unless given.
        quiet: no live view and no closing verdict.

    Raises:
        ValueError: for a pace, combine, wire or device that is unknown or does not fit the fleet.
        FleetError: when the others do not come, or came with other settings.

    Example:
        ```python
        with paceline.join(paceline.Joint(least_gain=0.05), seed=7) as fleet:
            model = fleet.model(Net())
        ```
    """
    told: dict[str, Any] = {"name": name, "run_dir": run_dir, "quiet": quiet}
    return Fleet(join_training(pace, combine, device=device, seed=seed, nonfinite=nonfinite, wire=wire, **told))


class Fleet:
    """This worker's hold on the fleet. Use it as a context manager: ``with paceline.join() as fleet:``."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._trackers = Trackers(leads=lambda: context.is_leader, observe=context.recorder.event)
        self._replica = Replica(context)
        untracked = UntrackedChecks(context)
        same_data = SameData(context)
        self._calls = CollectiveCalls(context, same_data)
        self._saving = Saving(context, self._replica, untracked)
        self._loading = Loading(context, self._replica, untracked)
        self._constructor = StepsConstructor(context, self._replica, untracked, self._saving, same_data)
        self._loops = LoopBuilder(context, self._replica, untracked, self._loading, self._constructor)

    # -- what was asked for ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this worker computes; models and micro-batches are put there."""
        return self._context.device

    @property
    def pacer(self) -> Pacer:
        """Decides the shares: the object given to `paceline.join`, or the one of that name."""
        return self._context.pacer

    @property
    def combine(self) -> str | Averaging | ElasticAverage:
        """How the work merges: "gradients", or the settings of an average."""
        return self._context.combine

    @property
    def nonfinite(self) -> str:
        """Either "stop" or "skip": what happens when gradients are NaN or infinite."""
        return self._context.nonfinite

    @property
    def machine(self) -> Machine | None:
        """The machine that this worker plays under ``--emulate``; None when it plays none."""
        return self._context.machine

    # -- who is here -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among those present, from 0 to ``size - 1``; in an elastic fleet it may change."""
        return self._context.transport.rank

    @property
    def size(self) -> int:
        """How many workers are in the fleet now."""
        return self._context.transport.size

    @property
    def is_leader(self) -> bool:
        """Whether this is the worker that plans, writes the log and saves: that of the lowest rank. Exactly one is, but
        in an elastic fleet not the same one for ever."""
        return self._context.is_leader

    @property
    def run_id(self) -> str:
        """The run's name, the same on every worker: that of its folder."""
        return self._context.recorder.run_id

    @property
    def run_dir(self) -> Path:
        """The run's folder: the event log is in it, and a place for files of your own."""
        return self._context.recorder.run_dir

    @property
    def history(self) -> History:
        """The records of the last thousand steps, the same on every worker but for ``wall_s`` and ``round_s``."""
        return self._context.history

    @property
    def seed(self) -> int:
        """Of the shuffle and of everything random in the loop; a checkpoint that is loaded brings its own."""
        return self._context.seed

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the fleet; the context manager does it for you."""
        if error is None:
            try:
                self._loops.check_end()
            except MisuseError as misuse:
                self._close(misuse)
                raise
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        context, steps, tracking = self._context, self._context.steps, self._context.tracking
        if steps is not None:
            steps.close(orderly=error is None)
        tracking.close()
        if tracking.scaler is not None:
            give_back(tracking.scaler)
        self._replica.close()
        self._constructor.close()
        try:
            context.transport.close(failure=error)
        except FleetError as lost:
            error = lost
            raise
        finally:
            context.at_the_end.close()
            if steps is not None:
                steps.combine.wait_for_threads()
            self._saving.close()
            self._trackers.close()
            context.recorder.close(error)
            if isinstance(error, FleetError):
                end_with_one_line(error)

    # -- what is trained -------------------------------------------------------------------------------------------

    def model(self, module: Model, *, overlap: bool = True, shard: bool = False, buffers: str = "shared") -> Model:
        """Your own module back: on ``fleet.device``, with the leader's weights on every worker.

        ``overlap=False`` starts the sums only when backward is over (for parameters that get their gradient in several
        parts: re-entrant checkpoints). ``shard=True`` divides it over this worker's processes (``run --group``).

        Buffers that forward changes are the leader's on every worker after each round, as in DDP; batch norm's
        statistics are merged by count. ``buffers="own"`` leaves each worker its own, but for batch norm's.
        """
        return self._replica.add_model(module, overlap=overlap, shard=shard, buffers=buffers)

    @property
    def mesh(self) -> DeviceMesh:
        """The processes of this worker (``paceline run --group``), for a `fully_shard` of your own."""
        return self._context.mesh

    def track(self, **objects: Any) -> None:
        """Name what has state (optimizer, scheduler, scaler, your own): it is saved, loaded and sent along.

        All workers call it: modules, optimisers and schedules get the leader's state, as a model does.
        Everybody tracks the same names, before the first step where workers come and go: one that joins takes over what
        the others track. Plain values have a place in `state`.
        """
        steps, tracking = self._context.steps, self._context.tracking
        if self._context.elastic is not None and steps is not None and steps.begun and not steps.left:
            raise MisuseError(
                "fleet.track after the first step: a worker that joins takes over what is tracked at its own first "
                "step; track everything before the loop"
            )
        tracking.add(objects)
        self._replica.share_tracked(objects)
        if steps is not None:
            steps.gradients.next_scaler = tracking.scaler

    @property
    def state(self) -> Values:
        """Plain values of your own that belong to the training: ``fleet.state.best = 0.0``. They are saved with every
        checkpoint, loaded with it, and handed to a worker that joins or returns. Set them before ``fleet.load``."""
        return self._context.tracking.state

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
            micro_batch: samples that go through the model at once: a number, one per worker, or "auto", with which each
                worker finds its own by measuring, in its first steps. Unless given, the DataLoader's batch size, else
                an equal share of global_batch.
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
        return self._loops.build(
            data,
            global_batch=global_batch,
            micro_batch=micro_batch,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            order=order,
            split=split,
            whole=whole,
            varying_count=varying_count,
        )

    # -- together --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        score: Callable[..., Any],
        data: Any,
        *,
        batch_size: int | None = None,
        sums: str | Sequence[str] = (),
        tables: str | Sequence[str] = (),
    ) -> dict[str, Any]:
        """Deal ``data`` over the fleet and return exact means over its samples, the same on every worker.

        ``score(*batch)`` returns a dict of tensors with one value per sample of the batch. The result has the mean
        of each over the whole of ``data``, and "count", the number of samples. A tensor without a name comes back as
        "mean". The models are in evaluation mode and no gradients are kept. All workers call it.

        Args:
            batch_size: samples that go through at once; else the DataLoader's, else the training's micro-batch.
            sums: names that are sums over the batch: added up, and not divided. One number for a batch is refused
                unless it is named here, for it may be a mean or a sum.
            tables: names that are tables, such as a confusion matrix: tensors of one shape, added element by element.
                Predictions are `gather`'s.

        Example:
            ```python
            accuracy = fleet.evaluate(lambda x, y: {"correct": model(x).argmax(1) == y}, test_set)["correct"]
            ```
        """
        return self._calls.evaluate(score, data, batch_size=batch_size, sums=sums, tables=tables)

    def gather(self, predict: Callable[..., Any], data: Any, *, batch_size: int | None = None, to: str = "all") -> Any:
        """Predictions of the whole of ``data``, in the dataset's order, each sample once: for AUC, F1 or mAP.

        ``predict(*batch)`` returns a tensor with one row a sample, or a tuple or dict of such. The result is the same
        with ``len(dataset)`` rows, on the CPU. The models are in evaluation mode and no gradients are kept. All
        workers call it.

        Args:
            batch_size: samples that go through at once; else the DataLoader's, else the training's micro-batch.
            to: "all" workers get the result, or the "leader" alone and the others None.
        """
        return self._calls.gather(predict, data, batch_size=batch_size, to=to)

    def agree(self, flag: bool) -> bool:
        """True on every worker when any of them says True: for stopping together. All workers call it."""
        return self._calls.agree(flag)

    def log(self, figures: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
        """Note figures: ``fleet.log(loss=step.loss)`` or ``fleet.log({"train/loss": step.loss})``.

        They go into the run's log and to whatever ``fleet.log_to`` named. Any worker may call it, the leader of the
        moment writes, and nobody waits: give figures that are the fleet's, such as ``step.loss`` and ``step.sums``.
        ``step``: the index of the step that the loop is in, unless given.
        """
        if step is None:
            step = self._context.steps.current_index if self._context.steps is not None else 0
        self._trackers.log({**(figures or {}), **named}, step)

    def log_to(self, writer: Any = None, *, make: Callable[[], Any] | None = None) -> None:
        """Where ``fleet.log`` writes: a TensorBoard SummaryWriter, a wandb run, the mlflow module, or a function of
        (figures, step). Only the leader's is used; a worker without one gives None.

        ``make``: a function that makes one, called when this worker first has something to write as the leader, and
        ended when it leaves the fleet: where workers come and go, who leads later has its own.
        """
        self._trackers.add(writer, make)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, extra: Any = None) -> None:
        """Write everything that is needed to go on: models, tracked objects, the data's position, the pace.

        All workers call it, the leader writes. ``extra`` is yours: plain values and tensors.
        """
        if not self._loading.passes_over_save(Path(path)):
            self._saving.save(Path(path), extra)

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
        schedule = Schedule(every_steps=every_steps, every_s=every_s)
        self._saving.autosave(Path(folder), schedule=schedule, keep=keep, extra=extra)

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
        return self._loading.load(path, missing_ok=missing_ok, loops=loops)
