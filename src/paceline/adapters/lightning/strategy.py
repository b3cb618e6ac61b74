"""The strategy: Lightning runs as if alone, and one of its batches is one step of the fleet.

``training_step`` runs the module's own on each of this worker's micro-batches and then the round, which leaves the
fleet's mean gradient in ``p.grad``. From there on everything is Lightning's: hooks, clipping, schedules, callbacks.
``optimizer_step`` commits.
"""

from __future__ import annotations

import copy
import csv
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import _Loop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.optim.swa_utils import AveragedModel

from paceline import concurrency
from paceline.adapters.lightning.checks import check_fit, check_trainer, several_optimizers
from paceline.adapters.lightning.logs import FleetResults, give_sums, meta_of, name_of, sums_of
from paceline.adapters.lightning.training_data import TrainingData
from paceline.adapters.lightning.validation import EvaluationData, FleetMetrics
from paceline.averaging.merge import MergeSettings
from paceline.checkpoint.content import plain
from paceline.errors import MisuseError
from paceline.fleet import Fleet
from paceline.pace import MinimalPacer
from paceline.renamed import names_present_keywords
from paceline.step.checks.user_code import refuse_closures
from paceline.step.step import Step
from paceline.training.join import hide_variables, join_training
from paceline.training.same_data import SameData
from paceline.transport import joins_roster

HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
"""Variables from which Lightning would conclude that it is to make a process group of its own."""
_JOINED: list[weakref.ref[PacelineStrategy]] = []
"""Strategies that this process has made: a worker is in one fleet at a time."""


def hide_launcher() -> None:
    """Hide from Lightning or Fabric that a launcher started several workers; call it once the fleet is joined.

    `PacelineStrategy` calls it itself. A script with `paceline.join` and Fabric calls it before it makes ``Fabric()``,
    which then has one process, as it should: the workers are the fleet's. A later `paceline.join` in the script still
    finds the other workers.
    """
    hide_variables(HIDDEN)


def _leave_earlier() -> None:
    """Close the earlier strategies of the script, so that a new one can join the same workers."""
    earlier = [one for made in _JOINED if (one := made()) is not None]
    if _JOINED and joins_roster():
        raise ValueError(
            "a second PacelineStrategy in one script, where workers come and go: one that comes later would begin with "
            "the script's first training, and take over the state of another; write a script for each training, the "
            "second of which begins with the first one's checkpoint"
        )
    for one in earlier:
        one.close()
    _JOINED.clear()


