"""One step of the user's loop: this worker's micro-batches, the round, the commit.

Misuse that would otherwise be averaged in silently is an error here: a micro-batch without its backward, a step left
half done, a second commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.combine.gradients import second_order
from paceline.errors import MisuseError
from paceline.feed import TorchGenerators, seed_micro_batch, seed_update
from paceline.feed.dealing import MicroBatch
from paceline.loop.memory import OutOfMemory
from paceline.loop.several_losses import ADVICE, Parts
from paceline.loop.step_state import Turn, Work
from paceline.records import StepRecord

if TYPE_CHECKING:
    from paceline.combine.gradients.buckets import Among
    from paceline.combine.gradients.gradients import Aside
    from paceline.loop.steps import Steps


class Step:
    """A step. Iterate it for this worker's micro-batches, then commit it.

    Attributes:
        index (int): counts the fleet's steps from 0, over all epochs and restarts.
        epoch (int): the epoch this step belongs to, from 0.
        ends_epoch (bool): whether this is the epoch's last step; with deadlines it is sure after the commit.
        share (int): samples dealt to this worker for this step, 0 or more (batches, where a batch sampler gives
            them). With a deadline: more than it is expected to do; 0 when the round closed before it came.
        round (int): shared updates before this step: with gradients, one a step; with averages, one a round.
        applied (bool): after the commit, whether the parameters were updated; False after an overflow, or when nobody
            did anything.
        record (StepRecord | None): after the round, what happened in this step, on every worker; None before.
        turn (Turn): what the loop and the round's thread share of this step; the library's own.
        began (float): when the step began, by ``time.perf_counter()``; the library's own.

    Example:
        ```python
        for step in fleet.steps(dataset, global_batch=256, micro_batch=16):
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            step.commit(optimizer)
            print(step.index, step.loss)
        ```
    """

    def __init__(self, steps: Steps, turn: Turn, *, share: int, began: float) -> None:
        self.index = turn.index
        self.epoch = turn.epoch
        self.share = share
        self.ends_epoch = turn.ends_epoch
        self.applied = False
        self.record: StepRecord | None = None
        self.round = steps.rounds
        self.turn = turn
        self._steps = steps
        self._gradients = steps.gradients
        self._iterated = self._combined = self._committed = False
        self._open: MicroBatch | None = None
        self._opened = 0.0
        self._pending: dict[str, Any] = {}
        self._void = False
        """Whether the present micro-batch comes again, so that figures added with it do not count."""
        self.began = began
        self._work_began = 0.0
        self._idle_s = 0.0
        self._finished: Work | None = None
        self._own_numbers: TorchGenerators | None = None
        self._update_seeded = False
        self._aside: Aside | None = None
        """Under a deadline: a micro-batch whose backward is done, and its gradients, until the loop comes back for
        more. Where it may have to come again (``micro_batch="auto"``): the gradients of its parts so far."""
        self._parts = Parts(self.index)
        self._part: Work | None = None
        """The micro-batch, when some models have had their backward and others may have theirs."""

    def __repr__(self) -> str:
        return f"<Step {self.index} of epoch {self.epoch}: {self.share} {self._steps.dealing.unit} here>"

    # -- work ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._iterated:
            raise MisuseError(f"step {self.index} was iterated before: its micro-batches come once")
        self._iterated = True
        self._keep_generators()
        self._work_began = time.perf_counter()
        rates: list[Any] | None = None
        while (taken := self._take()) is not None:
            seed_micro_batch(self._steps.seed, taken.epoch, taken.position, self._steps.device)
            self._open = taken
            yield taken.batch
            rates = self._steps.rates() if rates is None else rates
        if rates is not None:
            self._steps.check_rates_held(rates)
        self._seed_update()

    def _keep_generators(self) -> None:
        """The user's own random numbers go on after the step as if it had drawn none."""
        if self._own_numbers is None:
            self._own_numbers = TorchGenerators(self._steps.device)

    def _seed_update(self) -> None:
        """From here to the end of the commit every worker draws the same."""
        if not self._update_seeded:
            self._update_seeded = True
            self._keep_generators()
            seed_update(self._steps.seed, self.index, self._steps.device)

    def _take(self) -> MicroBatch | None:
        self._close_micro_batch()
        self._opened = time.perf_counter()
        if self._steps.leaving:
            return None
        if not self.turn.bounded:
            return self._steps.dealing.take()
        while True:
            if not self._steps.taking(self.turn, self._opened):
                return None
            room = self._steps.room(self.turn) if not self.turn.out else 0
            taken = self._steps.dealing.take(room) if room != 0 else None
            if taken is not None or not self._steps.more(self.turn):
                return taken
            self._idle_s += time.perf_counter() - self._opened
            self._opened = time.perf_counter()

    def _close_micro_batch(self) -> None:
        """The loop comes back for more: the micro-batch it had must have been used."""
        self._end_parts()
        if self._open is not None:
            raise MisuseError(
                f"a micro-batch of step {self.index} had no step.backward(loss): its samples would be counted without "
                "a gradient; call step.skip() to leave it out on purpose"
            )
        figures = {} if self._void else self._pending
        if self._finished is None:
            self._steps.add_figures(self.turn, figures)
        else:
            self._finished.added = figures
            self._steps.finished_one(self.turn, self._finished, self._aside, self._opened)
        self._finished = self._aside = None
        self._pending = {}
        self._void = False

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: Any = None,
        models: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of this micro-batch's mean loss.

        ``weight`` says how much the mean counts: the number of samples unless given (for a loss that is a mean over
        tokens, the number of tokens). 0 drops the micro-batch.

        ``models``: the gradient is for the parameters of these alone, and other models may have a loss of their own in
        the same micro-batch, with the same weight; ``step.loss`` is then the sum of the losses. ``retain_graph``: a
        later one of them goes through the same graph.
        """
        micro = self._require_open("step.backward(loss)")
        weight = _check_weight(micro.rows if weight is None else weight)
        _check_loss(loss)
        among = self._parts.choose(models, self._gradients.everything, weight, used=self._part is not None)
        done = self._part or Work(samples=micro.samples, micro_batches=1)
        if isinstance(weight, torch.Tensor) or weight > 0:
            if not self._try_backward(loss, weight, micro, among=among, retain_graph=retain_graph):
                return
            done.weight = weight
            done.loss_sum = done.loss_sum + _weighted(loss.detach().to(torch.float64), weight)
        self._part = done
        if among is None:
            self._end_parts()
            return
        self._parts.add(among)
        if self._parts.given.issuperset(map(id, self._gradients.buckets.parameters)):
            self._end_parts()

    def _end_parts(self) -> None:
        """The micro-batch has had its backward, or those that it gets."""
        done, micro = self._part, self._open
        if done is None or micro is None:
            return
        self._part = None
        self._parts.close(
            self._gradients.buckets.parameters, counts=isinstance(done.weight, torch.Tensor) or done.weight > 0
        )
        if self._aside is not None and not self.turn.bounded:
            self._gradients.join_whole(self._aside)
            self._aside = None
        self._done(micro, done)

    def _try_backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> bool:
        """False when memory ran out: then the micro-batch comes again, in halves."""
        try:
            if self.turn.bounded:
                if self._steps.check(self.turn):
                    self._aside = _both(self._aside, self._gradients.backward_aside(loss, weight, among=among, **graph))
            elif among is not None and self._gradients.whole:  # the part before may be for nothing
                self._gradients.begin_whole()
                self._aside = _both(self._aside, self._gradients.backward_aside(loss, weight, among=among, **graph))
            else:
                self._gradients.backward(loss, weight, last=micro.last, among=among, **graph)
        except OutOfMemory:
            if not self._steps.auto or not self._steps.shrink(micro.samples, again=True):
                raise
        else:
            return True
        self._open = self._part = self._aside = None
        self._parts.drop()
        self._void = True
        return False

    def skip(self) -> None:
        """Leave this micro-batch out: its samples count as done, without a gradient."""
        micro = self._require_open("step.skip()")
        if self._part is not None:
            raise MisuseError(f"step.skip() after step.backward in one micro-batch of step {self.index}: it is in use")
        self._done(micro, Work(samples=micro.samples, micro_batches=1))

    def add(self, **figures: Any) -> None:
        """Sum figures over the fleet, e.g. ``step.add(correct=n)``; after commit they are in ``step.record.sums``."""
        if self._combined:
            raise MisuseError(f"step.add after the round of step {self.index}: it can no longer be summed")
        for name, value in figures.items():
            value = value.detach().to(torch.float64).sum() if isinstance(value, torch.Tensor) else float(value)
            self._pending[name] = self._pending.get(name, 0.0) + value

    def _done(self, micro: MicroBatch, done: Work) -> None:
        self._open = None
        if self._steps.machine is not None:
            done.shortfall_s = self._steps.pad(self.index, micro.rows, self._opened)
        now = time.perf_counter()
        done.slowest_s = now - self._opened
        done.seconds = now - self._work_began - self._idle_s - self.turn.work.seconds
        if not self.turn.bounded or not self.device_works_on:
            self._steps.paces.append(done.slowest_s / micro.samples)
        if self.turn.bounded:
            self._finished = done
        else:
            self.turn.work.add(done)

    def _require_open(self, call: str) -> MicroBatch:
        self._steps.require_current(self)
        if self._open is None:
            why = f"it was used already; {ADVICE}" if self._iterated else "none was taken"
            raise MisuseError(f"{call} without a micro-batch in step {self.index}: {why}")
        return self._open

    # -- round and commit ------------------------------------------------------------------------------------------

    def combine(self) -> None:
        """Run the round now and leave the fleet's mean gradient in ``p.grad`` for code of your own; commit then only
        updates. When ``step.applied`` is False there is nothing to apply (an overflow, nothing done)."""
        self._combine(clip_norm=None, own=True)

    def commit(self, *optimizers: torch.optim.Optimizer, clip_norm: float | None = None) -> None:
        """Combine with the fleet, clip the mean gradient to ``clip_norm``, update, and zero the gradients."""
        if self._committed:
            raise MisuseError(f"step {self.index} was committed before: one commit a step")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {clip_norm}")
        if not optimizers and not self._combined:
            raise ValueError("step.commit needs the optimizer: step.commit(optimizer)")
        self._steps.check_optimizers(optimizers)
        combined_before = self._combined
        if not combined_before:
            self._parts.check_commit(optimizers)
            self._combine(clip_norm=clip_norm, own=False)
        updated = time.perf_counter()
        if self.applied:
            if combined_before and clip_norm is not None:
                self._gradients.norm()  # before it is clipped
                torch.nn.utils.clip_grad_norm_(self._gradients.buckets.parameters, clip_norm)
            with scaled_rates(optimizers, self._gradients.lr_factor(self._after().weight)):
                for optimizer in optimizers:
                    second_order.step(optimizer) if second_order.needs_graph(optimizer) else optimizer.step()
        self._committed = True
        self._steps.commit(self, updated)
        if self._own_numbers is not None:
            self._own_numbers.restore()

    def _combine(self, clip_norm: float | None, *, own: bool) -> None:
        if self._committed or self._combined:
            raise MisuseError(f"step {self.index} has had its round: one a step")
        self._steps.require_current(self)
        self._end_parts()
        self._check_finished()
        self._seed_update()
        self._close_micro_batch()
        work = self.turn.work
        if self.device_works_on and work.micro_batches and not self.turn.bounded:
            torch.cuda.current_stream(self._steps.device).synchronize()  # once a step: the round needs the true time
            work.seconds = time.perf_counter() - self._work_began
        self._combined = True
        self.applied = self._steps.exchange(self, clip_norm, own=own)
        if self.applied and self._parts.partial and float(work.weight) > 0:
            assert self.turn.header is not None
            self._parts.check_round(self._gradients.buckets.parameters, self.turn.header.used.tolist())

    @property
    def device_works_on(self) -> bool:
        """Whether backward returns before the device is done."""
        return self._steps.device.type == "cuda"

    def _check_finished(self) -> None:
        if self.turn.bounded and (self._open is None or not self.turn.open):
            self._open = None
            return  # what is left stays in this worker's queue
        left = 0 if self._steps.leaving else self._steps.dealing.left
        if self._open is not None or left:
            left += self._open.samples if self._open else 0
            unit = self._steps.dealing.unit
            raise MisuseError(
                f"step {self.index} was left half done: {left} of this worker's {self.share} {unit} had no "
                "step.backward; finish the loop over the step, or call step.skip() for each micro-batch you leave out"
            )

    @property
    def committed(self) -> bool:
        """Whether ``step.commit`` is behind this step."""
        return self._committed

    # -- afterwards ------------------------------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """The fleet's weighted mean loss of this step, the same on every worker. After the round."""
        return self._after().loss if self._after().loss is not None else float("nan")  # type: ignore[return-value]

    @property
    def sums(self) -> dict[str, float]:
        """The figures given to ``step.add``, summed over the fleet. After the round."""
        return dict(self._after().sums)

    @property
    def grad_norm(self) -> float:
        """Norm of the mean gradient before clipping. After the round, until the next step begins."""
        return self._steps.grad_norm(self)

    @property
    def progress(self) -> float:
        """The part of the whole training that was done when this step began or, after its commit, ended, in [0, 1];
        exact and the same on every worker, so schedules can follow it."""
        return self._steps.progress

    def _after(self) -> StepRecord:
        if self.record is None:
            raise MisuseError(f"step {self.index} has no result yet: call step.commit first")
        return self.record


@contextmanager
def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Learning rates times ``factor`` for one update, and as they were afterwards."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups] if factor != 1.0 else []
    before = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"] for group in groups]
    for group, rate in zip(groups, before, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def _check_weight(weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight must be one number, got a tensor of shape {tuple(weight.shape)}")
        weight = weight.detach().reshape(())
        if weight.device.type != "cpu":
            return weight.to(torch.float64)  # looking at it would make the device wait
        weight = weight.item()
    if not isinstance(weight, (int, float, np.number)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be a finite number, zero or more, got {weight!r}")
    return float(weight)


def _weighted(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """``loss * weight``; a weight of 0, which only the device may know, drops even a loss that is NaN."""
    if isinstance(weight, torch.Tensor):
        loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
    product: torch.Tensor = loss * weight
    return product


def _both(first: Aside | None, second: Aside) -> Aside:
    """The gradients of two parts of a micro-batch, and the statistics after both."""
    if first is None:
        return second
    return [other if grad is None else grad for grad, other in zip(first[0], second[0], strict=True)], second[1]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a scalar tensor, the mean over the micro-batch; got {shape}")
