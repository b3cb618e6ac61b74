"""What of the Trainer's own state a checkpoint keeps, and a worker that joins takes over: steps, logs, best metric,
callbacks with a memory (early stopping)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from paceline.adapters.transformers.trainer import PacelineTrainer

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


class CarriedState:
    """Tracked by the fleet under the name "trainer"."""

    def __init__(self, trainer: PacelineTrainer) -> None:
        self._trainer = trainer
        self._kept = False

    def state_dict(self) -> dict[str, str]:
        """As JSON, like the Trainer's own file."""
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in FIELDS}
        callbacks = [[type(callback).__name__, callback.state()] for callback in self._callbacks()]
        place = {"before": trainer.before, "in_epoch": trainer.epochs.in_epoch}
        loss = {"loss": float(trainer._tr_loss), "logged": trainer._globalstep_last_logged}
        return {"json": json.dumps({"state": state, "callbacks": callbacks, **place, **loss})}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Go on from there. The numbers of steps stay those of this script's own arguments."""
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
        """The next log is of the same steps as the others' is; this call's figures count from here."""
        trainer = self._trainer
        trainer._tr_loss.fill_(loss)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = -loss, logged
        trainer._initial_global_step = trainer.state.global_step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a checkpoint that is loaded leaves the Trainer's state alone."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
