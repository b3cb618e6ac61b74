"""The update of a step of the fleet, made by the calls that a script makes at its last micro-batch.

Clipping runs the round and then clips the fleet's mean gradient; the optimizer's step runs it otherwise, and commits.
At every other micro-batch these calls do nothing, as Accelerate's own while gradients accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from types import MethodType
from typing import Any, NoReturn

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState

from paceline.adapters.accelerate.refusals import NotCopied, in_words_of_accelerate
from paceline.errors import MisuseError
from paceline.feed import TorchGenerators
from paceline.step.checks.schedules import ends_at, horizons, steps_made
from paceline.step.step import Step


class StepUpdates:
    """The step that the script is in, and how far its update is. ``optimizers`` returns those that were prepared."""

    def __init__(self, optimizers: Callable[[], Sequence[FleetOptimizer]]) -> None:
        self._optimizers = optimizers
        self._gradient_state = GradientState()
        self._loop: Generator[Step, None, None] | None = None
        """The steps of the training loop under way."""
        self.step: Step | None = None
        """The step of the loop that is under way; None outside of a training loop."""
        self.last: Step | None = None
        """The step that was committed last."""
        self._combined = False
        self._stepped: list[FleetOptimizer] = []
        self._uncleared: list[FleetOptimizer] = []
        """Optimizers that have not applied the last gradient, and that the script has not cleared it for."""
        self._begun = False
        """Whether this step has had a backward."""
        self._kept: TorchGenerators | None = None
        """The random numbers before a batch that does not count; None in a micro-batch."""
        self._used = False

    # -- the loader's side ---------------------------------------------------------------------------------------------

    def check_left(self) -> None:
        """Leave a loop that is between two updates; raise MisuseError in the middle of one."""
        if self.open:
            raise MisuseError("a second training loop inside of one: one update has one loader's samples")
        self.forget_loop()

    def enter(self, steps: Iterator[Step]) -> None:
        """Begin a loop over these steps."""
        assert isinstance(steps, Generator)
        self._loop = steps

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self.step, self._combined, self._stepped, self._kept, self._begun = step, False, [], None, False

    def give(self, *, counts: bool, device: torch.device) -> None:
        """Note that the script gets a micro-batch, or a batch that does not ``count``."""
        assert self.step is not None
        self._kept, self._used = None if counts else TorchGenerators(device), False
        self.show(self.step.ends_share or not counts)

    def show(self, sync: bool) -> None:
        """Set whether this micro-batch is the step's last, where Accelerate's own code reads it."""
        self._gradient_state._set_sync_gradients(sync)

    def end(self, steps: Iterator[Step]) -> None:
        """End the step when the script asks for more; raise MisuseError where it has made no update."""
        if steps is not self._loop:
            raise MisuseError(
                "this training loop was left: another training loop has begun since, or free_memory() was called"
            )
        step = self.step
        if step is None or step.committed:
            return
        if self._stepped:
            self._commit()
            return
        raise MisuseError(
            f"the loop came to the end of step {step.index} without optimizer.step() of a prepared optimizer: call it "
            "for every batch, it acts at the last one of an update; accumulate with gradient_accumulation_steps=, "
            "never by counting batches. A loop that only evaluates needs model.eval() or torch.no_grad() before it"
        )

    def leave(self, steps: Iterator[Step]) -> None:
        """Leave the loop over these steps if it is under way; an update that some optimizers have made is over."""
        if steps is not self._loop:
            return
        if self.step is not None and not self.step.committed and self._stepped:
            self._commit()
        self.forget_loop()

    def forget(self) -> None:
        """Leave a loop that is under way, as it is, and forget the optimizers."""
        self.forget_loop()
        self._uncleared = []

    def forget_loop(self) -> None:
        """Leave a loop that is under way, as it is."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        self.step, self._kept = None, None
        self.show(True)

    # -- the script's side ---------------------------------------------------------------------------------------------

    @property
    def sync(self) -> bool:
        """Whether the script's micro-batch is the last one of its step."""
        return bool(self._gradient_state.sync_gradients)

    @property
    def counts(self) -> bool:
        """Whether the script's batch counts: a worker without a share has one that does not."""
        return self._kept is None

    @property
    def open(self) -> bool:
        """Whether the script is in a step whose update is not made."""
        return self.step is not None and not self.step.committed

    def check_everybody_comes(self, call: str) -> None:
        """Raise MisuseError for a call in a micro-batch that other workers may not have."""
        if self.open and not self.sync:
            raise MisuseError(
                f"{call} in the middle of an update: workers have unequal numbers of micro-batches, so "
                "they would not meet; write it under `if accelerator.sync_gradients:`, or after the loop. For the "
                "fleet's mean loss of an update write accelerator.last_step.loss behind optimizer.step(), which needs "
                "no gather. A loop that only evaluates needs eval() of every prepared model before it"
            )

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradient of a micro-batch's loss; a batch that does not count adds none."""
        retain = bool(options.pop("retain_graph", False))
        if options:
            raise ValueError(f"accelerator.backward(loss, {min(options)}=...) does not go with a fleet: leave it out")
        if self.step is None:
            raise MisuseError(
                "accelerator.backward outside of a training loop: iterate a loader that accelerator.prepare returned, "
                "with a prepared optimizer, the model in training mode (model.train()) and gradients enabled"
            )
        self._check_cleared()
        if self._kept is not None:
            if self._used:
                raise MisuseError("accelerator.backward twice for one batch: add the losses up, and call it once")
            self._used = True
            self._kept.restore()
            return
        with in_words_of_accelerate():
            self.step.backward(loss, retain_graph=retain)
        self.show(self.step.ends_share)

    def _check_cleared(self) -> None:
        """Raise MisuseError for a gradient that was to last beyond the update before."""
        if self._uncleared and not self._begun:
            known = self._optimizers()
            number = next((n for n, one in enumerate(known, 1) if one is self._uncleared[0]), 0)
            raise MisuseError(
                f"optimizer {number} ({type(self._uncleared[0].optimizer).__name__}) has made no update in the last "
                "step, and its gradient was not cleared: an update clears all gradients, so this one would be lost. "
                "Call its step() in every update, or its zero_grad() where its gradient is not wanted; a gradient of "
                "several updates needs gradient_accumulation_steps=, for all optimizers"
            )
        self._begun, self._uncleared = True, list(self._optimizers())

    def cleared(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that the script has cleared the gradients of these parameters."""
        cleared = {id(parameter) for parameter in parameters}
        self._uncleared = [one for one in self._uncleared if not cleared.issuperset(map(id, one.parameters()))]

    def combine(self) -> bool:
        """Run the round, unless it has run; return whether there is a gradient to apply."""
        assert self.step is not None
        if not self._combined:
            self._combined = True
            with in_words_of_accelerate():
                self.step.reduce()
        return self.step.applied

    def clip(self, clip: Callable[[], Any]) -> Any:
        """Run the round and clip the mean gradient, at the last micro-batch of a step; return None at others."""
        if not self.open:
            return clip()
        return clip() if self.sync and self.combine() else None

    def update(self, optimizer: FleetOptimizer) -> None:
        """Make this optimizer's update, at the last micro-batch of a step."""
        step, several = self.step, len(self._optimizers()) > 1
        if step is None:
            raise MisuseError(
                "optimizer.step() outside of a training loop: iterate a loader that accelerator.prepare returned"
            )
        if not self.sync:
            return
        if optimizer in self._stepped or step.committed:
            raise MisuseError(f"optimizer.step() twice in step {step.index}: an update is made once")
        self._uncleared = [one for one in self._uncleared if one is not optimizer]
        if not several:
            self._commit(optimizer.optimizer)
        elif self.combine():
            optimizer.optimizer.step()
        self._stepped.append(optimizer)
        optimizer._is_overflow = not step.applied
        if several and len(self._stepped) == len(self._optimizers()):
            self._commit()

    def _commit(self, *optimizers: torch.optim.Optimizer) -> None:
        assert self.step is not None
        applied = {id(parameter) for one in self._stepped for parameter in one.parameters()}
        self._uncleared = [one for one in self._uncleared if one.has_gradient(but=applied)]
        with in_words_of_accelerate():
            self.step.commit(*optimizers)
        self.last = self.step


class FleetOptimizer(NotCopied, AcceleratedOptimizer):
    """A prepared optimizer: its step is the fleet's, at the last micro-batch of an update."""

    instead = "use optimizer.state_dict(), or optimizer.optimizer, for a prepared optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, updates: StepUpdates) -> None:
        super().__init__(optimizer)
        self._updates = updates

    def step(self, closure: Any = None) -> None:
        """Run the round and update, at the last micro-batch; nothing before."""
        if closure is not None:
            raise ValueError("optimizer.step(closure) asks for a batch's loss again, and a step's batch comes once")
        self._updates.update(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing in a training loop: an update clears the gradients."""
        self._updates.cleared(self.parameters())
        if self._updates.step is None:
            self.optimizer.zero_grad()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all groups."""
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def has_gradient(self, *, but: Set[int]) -> bool:
        """Return whether a parameter has a gradient, besides those with these ``id``."""
        return any(parameter.grad is not None and id(parameter) not in but for parameter in self.parameters())


class FleetScheduler(NotCopied, AcceleratedScheduler):
    """A prepared scheduler: it advances with the updates of the fleet.

    As Accelerate's own, it makes one step per process and update (none more with ``split_batches``), so that a schedule
    made for ``len(loader)`` before ``prepare`` ends with the training. ``batches`` returns that number, and
    ``optimizers`` those prepared ones whose skipped update holds the scheduler back.
    """

    instead = "use scheduler.state_dict(), or scheduler.scheduler, for a prepared scheduler"

    def __init__(
        self,
        scheduler: Any,
        optimizers: Callable[[], Sequence[FleetOptimizer]],
        updates: StepUpdates,
        *,
        with_optimizer: bool,
        batches: Callable[[], int],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(scheduler, [], step_with_optimizer=with_optimizer)
        self._updates, self._batches, self._warn = updates, batches, warn
        self._prepared = optimizers
        self._warned = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance at the last micro-batch, unless the update was skipped; nothing before."""
        if not self.step_with_optimizer:
            self._updates.check_everybody_comes("scheduler.step() with step_scheduler_with_optimizer=False")
            self.scheduler.step(*args, **kwargs)
            return
        self.optimizers = self._prepared()
        if not self._updates.sync or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self._batches()):
            ends = getattr(self.scheduler, "total_steps", None)
            if ends is None or self.scheduler._step_count <= ends:
                self.scheduler.step(*args, **kwargs)
        self._check_length()

    def _check_length(self) -> None:
        made = steps_made(self.scheduler) or 0
        for found in [] if self._warned else horizons(self.scheduler):
            if made > found.steps + self._batches() and not self._ends_at(found.steps * self._batches(), found.steps):
                self._warned = True
                self._warn(
                    f"{type(self.scheduler).__name__} is past its end: it was made for {found.steps} steps "
                    f"({found.name}) and has made {made}. A prepared scheduler makes {self._batches()} steps per "
                    "update, one per process, as in Accelerate: make it by len(loader) before prepare, or for "
                    "accelerator.num_processes times the updates"
                )

    def _ends_at(self, steps: int, not_at: int) -> bool:
        """Return whether a function of the script's ends at ``steps``, though it has a number ``not_at`` by name."""
        return any(ends_at(function, steps, not_at=not_at) for function in getattr(self.scheduler, "lr_lambdas", ()))


def keep_gradients(model: torch.nn.Module, may_clear: Callable[[torch.nn.Module], bool]) -> None:
    """Have ``model.zero_grad()`` do nothing in a training loop, as the optimizer's does.

    ``may_clear`` is asked about the model or a copy of it, which has the method too; a pickled copy has torch's own.
    """

    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        if may_clear(self):
            type(self).zero_grad(self, set_to_none)

    model.zero_grad = MethodType(zero_grad, model)  # type: ignore[method-assign]


def refuse_no_sync(model: torch.nn.Module) -> None:
    """Have ``model.no_sync()``, as DDP has it, raise MisuseError."""
    model.no_sync = _no_sync  # type: ignore[assignment]


def _no_sync() -> NoReturn:
    raise MisuseError(
        "model.no_sync() of a prepared model, which LocalSGD calls, too: workers of a fleet make every update "
        "together; leave it out, or average parameters in a loop over fleet.steps (docs/networks.md)"
    )
