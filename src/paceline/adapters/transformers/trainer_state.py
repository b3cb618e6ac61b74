"""The Trainer's own state in a fleet: what happens around its steps, and what is saved and handed over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from paceline.adapters.transformers.trainer import PacelineTrainer

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
