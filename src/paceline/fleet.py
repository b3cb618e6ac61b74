"""A worker's life in the fleet: join, bring the model, track what has state, take steps, leave.

The parts that do the work have their own files: loops are built in training/construct.py, evaluations run in
training/collective.py, checkpoints are saved in training/saving.py and resumed in training/loading.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from paceline.averaging.merge import MergeSettings
from paceline.checkpoint.autosave import Schedule
from paceline.errors import FleetError, MisuseError, NonFiniteGradients
from paceline.feed import Order
from paceline.gradients.scaling import give_back
from paceline.machines import Machine
from paceline.observe.exports import Trackers
from paceline.pace import MinimalPacer, Pacer
from paceline.records import History
from paceline.renamed import FormerNames, names_present_keywords
from paceline.step.steps import Steps
from paceline.step.tracking import Values
from paceline.training.collective import CollectiveCalls
from paceline.training.construct import LoopBuilder, StepsConstructor
from paceline.training.context import TrainingContext
from paceline.training.join import join_training
from paceline.training.loading import Loading
from paceline.training.replica import Model, Replica
from paceline.training.same_data import SameData
from paceline.training.saving import Saving
from paceline.training.untracked import UntrackedChecks
from paceline.worker_exit import end_with_one_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@names_present_keywords
def join(
    pace: str | MinimalPacer = "auto",
    *,
    combine: str | MergeSettings = "gradients",
    device: str | torch.device | None = None,
    seed: int = 0,
    nonfinite: str = "stop",
    comm_dtype: str = "float32",
    name: str | None = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
) -> Fleet:
    """Join the fleet that ``paceline run``, torchrun or another launcher started, or form a fleet of one.

    Args:
        pace: decides each worker's samples per step, and when a step ends: "auto" (adaptive, and joint while a deadline
            pays), "adaptive" (shares follow the measured speeds, every worker is waited for), "equal" (as DDP),
            "fixed:1,1,2" (ratios of work), "epoch" (new shares once per epoch), "joint" (shares and a deadline: no
            worker waits for one that stalls), "cutoff" (P3: the first complete shares count), or an object with
            settings: `paceline.Auto`, `Adaptive`, `Equal`, `Fixed`, `Epoch`, `Joint`, or `paceline.research.Cutoff`.
            PACELINE_PACE overrides it, and the run's log says so.
        combine: how the workers' results are merged: "gradients" (one mean gradient per step), "average" or
            "elastic-average" (parameters, now and then: for slow networks), or an object with settings:
            `paceline.Averaging` or `paceline.research.ElasticAverage`. PACELINE_COMBINE overrides it, and the run's log
            says so.
        device: device on which this worker computes; by default a GPU of its own where there is one, else the CPU.
        seed: seed of the shuffle and of all random numbers in the loop; the same on every worker.
        nonfinite: reaction to gradients that are NaN or infinite: "stop" raises an error that names the worker, "skip"
            skips the update.
        comm_dtype: number format in which rounds send sums over the network: "float32" (unchanged), "bf16" or "fp16"
            (half the bytes), or "int8" (a quarter, for combine="average" only). PACELINE_COMM_DTYPE overrides it, and
            the run's log says so.
        name: name of the run, for its folder and log.
        run_dir: the run's folder; by default ``runs/<time>-<name>``.
        quiet: if True, print no live view and no closing verdict.

    Returns:
        The fleet, to be used as a context manager.

    Raises:
        ValueError: a pace, combine, comm_dtype or device is unknown or does not fit the fleet.
        FleetError: the other workers do not come, or came with other settings.

    Example:
        ```python
        with paceline.join(paceline.Joint(least_gain=0.05), seed=7) as fleet:
            model = fleet.model(Net())
        ```
    """
    options: dict[str, Any] = {"name": name, "run_dir": run_dir, "quiet": quiet, "comm_dtype": comm_dtype}
    return Fleet(join_training(pace, combine, device=device, seed=seed, nonfinite=nonfinite, **options))


class Fleet(FormerNames):
    """A worker's handle of the fleet. Use it as a context manager: ``with paceline.join() as fleet:``."""

    _former_names = MappingProxyType(
        {"gather": "fleet.predict(fn, data)", "agree": "fleet.any(flag)", "size": "fleet.world_size"}
    )

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._left = context, False
        self._trackers = Trackers(leads=lambda: context.is_leader, log_event=context.recorder.event)
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
        """Device on which this worker computes; models and micro-batches are put there."""
        return self._context.device

    @property
    def pacer(self) -> Pacer:
        """Object that decides the shares: the one given to `paceline.join`, or the one of that name."""
        return self._context.pacer

    @property
    def combine(self) -> str | MergeSettings:
        """How the workers' results are merged: "gradients", or the settings of an average."""
        return self._context.combine

    @property
    def nonfinite(self) -> str:
        """Reaction to gradients that are NaN or infinite: "stop" or "skip"."""
        return self._context.nonfinite

    @property
    def machine(self) -> Machine | None:
        """Machine that this worker emulates under ``--emulate``; None when it emulates none."""
        return self._context.machine

    # -- who is here -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's position among those present, 0 to ``world_size - 1``; it may change in an elastic fleet."""
        return self._context.transport.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the fleet now; a worker of several processes counts once."""
        return self._context.transport.size

    @property
    def is_leader(self) -> bool:
        """Whether this worker plans, writes the log and saves: the one of the lowest rank.

        At any time exactly one worker leads; in an elastic fleet another may lead later.
        """
        return self._context.is_leader

    @property
    def run_id(self) -> str:
        """Name of the run and of its folder, the same on every worker."""
        return self._context.recorder.run_id

    @property
    def run_dir(self) -> Path:
        """Folder of the run. It holds the event log; you may put files of your own there."""
        return self._context.recorder.run_dir

    @property
    def history(self) -> History:
        """Records of the last thousand steps, equal on every worker but for ``wall_s`` and ``round_s``."""
        if self._context.steps is not None:
            self._context.steps.combine.complete()
        return self._context.history

    @property
    def seed(self) -> int:
        """Seed of the shuffle and of all random numbers in the loop; a loaded checkpoint sets its own."""
        return self._context.seed

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the fleet; the context manager calls it. A second call does nothing.

        Args:
            error: the exception that ends the script, if there is one; the other workers and the log receive it.
        """
        if self._left:
            return
        self._left = True
        if error is None:
            try:
                self._loops.check_end()
                if self._context.steps is not None:
                    self._context.steps.combine.complete()
            except (MisuseError, NonFiniteGradients) as error_at_the_end:
                self._close(error_at_the_end)
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
        context.recorder.flush()
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
        """Prepare a module for training and return it: on ``fleet.device``, with the leader's weights on every worker.

        After each round, buffers that forward changes are set to the leader's on every worker, as in DDP, and batch
        norm's statistics are merged by sample count. All workers call it.

        Args:
            module: your module; the same object is returned.
            overlap: if False, sums start only when backward is over. Needed for parameters that get their gradient in
                several parts (re-entrant checkpoints).
            shard: if True, divide the module over this worker's processes (``paceline run --procs-per-worker``).
            buffers: "shared" (as above), or "own": each worker keeps its own buffers, except batch norm's.

        Returns:
            The same module.

        Raises:
            ValueError: the module is wrapped in DDP or DataParallel, or does not fit this worker.
            MisuseError: called after ``fleet.steps``.
        """
        return self._replica.add_model(module, overlap=overlap, shard=shard, buffers=buffers)

    @property
    def mesh(self) -> DeviceMesh:
        """Device mesh of this worker's processes (``paceline run --procs-per-worker``), for your own `fully_shard`."""
        return self._context.mesh

    def track(self, **objects: Any) -> None:
        """Register objects with state (optimizer, scheduler, scaler, your own) under names.

        Their state is saved in checkpoints, loaded from them, and handed to workers that join. All workers call it with
        the same names; modules, optimisers and schedules get the leader's state, as a model does. Where workers come
        and go, call it before the first step: a worker that joins takes over what the others track. Plain values belong
        in `state`.

        Args:
            **objects: objects with ``state_dict`` and ``load_state_dict``, by name.

        Raises:
            MisuseError: called in a loop after its first step in an elastic fleet.
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
        """Plain values of your own that belong to the training: ``fleet.state.best = 0.0``.

        They are saved with every checkpoint, loaded with it, and handed to a worker that joins or returns. Set them
        before ``fleet.load``.
        """
        return self._context.tracking.state

    # -- steps -----------------------------------------------------------------------------------------------------

    @names_present_keywords
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
        fixed_micro_batch: bool | None = None,
        lr_scaling: str = "none",
    ) -> Steps:
        """Return the training's steps over a Dataset or DataLoader, for a ``for`` loop.

        Args:
            data: a Dataset, or a DataLoader, whose dataset, collate function and loader processes are used.
            global_batch: samples per step, over the whole fleet. With a DataLoader whose ``batch_sampler`` gives the
                batches, the number of its *batches* per step: each is one micro-batch and counts by its samples.
            micro_batch: samples that go through the model at once: one number, a list with one number per worker, or
                "auto": each worker finds its own by measuring, in its first steps. By default the DataLoader's batch
                size, else an equal share of global_batch.
            epochs: passes over the data; each sample counts once in each.
            shuffle: whether each epoch has a new order; by default as the DataLoader does, else True.
            drop_last: whether the epoch's last, smaller step is left out; by default as the DataLoader does, else
                False.
            order: function ``order(epoch)`` that returns the dataset indices to train on; each draw counts once.
            split: for an IterableDataset: True divides it, so that each sample goes to one worker and one loader
                process; False states that it divides itself, or that every worker is meant to draw all of it. By
                default a fleet of several workers warns.
            fixed_micro_batch: whether shares consist of full micro-batches, all of one size; by default True for
                compiled models, which would compile each size anew.
            lr_scaling: how the learning rate follows a step that counted more or fewer samples than global_batch, as
                steps with a deadline do: "none", "linear" or "gain" (docs/shares-and-deadlines.md).

        Returns:
            An iterable of the steps of all epochs.
        """
        loop = self._loops.build(
            data,
            global_batch=global_batch,
            micro_batch=micro_batch,
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            order=order,
            split=split,
            fixed_micro_batch=fixed_micro_batch,
            lr_scaling=lr_scaling,
        )
        return Steps(loop)

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

        The models are in evaluation mode and no gradients are kept. All workers call it.

        Args:
            score: function called as ``score(*batch)``. It returns a dict of tensors with one value per sample of the
                batch, or one such tensor, which is named "mean".
            data: a dataset with a length, or a DataLoader over one.
            batch_size: samples that go through the model at once; by default the DataLoader's batch size, else the
                training's micro-batch.
            sums: names of values that are sums over the batch: they are added up, and not divided. A single number per
                batch is refused unless it is named here, because it may be a mean or a sum.
            tables: names of tables, such as a confusion matrix: tensors of one shape, added element by element. For
                predictions use `predict`.

        Returns:
            The mean of each value over all samples of ``data`` by name, the sums and tables, and "count", the number of
            samples.

        Example:
            ```python
            accuracy = fleet.evaluate(lambda x, y: {"correct": model(x).argmax(1) == y}, test_set)["correct"]
            ```
        """
        return self._calls.evaluate(score, data, batch_size=batch_size, sums=sums, tables=tables)

    def predict(self, predict: Callable[..., Any], data: Any, *, batch_size: int | None = None, to: str = "all") -> Any:
        """Return predictions for all of ``data``, in the dataset's order, each sample once: for AUC, F1 or mAP.

        The models are in evaluation mode and no gradients are kept. All workers call it.

        Args:
            predict: function called as ``predict(*batch)``. It returns a tensor with one row per sample, or a tuple,
                list or dict of such tensors.
            data: a dataset with a length, or a DataLoader over one.
            batch_size: samples that go through the model at once; by default the DataLoader's batch size, else the
                training's micro-batch.
            to: "all" returns the result on every worker, "leader" on the leader alone and None on the others.

        Returns:
            What ``predict`` returns, with one row per sample of ``data``, on the CPU.
        """
        return self._calls.predict(predict, data, batch_size=batch_size, to=to)

    def any(self, flag: bool) -> bool:
        """Return True on every worker when any of them passes True: for stopping together. All workers call it.

        Args:
            flag: this worker's vote.
        """
        return self._calls.any(flag)

    def barrier(self) -> None:
        """Wait until all workers have called it: for a download or a file that one worker makes for all."""
        self._calls.barrier()

    def log(self, figures: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
        """Write figures to the run's log and to the writers of ``fleet.log_to``.

        Give figures that are the fleet's, such as ``step.loss`` and ``step.sums``: ``fleet.log(loss=step.loss)`` or
        ``fleet.log({"train/loss": step.loss})``. Any worker may call it; the current leader writes, and no worker
        waits.

        Args:
            figures: figures by name.
            step: index of the step; by default that of the step that the loop is in.
            **named: more figures by name.
        """
        if step is None:
            step = self._context.steps.current_index if self._context.steps is not None else 0
        self._trackers.log({**(figures or {}), **named}, step)

    def log_to(self, writer: Any = None, *, make: Callable[[], Any] | None = None) -> None:
        """Set where ``fleet.log`` writes, in addition to the run's log. Only the leader's writer is used.

        Args:
            writer: a TensorBoard SummaryWriter, a wandb run, the mlflow module, or a function of (figures, step); None
                on a worker without one.
            make: function that creates a writer. It is called when this worker first has something to write as the
                leader, and the writer is closed when the worker leaves the fleet. Use it where workers come and go, so
                that a later leader has a writer of its own.
        """
        self._trackers.add(writer, make)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, extra: Any = None) -> None:
        """Write a checkpoint: models, tracked objects, `state`, the position in the data, and the pace.

        All workers call it, the leader writes.

        Args:
            path: file to write, replaced if it exists; a folder where this worker divides its model.
            extra: plain values and tensors of your own, which ``fleet.load`` returns.

        Raises:
            OSError: the file cannot be written; on every worker, and the old file stays.
            ValueError: something has a state that is not plain values and tensors.
        """
        if not self._loading.passes_over_save(Path(path)):
            self._saving.save(Path(path), extra)

    def _save_on_leader(self, path: Path, *, extra: Any) -> None:
        """Write a checkpoint where this worker leads, between two steps; the others need not call it."""
        if not self._loading.passes_over_save(path):
            self._saving.save_on_leader(path, extra)

    def autosave(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        extra: Any = None,
    ) -> None:
        """Save into ``folder`` from now on, between steps and beside the training.

        All workers call it, the current leader writes. Disk errors only warn, and the training continues.
        ``fleet.load(folder)`` resumes.

        Args:
            folder: folder of the checkpoints; created when it does not exist.
            every_steps: save at every multiple of this number of steps.
            every_s: save this number of seconds after the last time. With both, whichever comes first.
            keep: number of checkpoints that are kept.
            extra: as in ``fleet.save``, or a function that returns it, called at the time of saving.
        """
        schedule = Schedule(every_steps=every_steps, every_s=every_s)
        self._saving.autosave(Path(folder), schedule=schedule, keep=keep, extra=extra)

    def load(self, path: str | Path, *, missing_ok: bool = False, loops: str | None = None) -> Any:
        """Resume from a checkpoint, at any fleet size. Call it before the first step.

        All workers call it; the leader reads the file and hands it to the others. After a loop of this run, models,
        tracked objects and `state` are set back, and the next loop begins as usual.

        Args:
            path: a file, or a folder, of which the newest complete checkpoint of ``fleet.autosave`` is loaded.
            missing_ok: if True and nothing is there, change nothing and return None: a new training begins.
            loops: which of its loops over ``fleet.steps`` the script makes now: "all" (those that were over are passed
                over) or "rest" (it begins with the loop in which the checkpoint was saved, or with the next if that was
                over). Needed only where the checkpoint leaves it open.

        Returns:
            The ``extra`` that was saved; None when nothing was there.

        Raises:
            ValueError: there is no checkpoint, it is damaged, or it does not fit the script.
        """
        return self._loading.load(path, missing_ok=missing_ok, loops=loops)