class PacelineStrategy(SingleDeviceStrategy):
    """Strategy that trains a LightningModule on a fleet of unlike workers, at the sum of their speeds.

    Module and DataLoader stay as they are; start the script with ``paceline run``, torchrun, or alone. The constructor
    joins the fleet. The strategy leaves it when the script ends, when `close` is called, or when another strategy is
    made: a script may pre-train with one Trainer and fine-tune with the next.

    Args:
        global_batch: samples per update, over the whole fleet (batches, with a DataLoader that has a
            ``batch_sampler``).
        micro_batch: samples that go through ``training_step`` at once; "auto" finds a size on each worker. By default
            the DataLoader's batch size.
        pace: decides each worker's samples per step, as in `paceline.join`.
        combine: "gradients"; averages of parameters need a loop of your own.
        device: device of this worker; by default a GPU of its own where there is one.
        seed: seed of the shuffle and of all random numbers in a micro-batch; the same on every worker.
        weight: function ``weight(batch)`` that returns the weight of a micro-batch's mean loss; by default what the
            loss was divided by, as in `Step.backward`.
        fixed_micro_batch: whether all micro-batches have one size; by default True for compiled modules.
        lr_scaling: how the learning rate follows a step that counted more or fewer samples, as in `Fleet.steps`.
        nonfinite: "stop" or "skip" the update when gradients are NaN or infinite.
        comm_dtype: number format in which gradients are sent over the network: "float32", "bf16" or "fp16".
        name: name of the run, for its folder and log.
        run_dir: the run's folder.
        quiet: if True, print no live view and no closing verdict.

    Example:
        ```python
        trainer = Trainer(strategy=PacelineStrategy(global_batch=256, micro_batch=16), max_epochs=8)
        trainer.fit(module, DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64))
        ```
    """

    strategy_name = "paceline"

    @names_present_keywords
    def __init__(
        self,
        global_batch: int,
        micro_batch: int | str | Sequence[int] | None = None,
        *,
        pace: str | MinimalPacer = "auto",
        combine: str | MergeSettings = "gradients",
        device: str | torch.device | None = None,
        seed: int = 0,
        weight: Callable[[Any], Any] | None = None,
        fixed_micro_batch: bool | None = None,
        lr_scaling: str = "none",
        nonfinite: str = "stop",
        comm_dtype: str = "float32",
        name: str | None = None,
        run_dir: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        merge = os.environ.get("PACELINE_COMBINE") or combine
        if merge != "gradients":
            raise ValueError(
                f"PacelineStrategy(combine={merge!r}): with averages of parameters the workers' weights differ between "
                'rounds, which callbacks and validation would see; use "gradients", or a loop with paceline.join()'
            )
        options: dict[str, Any] = {"name": name, "run_dir": run_dir, "quiet": quiet, "comm_dtype": comm_dtype}
        _leave_earlier()
        self._context = join_training(pace, merge, device=device, seed=seed, nonfinite=nonfinite, **options)
        self._told_of_none = False
        self.fleet = Fleet(self._context)
        """The fleet that this worker is in: its size, history, `Fleet.predict`."""
        self.same_data = SameData(self._context)
        hide_launcher()
        super().__init__(device=self.fleet.device)
        self._asked = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "fixed_micro_batch": fixed_micro_batch,
            "lr_scaling": lr_scaling,
        }
        self._weight = weight
        self._data: TrainingData | None = None
        self._step: Step | None = None
        self._fitted = self._closed = self._sets_up = False
        self._trainer: Trainer | None = None
        self.metrics = FleetMetrics(torch.nn.Module())
        self._note_rank()
        _JOINED.append(weakref.ref(self))
        concurrency.before_threads_end(self.close)

    def close(self) -> None:
        """Leave the fleet; the end of the script does so, too."""
        if not self._closed:
            self._closed = True
            self.fleet.leave()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the fleet and send the other workers the reason for which this one fails."""
        if not self._closed:
            self._closed = True
            self.fleet.leave(exception)

    # -- who is here -------------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and saves: the current leader does."""
        return self.fleet.is_leader

    def _note_rank(self) -> None:
        """Set the rank in Lightning's own variable, which loggers and messages read; the leader may change."""
        led = rank_zero_only.rank == 0
        self.global_rank = self.fleet.rank
        rank_zero_only.rank = 0 if self.fleet.is_leader else max(1, self.fleet.rank)
        if self._trainer is not None and self.fleet.is_leader and not led:
            continue_csv_files(self._trainer.loggers)

    def _everybody(self, label: str, value: Any) -> list[Any]:
        context = self._context
        if self._closed or context.outside:  # a worker that waits to enter decides for itself
            return [value]
        with context.meet(label):
            return context.transport.gather(label, value)

    def _unless_sanity_checking(self, label: str, value: float) -> list[float]:
        assert self._trainer is not None
        return [value] if self._trainer.sanity_checking else self._everybody(label, value)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait until all workers come here."""
        self._sets_up = str(name).endswith("dataloader()")
        if name == "run-stage":
            self._keep_sigterm()
        self._everybody(f"Lightning's barrier {name or ''}".strip(), None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the leader's value on every worker."""
        try:
            return self._everybody("Lightning's broadcast", obj)[0]
        except TypeError:
            raise MisuseError(
                f"strategy.broadcast of a {type(obj).__name__}: PacelineStrategy sends plain values alone"
            ) from None

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers decide True, or any of them if not ``all``."""
        answers = self._everybody("Lightning's decision", bool(decision))
        return answers.count(True) == len(answers) if all else True in answers

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return Lightning's own value when it sets up data: each worker's is already that of all. Refuse otherwise."""
        if self._sets_up:
            return tensor
        raise MisuseError(
            "strategy.reduce inside a PacelineStrategy: workers go through unequal numbers of batches; self.log(...) "
            "gives the fleet's mean or sum"
        )

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Raise MisuseError: workers process unequal numbers of batches."""
        raise MisuseError(
            "self.all_gather inside a PacelineStrategy: workers go through unequal numbers of batches; use self.log, a "
            "torchmetrics metric in validation_step, or strategy.fleet.predict(predict, dataset)"
        )

    def _keep_sigterm(self) -> None:
        """Keep Paceline's handler of SIGTERM: a worker of an elastic fleet leaves at the next step's boundary.

        Lightning's would end the training.
        """
        assert self._trainer is not None
        handlers: dict[Any, Any] = self._trainer._signal_connector._original_handlers
        main = concurrency.current_thread() is concurrency.main_thread()
        if self._context.elastic is not None and main and handlers.get(signal.SIGTERM):
            signal.signal(signal.SIGTERM, handlers[signal.SIGTERM])

    # -- set-up ------------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Check the Trainer and the module, and prepare Lightning's loops."""
        super().connect(model)
        self._trainer = trainer = model.trainer
        if self._closed:
            raise MisuseError(
                "this PacelineStrategy has left the fleet, in close() or because another was made: make each one "
                "where its Trainer begins, and use the Trainer before the next is made"
            )
        check_trainer(trainer, self.fleet.device)
        if trainer.state.fn == TrainerFn.FITTING:
            check_fit(trainer, model)
            if self._fitted:
                raise MisuseError(
                    "a second fit with one PacelineStrategy: train longer with max_epochs, or make another Trainer "
                    "with another PacelineStrategy, which takes the fleet over"
                )
        loops: list[Any] = [trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
        for loop in (*loops, trainer.validate_loop, trainer.test_loop):
            if not isinstance(loop._results, FleetResults):
                loop._results = FleetResults(loop._results.training)
            loop._results.everybody = self._unless_sanity_checking
            loop._results.dtype = torch.float64 if trainer.precision == "64-true" else torch.float32

    def model_to_device(self) -> None:
        """Move the module to the device, with the leader's weights on every worker."""
        model = self.lightning_module
        assert model is not None
        known = any(model is one for one in self._context.models)
        if not known and self._context.steps is None:
            self.fleet.model(model)
        super().model_to_device()
        self.metrics = FleetMetrics(model)
        self.metrics.guard(lambda: self.fleet.world_size > 1 or self._context.elastic is not None)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimiser; refuse several."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise ValueError(several_optimizers()) from None

    def setup(self, trainer: Trainer) -> None:
        """Track what has state, and keep Lightning from changing gradients and batches around the round."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._fitted = True
        refuse_closures(self.optimizers[0])
        schedules = {f"scheduler{n}": one.scheduler for n, one in enumerate(self.lr_scheduler_configs)}
        averages = [
            part
            for callback in trainer.callbacks
            for part in vars(callback).values()
            if isinstance(part, AveragedModel)
        ]
        progress = TrainerProgress(trainer)
        if self._context.elastic is not None:
            plain(progress.state_dict(), "the Trainer's state")  # better now than when a worker joins
        self.fleet.track(
            optimizer=self.optimizers[0],
            **schedules,
            **{f"average{n}": one for n, one in enumerate(averages)},
            lightning=progress,
        )
        module: Any = self.lightning_module
        transfer = module._on_before_batch_transfer
        # Lightning would zero the mean gradient after the round, and hand a complete step to hooks for batches.
        module.optimizer_zero_grad = lambda *args, **kwargs: None
        module._on_before_batch_transfer = lambda batch, *args, **kwargs: (
            batch if isinstance(batch, Step) else transfer(batch, *args, **kwargs)
        )

    def teardown(self) -> None:
        """Undo `setup`, and end the steps."""
        module: Any = self.lightning_module
        for name in ("optimizer_zero_grad", "_on_before_batch_transfer"):
            module.__dict__.pop(name, None)
        if self._data is not None:
            self._data.close()
        super().teardown()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace a DataLoader by the fleet's steps, or by a validation through the fleet."""
        trainer = self._trainer
        assert trainer is not None
        stage = trainer.state.stage
        if stage == RunningStage.PREDICTING:
            return dataloader
        if stage != RunningStage.TRAINING:
            return EvaluationData(self, self._context, trainer, dataloader)
        if self._data is not None and self._data.loader is not dataloader:
            raise ValueError(
                "several training DataLoaders beside PacelineStrategy: give one, over "
                "torch.utils.data.StackDataset or ConcatDataset (docs/data.md)"
            )
        compiled = getattr(self.lightning_module, "_compiler_ctx", None) is not None
        if compiled and self._asked["fixed_micro_batch"] is None:
            self._asked["fixed_micro_batch"] = True
        self._data = TrainingData(self.fleet, self._context, trainer, dataloader, asked=self._asked)
        return self._data

    # -- a step ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Update the rank."""
        self._note_rank()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; a step stays as it is."""
        return batch if isinstance(batch, Step) else super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, step: Step, *args: Any) -> torch.Tensor:
        """Run the module's own on each of this worker's micro-batches, and the round; return the fleet's loss."""
        assert self._trainer is not None
        self._step, self._sets_up = step, False
        results: Any = self._trainer.fit_loop.epoch_loop._results
        self.metrics.forget()
        try:
            for micro in step:
                self._micro_batch(step, micro, results, *args)
        finally:
            results.parts = results.rows = None
        step.reduce(whole=False)
        if not step.applied:
            self.lightning_module.zero_grad(set_to_none=True)
        results.batch, results.batch_size = None, None
        give_sums(results, step.sums)
        return torch.tensor(step.loss, device=self.root_device)

    def _micro_batch(self, step: Step, micro: Any, results: FleetResults, *args: Any) -> None:
        plugin, module = self.precision_plugin, self.lightning_module
        batch = module._on_before_batch_transfer(plugin.convert_input(micro))
        batch = super().batch_to_device(batch)
        results.parts, results.rows = {}, step.rows
        results.batch, results.batch_size = batch, None
        out = super().training_step(batch, *args)
        loss = out["loss"] if isinstance(out, dict) else out
        step.add(**dict(sums_of(results, results.parts)))
        if loss is None:
            self._warn_of_none(step)
            step.skip()
        else:
            step.backward(loss, weight=None if self._weight is None else self._weight(batch))

    def _warn_of_none(self, step: Step) -> None:
        """Log once, on each worker, that a loss of None leaves out a micro-batch, and not the step's batch."""
        if not self._told_of_none:
            self._told_of_none = True
            text = (
                f"training_step returned None in step {step.index}: the samples of that micro-batch are left out of "
                "the step, and the others make its update. In one process the whole batch is left out: where that is "
                "meant, leave samples out by what they are, such as (losses * mask).sum() / mask.sum().clamp(min=1)"
            )
            self._context.recorder.event("note", {"level": "warning", "text": text})

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call the hooks around backward, which has run already: they see the fleet's loss, and its mean gradient."""
        module = self.lightning_module
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        done: torch.Tensor = self.precision_plugin.post_backward(loss, module)
        return done

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the micro-batches and the round (``closure``), hooks and clipping, and the update."""
        loss = closure()
        self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
        assert self._step is not None
        assert self._data is not None
        self._step.commit(optimizer)
        self._data.follow(self._step)
        return loss


class TrainerProgress:
    """A Trainer's progress, tracked by the fleet: a worker that joins takes it over.

    A newcomer's Trainer requests its first batch where the others request their next: with their counters, their
    callbacks' states and what they have logged in this epoch it is at the same point.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, connector = self._trainer, self._trainer._logger_connector
        loops = {**trainer.fit_loop.state_dict(), "state_dict": {}}  # the fleet tracks the position in the data
        return {
            "loops": loops,
            "callbacks": copy.deepcopy(call._call_callbacks_state_dict(trainer)),
            "logged": _logged(trainer.fit_loop.epoch_loop._results),
            "first_batch": connector._first_loop_iter,
            "hook": connector._current_fx,
            "metrics": {name: float(value) for name, value in connector._callback_metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        _load(trainer.fit_loop, state["loops"])
        fetcher: Any = trainer.fit_loop._data_fetcher
        if fetcher is not None:
            fetcher.fetched = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for callback in trainer.callbacks:
            theirs = state["callbacks"].get(callback.state_key)
            if theirs is None:
                continue
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = theirs.get("dirpath", callback.dirpath)
            callback.load_state_dict(copy.deepcopy(theirs))
        _take(trainer.fit_loop.epoch_loop._results, state["logged"])
        connector._first_loop_iter, connector._current_fx = state["first_batch"], state["hook"]
        device = trainer.strategy.root_device
        metrics = {name: torch.tensor(value, device=device) for name, value in state["metrics"].items()}
        connector._callback_metrics.update(metrics)


def _load(loop: _Loop, state: Mapping[str, Any], prefix: str = "") -> None:
    """Load the counters alone: this is no restart from a checkpoint."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, part in vars(loop).items():
        if isinstance(part, _Loop):
            _load(part, state, f"{prefix}{name}.")


def _logged(results: Any) -> list[list[Any]]:
    """Return the figures of the epoch so far."""
    if not isinstance(results, FleetResults):
        return []
    return [
        [key, one.meta.fx, name_of(one.meta), float(one.value), float(getattr(one, "cumulated_batch_size", 0))]
        for key, one in results.items()
        if one.is_tensor and not one.has_reset
    ]


def _take(results: Any, logged: list[list[Any]]) -> None:
    if not isinstance(results, FleetResults):
        return
    for key, fx, name, value, weight in logged:
        meta = meta_of(name)
        assert meta is not None
        results.register(key, {"fx": fx, **meta})
        one = results[key]
        one.value = one.value.new_tensor(value)
        if one.meta.is_mean_reduction:
            one.cumulated_batch_size = one.cumulated_batch_size.new_tensor(int(weight))
        one.has_reset, one._computed = False, None


def continue_csv_files(loggers: Iterable[Any]) -> None:
    """Continue the CSV files that another worker began.

    Lightning's writer removes a file that it finds, and has only the columns that it wrote itself: here the file is
    kept, and its columns are those that it has by now.
    """
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        path, text = os.path.join(logger.log_dir, _ExperimentWriter.NAME_METRICS_FILE), ""
        if logger._fs.isfile(path):
            with logger._fs.open(path, "r", newline="") as file:
                text = file.read()
        writer = logger.experiment
        if not text:
            continue
        if not logger._fs.isfile(path):
            with logger._fs.open(path, "w", newline="") as file:
                file.write(text)
        writer.metrics_keys = next(csv.reader(text.splitlines()))
