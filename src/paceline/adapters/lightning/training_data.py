"""The replacement of the training's DataLoader: one step of the fleet is one batch of Lightning's.

It has a length, so Lightning fetches no batch ahead: a step must be committed before the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from paceline.errors import MisuseError
from paceline.feed.loader_settings import read_settings
from paceline.fleet import Fleet
from paceline.step.step import Step
from paceline.step.step_state import RoundPhase
from paceline.step.steps import StepLoop
from paceline.training.context import TrainingContext

if TYPE_CHECKING:
    from lightning.pytorch.loops import _FitLoop

ENDLESS = 1_000_000
"""Epochs of a training that only its callbacks end."""


class TrainingData:
    """The fleet's steps over the user's DataLoader, epoch by epoch. ``asked`` holds the arguments of `Fleet.steps`."""

    def __init__(
        self, fleet: Fleet, context: TrainingContext, trainer: Trainer, loader: Any, *, asked: Mapping[str, Any]
    ) -> None:
        self.loader, self._fleet, self._context, self._trainer = loader, fleet, context, trainer
        self._asked = asked
        self._steps: StepLoop | None = None
        self._iterator: Any = None
        self._loaded: Mapping[str, Any] | None = None
        self._length = steps_an_epoch(loader, asked["global_batch"])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps up to the epoch's end, or to where Lightning leaves it."""
        if self._iterator is None:
            self._steps = self._open()
            self._iterator = iter(self._steps)
        for step in self._iterator:
            yield step
            if not step.committed:
                raise MisuseError(
                    f"step {step.index} had no update: optimizer_step must call optimizer.step(closure=...) for every "
                    "batch, and on_train_batch_start must not return -1; for a larger batch use global_batch"
                )
            if step.ends_epoch:
                return
        self._trainer.should_stop = True  # the fleet is further than this worker, and has no more steps

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _open(self) -> StepLoop:
        fit: _FitLoop = self._trainer.fit_loop
        states = fit._combined_loader_states_to_load
        saved = self._loaded or (states[0] if states else None)
        epochs = self._epochs(fit)
        if saved is not None:
            self._check_saved(saved)
            self._context.seed = saved["seed"]
        elif fit.epoch_loop.batch_progress.current.ready and not fit.epoch_loop.batch_progress.is_last_batch:
            raise ValueError(
                "the checkpoint was written in the middle of an epoch, by a strategy other than PacelineStrategy: it "
                "does not say which samples are done; go on from one that was written at an epoch's end"
            )
        else:
            epochs = max(1, epochs - self._trainer.current_epoch)
        steps = self._fleet.steps(self.loader, epochs=epochs, **self._asked)._loop
        if saved is not None and not self._context.outside:
            self._continue(steps, saved)
        return steps

    def _epochs(self, fit: _FitLoop) -> int:
        """Return as many epochs as the Trainer's limits allow."""
        limits = [fit.max_epochs] if fit.max_epochs not in (None, -1) else []
        limits += [-(-fit.max_steps // self._length)] if fit.max_steps != -1 else []
        return max(1, min(limits, default=ENDLESS))

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        ours = {"global_batch": self._asked["global_batch"], "samples": _samples(self.loader)}
        for name, value in ours.items():
            if saved[name] != value:
                raise ValueError(f"the checkpoint was written with {name} {saved[name]}, and it is {value} now")

    def _continue(self, steps: StepLoop, saved: Mapping[str, Any]) -> None:
        steps.load_state_dict(saved["steps"])
        steps.gradients.statistics_were_set()
        if steps.training.epoch_step and not self._trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            steps.training.next_epoch()  # the epoch was left, by max_steps, and Lightning begins another
        if saved["pace"]["name"] == self._context.pacer.name:
            self._context.pacer.load_state_dict(saved["pace"]["state"])

    # -- in Lightning's checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return which samples are done, and the pace's state: enough to resume with any number of workers."""
        if self._steps is None:
            return dict(self._loaded or {})
        return {
            "steps": self._steps.state_dict(),
            "pace": {"name": self._context.pacer.name, "state": self._steps.pace_state()},
            "seed": self._context.seed,
            "global_batch": self._asked["global_batch"],
            "samples": _samples(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state or None

    # -- following the fleet -------------------------------------------------------------------------------------------

    def follow(self, step: Step) -> None:
        """Set the epoch's length in Lightning's loop after a commit.

        When workers were lost in an epoch's last steps it has one more than usual, and Lightning must neither stop
        before it nor wait for one that does not come. A step that the fleet made without this worker ends nothing: the
        next one brings the fleet's progress.
        """
        fit = self._trainer.fit_loop
        if self._trainer.fast_dev_run:
            return
        ready, void = fit.epoch_loop.batch_progress.current.ready, step._step_state.round_phase is RoundPhase.VOID
        ends = step.ends_epoch and not void
        batches = ready if ends else max(self._length, ready + 1)
        fit.epoch_loop.batch_progress.is_last_batch = ends
        fetcher: Any = fit._data_fetcher
        fetcher.length, fetcher.done = batches, ends
        if fit.max_batches != batches:
            fit.max_batches = batches
            if self._trainer.val_check_interval == 1.0 and isinstance(self._trainer.val_check_interval, float):
                self._trainer.val_check_batch = batches

    def close(self) -> None:
        """End the steps: Lightning takes no more."""
        if self._iterator is not None:
            self._iterator.close()


def _samples(loader: Any) -> int:
    settings = read_settings(loader)
    if settings.length is None:
        raise ValueError(
            f"{type(settings.dataset).__name__} is an IterableDataset, which does not say how many samples it has: "
            "PacelineStrategy needs a dataset with a length; for a stream write the loop with paceline.join()"
        )
    return settings.length


def steps_an_epoch(loader: Any, global_batch: int) -> int:
    """Return the steps per epoch as `Steps` counts them, before there are any: schedules are made from this number."""
    samples, settings = _samples(loader), read_settings(loader)
    drawn = settings.batches if settings.batches is not None else settings.sampler
    count = samples if drawn is None else len(drawn)
    return count // global_batch if settings.drop_last else -(-count // global_batch)
