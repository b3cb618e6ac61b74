"""`PacelineTrainer`: Transformers' Trainer, whose step is a step of the fleet.

`FleetCallback` is what happens around its steps, and `CarriedState` what is saved and handed over.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from paceline.adapters.transformers.arguments import PacelineArguments, check_dataset
from paceline.adapters.transformers.epochs import MORE, FleetEpochs, make_epochs
from paceline.adapters.transformers.evaluation import EvaluationBatches, flattened, losses, nested, predictions
from paceline.adapters.transformers.label_weights import LossCheck, count_of, label_tokens
from paceline.errors import FleetError, MisuseError
from paceline.fleet import Fleet, join
from paceline.step.step import Step
from paceline.training.join import as_if_alone

_COUNTING = ("set_initial_training_values", "get_batch_samples", "_get_num_items_in_batch", "_track_num_input_tokens")
HOOKS = (*_COUNTING, "create_scheduler", "evaluation_loop", "prediction_step", "_save_rng_state", "_load_best_model")
"""Methods of the Trainer that the adapter overrides or calls; without one it would train another way, unseen."""


def check_hooks(trainer: type) -> None:
    """Raise ImportError when this Trainer lacks what the adapter needs."""
    lacking = [name for name in HOOKS if not hasattr(trainer, name)]
    if lacking:
        raise ImportError(
            f"the Trainer of Transformers {version('transformers')} has no {lacking[0]}, which PacelineTrainer needs: "
            "install the newest Transformers 5"
        )


check_hooks(Trainer)


class PacelineTrainer(Trainer):
    """Transformers' Trainer on a fleet of unlike machines, with `PacelineArguments`.

    The loss of a step is the mean over all label tokens of its ``global_batch`` samples, however they were shared, and
    so is its gradient: the update is the one that a single process would make with the whole batch. Schedules and logs
    count steps of the fleet. Evaluations and predictions are dealt over the fleet, each sample once. Callbacks run on
    every worker, once per step; only the leader logs and writes.

    Args:
        model: the model; ``model_init`` is refused.
        args: `PacelineArguments`.
        *others: the Trainer's arguments.
        fleet: a fleet that the script has joined, and leaves itself. By default the trainer joins with the pace of its
            arguments, and leaves when training fails, in `end`, or when the process ends.
        **more: the Trainer's arguments by name.
    """

    def __init__(
        self,
        model: Any = None,
        args: PacelineArguments | None = None,
        *others: Any,
        fleet: Fleet | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(args, PacelineArguments):
            raise ValueError(
                f"PacelineTrainer needs args=PacelineArguments(..., global_batch=...), got {type(args).__name__}: "
                "others would make Accelerate set up a group of its own"
            )
        if model is None or more.get("model_init") is not None:
            raise ValueError("PacelineTrainer needs the model itself: write model=model_init() in place of model_init")
        dataset = others[1] if len(others) > 1 else more.get("train_dataset")
        if dataset is not None:
            check_dataset(dataset)
        self._owns = fleet is None
        self.fleet: Fleet = _joined(args) if fleet is None else _checked(fleet, args)
        object.__setattr__(args, "fleet", self.fleet)
        self.epochs: FleetEpochs
        self.before = 0
        """Steps of the fleet before this training's first."""
        self._tr_loss = torch.zeros((), device=args.device)
        self._globalstep_last_logged = 0
        self._trainings, self._left = 0, False
        self._epochs_before = 0
        """Epochs of earlier trainings, as in their arguments."""
        self._resume: Path | None = None
        try:
            with as_if_alone():
                super().__init__(model, args, *others, **more)
            self.fleet.model(self.model)
        except BaseException as error:
            self._leave(error)
            raise
        self._leave_at_exit()
        self._carried, self._loss_check = CarriedState(self), LossCheck(self)
        self._fleet_callback = FleetCallback(self)
        self.callback_handler.callbacks.insert(0, self._fleet_callback)

    # -- the fleet -------------------------------------------------------------------------------------------------

    def _leave(self, error: BaseException | None) -> None:
        if self._owns and not self._left:
            self._left = True
            atexit.unregister(self._at_exit)
            self.fleet.leave(error)

    def _leave_at_exit(self) -> None:
        """Register the leaving anew, to run before the exit functions that were registered since.

        A worker that came to lead has a log to be closed then.
        """
        if self._owns and not self._left:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        self._leave(getattr(sys, "last_value", None))

    def end(self) -> None:
        """Leave the fleet and finish the trackers, if the trainer joined it; else the script does."""
        if self._owns:
            self._leave(None)
            super().end()

    def is_world_process_zero(self) -> bool:
        """Return whether this worker leads the fleet."""
        return self.fleet.is_leader

    def is_local_process_zero(self) -> bool:
        """Return whether this worker leads the fleet: one worker of the whole fleet logs."""
        return self.fleet.is_leader

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; all workers call it.

        Args:
            resume_from_checkpoint: folder of a checkpoint, or True for the newest in ``output_dir``. Only the leader
                needs to reach it, and the number of workers may differ.
            trial: refused; there is no hyper-parameter search.
            ignore_keys_for_eval: as in the Trainer.
        """
        if trial is not None:
            raise ValueError("PacelineTrainer makes no hyper-parameter search: start one run for each trial")
        check_dataset(self.train_dataset)
        self._resume = self._checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            output = super().train(ignore_keys_for_eval=ignore_keys_for_eval)
            self.epochs.close()
            self._leave_at_exit()
        except BaseException as error:
            self._leave(error)
            raise
        return output

    def hyperparameter_search(self, *args: Any, **more: Any) -> Any:
        """Raise ValueError: a fleet trains one model."""
        raise ValueError("PacelineTrainer makes no hyper-parameter search: start one run for each trial")

    def get_train_dataloader(self) -> FleetEpochs:
        """Return the fleet's steps over the Trainer's own loader, whose dataset, order and collator are used."""
        loader = super().get_train_dataloader()
        sets = len(self.eval_dataset) if isinstance(self.eval_dataset, dict) else 1
        self.epochs = make_epochs(self.fleet, loader, self.args, before=self._epochs_before, evaluated=sets)
        self._epochs_before += self.epochs.epochs
        self.before = self.epochs.steps.index
        return self.epochs

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Return the Trainer's values, with room for more steps per epoch: the fleet decides where it ends."""
        epochs, each, *others = super().set_initial_training_values(args, dataloader)
        return max(epochs, self.epochs.epochs), each + MORE, *others

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples per step, over the whole fleet."""
        return int(self.args.global_batch)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the Trainer's scheduler, and track it, the optimiser and the Trainer's state."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._trainings += 1
        name = "scheduler" if self._trainings == 1 else f"scheduler_{self._trainings}"
        self.fleet.track(optimizer=self.optimizer, trainer=self._carried, **{name: scheduler})
        if self._resume is not None:
            self._load(self._resume)
        return scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the next step of the fleet; its tokens are counted micro-batch by micro-batch."""
        steps = [step for step in [next(epoch_iterator, None)] if step is not None]
        for step in steps:
            self.state.global_step = step.index - self.before if isinstance(step, Step) else 0
            self._fleet_callback.follow_leader(self.args, self.state, self.control)
        return steps, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run this worker's share of a step, and the round; return the fleet's loss.

        The fleet's mean gradient is then in ``p.grad``, to be clipped and applied by the Trainer as ever.
        """
        if not isinstance(inputs, Step):
            raise MisuseError(
                "PacelineTrainer was given batches of another loader than the fleet's: do not override "
                "get_train_dataloader; give a train_dataset and a data_collator, or override _get_train_sampler"
            )
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        for batch in inputs:
            self._micro_batch(model, inputs, self._prepare_inputs(batch))
        inputs.reduce()
        if not inputs.applied:
            model.zero_grad(set_to_none=True)  # optimisers skip parameters without a gradient
        return torch.tensor(inputs.loss, device=self.args.device)

    def _micro_batch(self, model: Any, step: Step, batch: Any) -> None:
        items = self._get_num_items_in_batch([batch], self.args.device)
        self._loss_check(model, batch)
        step.add(flops=self.floating_point_ops(batch), input_tokens=self._input_tokens(batch))
        loss = self.mean_loss(model, batch, items)
        step.backward(loss, weight=None if self.shows_count(loss, step.rows) else self.loss_weight(batch, items))

    def shows_count(self, loss: torch.Tensor, rows: int) -> bool:
        """Return whether the loss's graph shows its divisor, and the script does not override `loss_weight`."""
        return type(self).loss_weight is PacelineTrainer.loss_weight and count_of(loss, rows) is not None

    def mean_loss(self, model: Any, batch: Any, num_items: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, the mean over its own items."""
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.clamp(min=1)  # without a label the sum is 0, and so is the weight
        with self.compute_loss_context_manager():
            return self.compute_loss(model, batch, num_items_in_batch=num_items)  # type: ignore[no-any-return]

    def loss_weight(self, batch: Any, num_items: Any = None) -> Any:
        """Return the weight of a micro-batch's mean loss, used where its graph does not show what it was divided by.

        It is the number of label tokens that the Trainer counts, else those of ``batch["labels"]`` that are not -100;
        None, which means its samples, for labels that are no class numbers. Override it for a loss that is a mean over
        something else, and return how many there are of it.

        Args:
            batch: the micro-batch.
            num_items: label tokens that the Trainer counted, or None.
        """
        return (
            num_items
            if num_items is not None
            else label_tokens(batch, shifted=getattr(self, "_loss_shifts_labels", False))
        )

    def _input_tokens(self, batch: Any) -> int:
        """Return a micro-batch's tokens by the Trainer's own rule, without adding them to its count."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(batch)
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before
        return int(counted)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.state.num_input_tokens_seen += int(inputs.sums.get("input_tokens", 0))

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a batch; those of a step are the whole fleet's."""
        return int(inputs.sums.get("flops", 0) if isinstance(inputs, Step) else super().floating_point_ops(inputs))

    # -- evaluating ------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate with the Trainer's batches dealt over the fleet; all workers call it and get the result."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if len(self.accelerator._models) == 0:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.model.eval()
        batches = EvaluationBatches(dataloader)
        self.callback_handler.eval_dataloader = dataloader

        def predict(inputs: Any) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
            return self._predict(inputs, loss_only, ignore_keys)

        workers, parts = self.args.dataloader_num_workers, dict[str, Any]()
        all_losses: Any
        try:
            if loss_only:
                all_losses = losses(self.fleet, batches, workers, predict)
            else:
                all_losses, parts = predictions(self.fleet, batches, workers, predict)
        except FleetError as error:
            self._leave(error)
            raise
        logits, labels = nested("logits", parts), nested("labels", parts)
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and logits is not None and labels is not None:
            asked = self.args.include_for_metrics
            more = {"losses": all_losses if "loss" in asked else None, "inputs": nested("inputs", parts)}
            metrics = denumpify_detensorize(
                self.compute_metrics(EvalPrediction(predictions=logits, label_ids=labels, **more))
            )
        if all_losses is not None:
            metrics[f"{metric_key_prefix}_loss"] = float(sum(all_losses) / len(all_losses))
        named = {
            name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}": value
            for name, value in metrics.items()
        }
        samples = sum(map(len, batches.indices))
        self._leave_at_exit()
        return EvalLoopOutput(predictions=logits, label_ids=labels, metrics=named, num_samples=samples)

    def _predict(
        self, inputs: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        loss, logits, labels = self.prediction_step(self.model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        shown = None
        if "inputs" in self.args.include_for_metrics and not loss_only:
            shown = inputs[getattr(self.model, "main_input_name", "input_ids")]
        self.callback_handler.on_prediction_step(self.args, self.state, self.control)  # it changes the control itself
        return loss, {**flattened("logits", logits), **flattened("labels", labels), **flattened("inputs", shown)}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _checkpoint(self, asked: str | bool) -> Path:
        """Return the fleet's file of a checkpoint. Where a worker does not find it, the leader's counts."""
        if asked is not True:
            return Path(str(asked)) / CHECKPOINT
        folder = Path(self.args.output_dir)
        found = [file for file in folder.glob(f"checkpoint-*/{CHECKPOINT}") if file.parent.name[11:].isdigit()]
        return max(found, key=lambda file: int(file.parent.name[11:]), default=folder / CHECKPOINT)

    def _load(self, file: Path) -> None:
        try:
            self.fleet.load(file)
        except ValueError as error:
            raise ValueError(
                f"{error}; {CHECKPOINT} lies beside the Trainer's files in a checkpoint of PacelineTrainer, unless "
                "save_only_model left it out: of another take the weights, by from_pretrained, and train anew"
            ) from None

    def _load_best_model(self) -> None:
        """Load the best weights, which every worker gets from the leader's checkpoint."""
        self.epochs.close()
        with self._carried.kept():
            self.fleet.load(Path(self.state.best_model_checkpoint) / CHECKPOINT)


def _joined(args: PacelineArguments) -> Fleet:
    fleet = join(
        args.pace,
        device=args.device,
        seed=args.seed,
        nonfinite=args.nonfinite,
        comm_dtype=args.comm_dtype,
        name=args.run_name,
        quiet=args.quiet,
    )
    try:
        return _checked(fleet, args)
    except ValueError as error:
        fleet.leave(error)
        raise


def _checked(fleet: Fleet, args: PacelineArguments) -> Fleet:
    """Return the fleet; raise ValueError unless it combines gradients, on the device of the arguments."""
    if fleet.combine != "gradients":
        raise ValueError(
            f"PacelineTrainer combines gradients, and the fleet was joined with combine={fleet.combine!r}: its workers "
            "make unlike numbers of steps; write the loop over fleet.steps"
        )
    if torch.device(fleet.device) != torch.device(args.device):
        raise ValueError(
            f"the fleet computes on {fleet.device}, PacelineArguments on {args.device}: give use_cpu alike"
        )
    return fleet


CHECKPOINT = "paceline.pt"
"""File beside the Trainer's in a checkpoint, from which a fleet of any size resumes."""
FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class FleetCallback(TrainerCallback):
    """Callback that runs before all others: they see the fleet's step, epoch and leader."""

    def __init__(self, trainer: PacelineTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the step: the update is made."""
        self._trainer.epochs.commit()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the Trainer's counters to the fleet's; a worker that joined would have begun at 0."""
        epochs = self._trainer.epochs
        assert epochs.last is not None
        state.epoch = epochs.epoch
        if args.max_steps <= 0 and epochs.epochs == args.num_train_epochs:  # lost work may need one more step
            over = epochs.steps.finished
            state.max_steps = state.global_step if over else max(state.max_steps, state.global_step + 1)
        control.should_epoch_stop = control.should_epoch_stop or epochs.last.ends_epoch
        self.follow_leader(args, state, control)

    def follow_leader(self, args: Any, state: Any, control: Any) -> None:
        """Let only the current leader log; one that comes to lead in mid-training needs its progress bar."""
        leads = self._trainer.fleet.is_leader
        if leads and not state.is_world_process_zero:
            for bar in self._trainer.callback_handler.callbacks:
                if isinstance(bar, ProgressCallback) and bar.training_bar is None:
                    state.is_world_process_zero = True
                    bar.on_train_begin(args, state, control)
        state.is_world_process_zero = state.is_local_process_zero = leads

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the fleet's file to those that the leader has written, and agree on the best checkpoint."""
        fleet, folder = self._trainer.fleet, Path(args.output_dir)
        if not args.save_only_model:
            fleet.save(folder / f"checkpoint-{state.global_step}" / CHECKPOINT)
        if state.best_global_step:
            best = folder / f"checkpoint-{state.best_global_step}"
            if fleet.any(fleet.is_leader and best.is_dir()):
                state.best_model_checkpoint = str(best)


class CarriedState:
    """The Trainer's state that a checkpoint keeps, and that a worker takes over when it joins.

    That is steps, logs, best metric, and callbacks with a memory (early stopping). The fleet tracks it as "trainer".
    """

    def __init__(self, trainer: PacelineTrainer) -> None:
        self._trainer = trainer
        self._kept = False

    def state_dict(self) -> dict[str, str]:
        """Return JSON, like the Trainer's own file."""
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in FIELDS}
        callbacks = [[type(callback).__name__, callback.state()] for callback in self._callbacks()]
        progress = {"before": trainer.before, "in_epoch": trainer.epochs.in_epoch}
        loss = {"loss": float(trainer._tr_loss), "logged": trainer._globalstep_last_logged}
        return {"json": json.dumps({"state": state, "callbacks": callbacks, **progress, **loss})}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Resume from a saved state. The numbers of steps stay those of this script's own arguments."""
        if self._kept:
            return
        trainer, content = self._trainer, json.loads(saved["json"])
        jumps = content["state"]["global_step"] != trainer.state.global_step
        for name, value in content["state"].items():
            setattr(trainer.state, name, value)
        for callback, (kind, state) in zip(self._callbacks(), content["callbacks"]):
            if type(callback).__name__ == kind:
                for name, value in state["attributes"].items():
                    setattr(callback, name, value)
        trainer.before, trainer.epochs.in_epoch = content["before"], content["in_epoch"]
        if jumps:
            self._enter(content["loss"], content["logged"])

    def _enter(self, loss: float, logged: int) -> None:
        """Adopt the others' sums: the next log is of the same steps as theirs; this call's figures count from here."""
        trainer = self._trainer
        trainer._tr_loss.fill_(loss)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = -loss, logged
        trainer._initial_global_step = trainer.state.global_step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the Trainer's state unchanged while a checkpoint is loaded."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
