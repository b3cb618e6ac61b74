"""What happens around a Trainer's step because it is the fleet's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback

if TYPE_CHECKING:
    from paceline.adapters.transformers.trainer import PacelineTrainer

CHECKPOINT = "paceline.pt"
"""Beside the Trainer's files of a checkpoint: what a fleet of any size goes on from."""


class FleetCallback(TrainerCallback):
    """Called before all others: they see the fleet's step, epoch and leader."""

    def __init__(self, trainer: PacelineTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The update is made: the step is over."""
        self._trainer.epochs.commit()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has counted for itself; a worker that joined would have begun at 0."""
        epochs = self._trainer.epochs
        assert epochs.last is not None
        state.epoch = epochs.epoch
        if args.max_steps <= 0 and epochs.epochs == args.num_train_epochs:  # what lost workers had may need a step more
            over = epochs.steps.finished
            state.max_steps = state.global_step if over else max(state.max_steps, state.global_step + 1)
        control.should_epoch_stop = control.should_epoch_stop or epochs.last.ends_epoch
        self.follow_leader(args, state, control)

    def follow_leader(self, args: Any, state: Any, control: Any) -> None:
        """Only the leader of the moment speaks; one that comes to lead in mid-training needs its progress bar."""
        leads = self._trainer.fleet.is_leader
        if leads and not state.is_world_process_zero:
            for bar in self._trainer.callback_handler.callbacks:
                if isinstance(bar, ProgressCallback) and bar.training_bar is None:
                    state.is_world_process_zero = True
                    bar.on_train_begin(args, state, control)
        state.is_world_process_zero = state.is_local_process_zero = leads

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The leader has written the Trainer's files: add the fleet's, and agree on the best checkpoint."""
        fleet, folder = self._trainer.fleet, Path(args.output_dir)
        if not args.save_only_model:
            fleet.save(folder / f"checkpoint-{state.global_step}" / CHECKPOINT)
        if state.best_global_step:
            best = folder / f"checkpoint-{state.best_global_step}"
            if fleet.agree(fleet.is_leader and best.is_dir()):
                state.best_model_checkpoint = str(best)
