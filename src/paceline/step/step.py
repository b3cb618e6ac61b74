"""One step of the user's loop: this worker's micro-batches, the round, the commit.

Misuse that would otherwise be averaged in silently is an error here: a micro-batch without its backward, a step left
half done, a second commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.errors import MisuseError
from paceline.feed import OwnNumbers, seed_micro_batch, seed_update
from paceline.feed.micro_batches import MicroBatch, holds_one
from paceline.gradients import second_order
from paceline.records import StepRecord
from paceline.renamed import FormerNames
from paceline.step.checks.sameness import is_examined
from paceline.step.checks.updates import changed_rate, scaled_rates
from paceline.step.checks.user_code import check_optimizers
from paceline.step.losses.coupling import are_numbers, coupling, ignore_graph_of, is_to_be_looked_at, mixing
from paceline.step.losses.loss_constants import constants_of
from paceline.step.losses.loss_weights import (
    SINGLES,
    Tally,
    check_loss,
    check_weight,
    check_weights,
    look_at_division,
    look_at_given,
    look_at_penalty,
    read_weight,
    weighted,
)
from paceline.step.losses.several_losses import ADVICE, Parts, check_together
from paceline.step.micro_batch_size import OutOfMemory, shrink
from paceline.step.step_state import StepState, Work

if TYPE_CHECKING:
    from paceline.gradients import Header
    from paceline.gradients.buckets import Among
    from paceline.step.ahead import StepAhead
    from paceline.step.combine import Combine
    from paceline.step.context import LoopContext
    from paceline.step.round import StepRound

_MOVED_BUFFER = (
    "forward changes the buffer {} in every micro-batch, and after a round every worker has one worker's, as with DDP. "
    "Where the loss depends on it (a counter, a running mean, spectral norm), the step is not that of one process: "
    "change it behind step.commit, from step.index, step.sums or fleet.predict"
)

_LATER_BUFFER = (
    "the buffer {} was None, or not there, when the loop began, so workers do not share it: where it is made from a "
    "micro-batch, each has what its own samples gave. Register it with its shape before fleet.model, and set it behind "
    "step.commit, from step.sums or fleet.predict"
)

_SET_BUFFER = (
    "the buffer {} was set between two steps to a value that is not the same on every worker (made from what each has "
    "seen, or set on some alone), and the losses of the step depend on it: set it alike, from step.sums or "
    "fleet.predict"
)

_UNLIKE_MODELS = (
    "micro-batches of one step trained unlike models. That is right where some samples train no such model; where the "
    "script takes turns by a number of micro-batches, the step is not that of one process: take turns by step.index, "
    "and give each loss its models, step.backward(loss, models=generator): docs/sharding.md"
)


_NO_BACKWARD = (
    "Each micro-batch has its backward before the next one is taken: no prefetching, no list(step), no single backward "
    "behind the loop. Call step.skip() to leave it out on purpose"
)

_OWN_GRADIENT = (
    "A gradient g that the script makes itself (torch.func.vmap, clipped for each sample) is given as a loss, the sum "
    "over the parameters of (p * g).sum(): step.backward(that / len(x), weight=len(x)) where g is a sum over samples"
)


class Step(FormerNames):
    """A step. Iterate it for this worker's micro-batches, then commit it.

    Attributes:
        index (int): counts the fleet's steps from 0, over all epochs and restarts.
        epoch (int): the epoch this step belongs to, from 0.
        ends_epoch (bool): whether this is the epoch's last step; with deadlines it is sure after the commit.
        share (int): samples dealt to this worker for this step, 0 or more (batches, where a batch sampler gives
            them). With a deadline: more than it is expected to do; 0 when the round closed before it came.
        round (int): shared updates before this step: with gradients, one per step; with averages, one per round.

    Example:
        ```python
        for step in fleet.steps(dataset, global_batch=256, micro_batch=16):
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            step.commit(optimizer)
            print(step.index, step.loss)
        ```
    """

    _former_names = MappingProxyType({"combine": "step.reduce()"})

    def __init__(
        self,
        loop: LoopContext,
        combine: Combine,
        step_state: StepState,
        step_round: StepRound,
        *,
        share: int,
        began: float,
    ) -> None:
        self.index = step_state.index
        self.epoch = step_state.epoch
        self.share = share
        self.ends_epoch = step_state.ends_epoch
        self._applied = False
        self._record: StepRecord | None = None
        self._ahead: StepAhead | None = None
        """The step, from its round on, while the device may still compute it."""
        self.round = combine.rounds
        self._step_state, self._step_round = step_state, step_round
        self._loop, self._combine_with, self._gradients = loop, combine, loop.gradients
        self._iterated = self._combined = self._committed = False
        self._micro_batch: MicroBatch | None = None
        self._micro_batch_began = 0.0
        self._rows: int | None = None
        """The rows of the micro-batch that the loop is in, before and behind its backward."""
        self._figures: dict[str, Any] = {}
        self._micro_batch_void = False
        """Whether the present micro-batch, and the figures added with it, do not count: it is empty, or comes again."""
        self._pays_cost = True  # an emulated machine's constant cost per step
        self._began = began
        self._work_began = 0.0
        self._idle_s = 0.0
        self._own_numbers: OwnNumbers | None = None
        self._update_seeded = False
        self._parts = Parts(self.index)
        self._open_work: Work | None = None
        """The open micro-batch's work, from its first backward until all its losses have come."""

    @property
    def applied(self) -> bool:
        """Whether the parameters were updated, after the commit; False after an overflow, or when nobody did anything.

        Asking waits for the device where it still computes the step.
        """
        if self._ahead is not None and self._committed:
            self._ahead.complete()
        return self._applied

    @property
    def record(self) -> StepRecord | None:
        """What happened in this step, on every worker, after its round; None before.

        Asking waits for the device where it still computes the step.
        """
        if self._ahead is not None:
            if not self._committed:
                raise MisuseError(f"step {self.index} is still being computed: ask for its result behind step.commit")
            self._ahead.complete()
        return self._record

    @property
    def rows(self) -> int:
        """The number of samples in the micro-batch that the loop has now; 0 between two."""
        return self._micro_batch.rows if self._micro_batch is not None else 0

    @property
    def ends_share(self) -> bool:
        """Whether the micro-batch that the loop has now, or had last, is this worker's last one of the step.

        Not known before its backward for an iterable dataset, nor where the step has a deadline.
        """
        return self._micro_batch.last if self._micro_batch is not None else self._loop.dealing.left == 0

    def __repr__(self) -> str:
        return f"<Step {self.index} of epoch {self.epoch}: {self.share} {self._loop.dealing.unit} here>"

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            "a step is not a batch: it gives this worker's micro-batches one after another (for x, y in step). In a "
            "hook that is called once per step, such as Lightning's on_train_batch_end, take step.record.samples for "
            "the samples of all workers, or keep what you need of each micro-batch in training_step"
        )

    # -- work ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._iterated:
            raise MisuseError(f"step {self.index} was iterated before: its micro-batches come once")
        self._iterated = True
        self._keep_generators()
        if self._loop.replica.alike and self._loop.transport.shards == 1:
            self._step_state.buffers = self._gradients.accumulation.buffers.digest_of_set()
        self._work_began = concurrency.perf_counter()
        rates: list[Any] | None = None
        while (taken := self._take()) is not None:
            seed_micro_batch(self._loop.seed, taken.epoch, taken.position, self._loop.device)
            self._micro_batch, self._micro_batch_void = taken, taken.own == 0
            yield taken.batch
            rates = self._loop.tracking.rates() if rates is None else rates
        if rates is not None:
            self._check_rates_held(rates)
        self._seed_update()

    def _check_rates_held(self, after_first: list[Any]) -> None:
        """Raise MisuseError when learning rates have changed since this worker's first micro-batch of the step.

        A step has one update, and another worker has another number of micro-batches.
        """
        if (now := self._loop.tracking.rates()) != after_first:
            groups = [name for name, _ in self._loop.tracking.hyperparameters()]
            raise MisuseError(changed_rate(groups, after_first, now, step=self.index))

    def _keep_generators(self) -> None:
        """Remember the user's random generators: they go on after the step as if it had drawn no numbers."""
        if self._own_numbers is None:
            self._own_numbers = OwnNumbers(self._loop.device)

    def _seed_update(self) -> None:
        """Seed the random generators so that every worker draws the same numbers until the end of the commit."""
        if not self._update_seeded:
            self._update_seeded = True
            self._keep_generators()
            seed_update(self._loop.seed, self.index, self._loop.device)

    def _take(self) -> MicroBatch | None:
        self._close_micro_batch()
        opened = self._micro_batch_began = concurrency.perf_counter()
        if self._loop.leaving:
            return None
        taken, self._micro_batch_began = self._step_round.take(opened)
        self._rows = None if taken is None else taken.rows
        self._idle_s += self._micro_batch_began - opened
        return taken

    def _close_micro_batch(self) -> None:
        """End the micro-batch that the loop had; raise MisuseError when it was not used."""
        if self._open_work is not None:
            self._end_parts()
        if self._micro_batch is not None:
            parameters = self._gradients.buckets.parameters
            own = not self._step_state.work.micro_batches and any(p.grad is not None for p in parameters)
            raise MisuseError(
                f"a micro-batch of step {self.index} had no step.backward(loss): its samples would be counted without "
                "a gradient. " + (_OWN_GRADIENT if own else _NO_BACKWARD)
            )
        self._step_round.count_micro_batch({} if self._micro_batch_void else self._figures, self._micro_batch_began)
        if self._figures or self._micro_batch_void:
            self._figures, self._micro_batch_void = {}, False

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: Any = None,
        models: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of this micro-batch's mean loss.

        ``weight`` is how much the mean counts. Unless given, it is what the loss was divided by, as autograd's graph
        has it: samples, or tokens, pixels, class weights; samples where the graph does not show it (a compiled loss). 0
        drops the micro-batch.

        ``models``: the gradient is for the parameters of these alone, and other models may have a loss of their own in
        the same micro-batch, with the same weight; ``step.loss`` is then the sum of the losses. ``retain_graph``: a
        later one of these losses goes through the same graph.
        """
        micro = self._require_open("step.backward(loss)")
        check_loss(loss)
        weight, tally = self._weigh(loss, weight, micro, part=models is not None or self._open_work is not None)
        together = self._loop.transport.shards > 1
        if together:
            check_together(loss, weight, models)
        among: Among = None
        if models is not None or self._open_work is not None:
            among = self._parts.choose(models, self._gradients.everything, weight, used=self._open_work is not None)
        if among is None and micro.own != 0 and is_to_be_looked_at(self._loop, loss, micro.rows):
            tally.couplings.append(coupling(loss, micro.rows, numbered=are_numbers(micro.batch)))
            tally.mixings.append(mixing(loss, micro.rows))
        work = self._open_work or Work(samples=micro.samples, micro_batches=1)
        if together or isinstance(weight, torch.Tensor) or weight > 0:
            if not self._try_backward(loss, weight, micro, among=among, retain_graph=retain_graph):
                return
            work.weight, work.tally = weight, tally
            work.loss_sum = work.loss_sum + weighted(loss, weight)
        self._open_work = work
        if among is None:
            self._end_parts()
            return
        self._parts.add(among)
        if self._parts.given.issuperset(map(id, self._gradients.buckets.parameters)):
            self._end_parts()

    def _weigh(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, part: bool) -> tuple[Any, Tally]:
        """Return a loss's weight, and the tally of how weights came about; ``part``: it is for some models alone."""
        tally = Tally() if self._open_work is None else self._open_work.tally
        if micro.own == 0:
            return float(micro.rows), tally
        if is_examined(self.index):
            self._look_closely(loss, micro, tally, part=part)
        if weight is not None:
            weight = check_weight(weight)
            tally.given = isinstance(weight, torch.Tensor) or weight > 0
            if tally.given and not part and is_examined(self.index):
                self._warn_of_loss(loss, look_at_given(loss, weight, micro.rows, tally))
            return weight, tally
        mean, alone = self._gradients.mean_gradient, self._loop.transport.solitary
        like = self._step_state.work.tally
        weight, odd = read_weight(loss, micro.rows, tally, unit=mean.unit, part=part, like=like)
        if alone and mean.unit is None and tally.raw and not isinstance(weight, torch.Tensor):  # nobody to agree with
            mean.unit = float(weight // micro.rows) if weight and weight % micro.rows == 0 else 1.0
            weight, tally.raw, tally.read = weight / mean.unit, False, [(weight / mean.unit, micro.rows)]
        self._warn_of_loss(loss, odd)
        return weight, tally

    def _look_closely(self, loss: torch.Tensor, micro: MicroBatch, tally: Tally, *, part: bool) -> None:
        """Note the values in a loss's graph; warn of what the first loss of the step shows."""
        rows = micro.rows
        if (constants := constants_of(loss, rows)) is not None:
            tally.constants.append(constants)
        if self._step_state.work.micro_batches:
            return
        if self._loop.singles and rows == 1 and holds_one(micro.batch):
            self._loop.notes.log_once(SINGLES)
        texts = [look_at_division(loss, rows), look_at_penalty(loss, self._loop.epoch_length)]
        if not part and self._loop.transport.shards == 1:  # else a backward gives not every leaf its gradient
            texts.append(self._loop.script.own_leaves.look(loss, self._gradients.everything))
        for text in filter(None, texts):
            self._loop.notes.warn_once(text)

    def _warn_of_loss(self, loss: torch.Tensor, text: str) -> None:
        """Log a warning about a loss, unless it is empty."""
        if text:
            self._loop.notes.warn_once(text)
            ignore_graph_of(self._loop, loss)

    def _end_parts(self) -> None:
        """End the open micro-batch, unless it has had no backward: its losses are complete."""
        work, micro = self._open_work, self._micro_batch
        if work is None or micro is None:
            return
        self._open_work = None
        self._parts.close(
            self._gradients.buckets.parameters, counts=isinstance(work.weight, torch.Tensor) or work.weight > 0
        )
        self._step_round.end_backward()
        self._end_micro_batch(micro, work)

    def _try_backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> bool:
        """Return False when memory ran out: then the micro-batch comes again, in halves."""
        updates = self._loop.tracking.updates
        outside = updates.gradients_outside()
        try:
            self._step_round.backward(loss, weight, micro, among=among, **graph)
            updates.check_outside(outside)
        except OutOfMemory:
            if not self._loop.micro_batches.auto or not shrink(self._loop, micro.samples, again=True):
                raise
        else:
            return True
        self._micro_batch = self._open_work = None
        self._step_round.drop()
        self._parts.drop()
        self._micro_batch_void = True
        return False

    def skip(self) -> None:
        """Leave this micro-batch out: its samples count as done, without a gradient."""
        micro = self._require_open("step.skip()")
        if self._loop.transport.shards > 1:
            raise MisuseError(
                "step.skip() in a worker of several processes, which go through the model together: call "
                "step.backward(loss, weight=0) for a micro-batch that is not to count"
            )
        if self._open_work is not None:
            raise MisuseError(f"step.skip() after step.backward in one micro-batch of step {self.index}: it is in use")
        self._end_micro_batch(micro, Work(samples=micro.samples, micro_batches=1))

    def add(self, **figures: Any) -> None:
        """Sum figures over the fleet, e.g. ``step.add(correct=n)``; after commit they are in ``step.record.sums``.

        A figure is a number. A tensor with a row per sample, or of booleans, is summed up.
        """
        if self._combined:
            raise MisuseError(f"step.add after the round of step {self.index}: it can no longer be summed")
        for name, value in figures.items():
            value = _sum_of(name, value, self._rows) if isinstance(value, torch.Tensor) else float(value)
            self._figures[name] = self._figures.get(name, 0.0) + value

    def _end_micro_batch(self, micro: MicroBatch, work: Work) -> None:
        self._micro_batch = None
        if self._loop.machine is not None:
            if self._loop.device.type == "cuda":
                torch.cuda.current_stream(self._loop.device).synchronize()
            begins, self._pays_cost = self._pays_cost, False
            work.shortfall_s = self._loop.machine.pad(self.index, micro.rows, self._micro_batch_began, begins=begins)
        now = concurrency.perf_counter()
        work.slowest_s = now - self._micro_batch_began
        work.seconds = now - self._work_began - self._idle_s - self._step_state.work.seconds
        self._step_round.end_micro_batch(work)

    def _require_open(self, call: str) -> MicroBatch:
        self._require_current()
        if self._micro_batch is None:
            why = f"it was used already; {ADVICE}" if self._iterated else "none was taken"
            raise MisuseError(f"{call} without a micro-batch in step {self.index}: {why}")
        return self._micro_batch

    def _require_current(self) -> None:
        """Raise MisuseError when this step is no longer its loop's: its samples may have been dealt again."""
        if self._loop.position.closed or self._loop.position.step is not self:
            raise MisuseError(f"step {self.index} is over: its loop was left, or a later step has begun")

    # -- round and commit ------------------------------------------------------------------------------------------

    def reduce(self, *, whole: bool = True) -> None:
        """Run the round now, and leave the fleet's mean gradient in ``p.grad`` for code of your own.

        ``step.commit`` then only updates. When ``step.applied`` is False there is nothing to apply (an overflow,
        nothing done). ``whole=False``: that code takes a mean over any number of samples, so pace="auto" may set
        deadlines.
        """
        self._loop.script.own_updates |= whole
        self._combine(clip_norm=None, own=True)
        self._loop.tracking.updates.combined(self.applied, self._gradients.everything)

    def commit(self, *optimizers: torch.optim.Optimizer, clip_norm: float | None = None) -> None:
        """Combine with the fleet, clip the mean gradient to ``clip_norm``, update, and zero the gradients."""
        if self._committed:
            raise MisuseError(f"step {self.index} was committed before: one commit a step")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {clip_norm}")
        if not optimizers and not self._combined:
            raise ValueError("step.commit needs the optimizer: step.commit(optimizer)")
        check_optimizers(self._loop, optimizers)
        self._loop.script.optimizers = optimizers
        combined_before = self._combined
        if not combined_before:
            self._parts.check_commit(optimizers)
            self._combine(clip_norm=clip_norm, own=False)
        update_began, updates = concurrency.perf_counter(), self._loop.tracking.updates
        updates.committing(self._applied)
        if self._applied:
            if combined_before and clip_norm is not None:
                self._gradients.mean_gradient.norm()  # before it is clipped
                torch.nn.utils.clip_grad_norm_(self._gradients.buckets.parameters, clip_norm)
            factor = self._gradients.lr_factor(self._after().weight) if self._gradients.scales_lr else 1.0
            guarded = nullcontext() if self._ahead is None else self._ahead.guarding(optimizers)
            with guarded, nullcontext() if factor == 1.0 else scaled_rates(optimizers, factor):
                for optimizer in optimizers:
                    second_order.step(optimizer) if second_order.needs_graph(optimizer) else optimizer.step()
        updates.updated()
        self._committed = True
        self._combine_with.commit(self, update_began)
        updates.committed(self._loop.position.finished)
        self._leave()

    def _leave(self) -> None:
        """Let the script's own random numbers go on: the step was committed, or its loop was left."""
        if self._own_numbers is not None:
            self._own_numbers.restore()
            self._own_numbers = None

    def _combine(self, clip_norm: float | None, *, own: bool) -> None:
        if self._committed or self._combined:
            raise MisuseError(f"step {self.index} has had its round: there is one per step")
        self._require_current()
        self._end_parts()
        self._check_finished()
        self._seed_update()
        self._close_micro_batch()
        self._step_round.end_work()
        self._combined = True
        self._applied = self._combine_with.exchange(self, clip_norm, own=own)
        header = self._step_state.header
        if self._applied and self._parts.partial and float(self._step_state.work.weight) > 0:
            assert header is not None
            self._parts.check_round(self._gradients.buckets.parameters, header.used.tolist())
        if header is not None:
            if self._ahead is None:
                self._gradients.mean_gradient.agree_on_unit(header)
                check_weights(self._loop, self.index, header)
            self._check_buffers(header)
            if len(self._gradients.accumulation.trained_models) > 1:
                self._loop.notes.warn_once(_UNLIKE_MODELS)

    def _check_buffers(self, header: Header) -> None:
        """Warn of buffers that were not the same on every worker while the losses were computed."""
        buffers = self._gradients.accumulation.buffers
        if buffers.moved_by_forward:
            self._loop.notes.warn_once(_MOVED_BUFFER.format(buffers.moved_by_forward))
        columns = (header.column(name).tolist() for name in ("buffers", "samples"))
        unlike = len({digest for digest, samples in zip(*columns, strict=True) if samples}) > 1
        if buffers.came_later and not buffers.set_between and (unlike or not self._loop.replica.alike):
            self._loop.notes.warn_once(_LATER_BUFFER.format(buffers.came_later))
        elif unlike:
            self._loop.notes.warn_once(_SET_BUFFER.format(buffers.set_between or "of the model"))

    def _check_finished(self) -> None:
        if self._step_round.may_be_left(self._micro_batch is not None):
            self._micro_batch = None
            return
        left = 0 if self._loop.leaving else self._loop.dealing.left
        if self._micro_batch is not None or left:
            left += self._micro_batch.samples if self._micro_batch else 0
            unit = self._loop.dealing.unit
            raise MisuseError(
                f"step {self.index} was left half done: {left} of this worker's {self.share} {unit} had no "
                "step.backward; finish the loop over the step, or call step.skip() for each micro-batch you leave out"
            )

    @property
    def committed(self) -> bool:
        """Whether ``step.commit`` has been called."""
        return self._committed

    # -- afterwards ------------------------------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """The fleet's weighted mean loss of this step, the same on every worker. After the round."""
        loss = self._after().loss
        return float("nan") if loss is None else loss

    @property
    def sums(self) -> dict[str, float]:
        """The figures given to ``step.add``, summed over the fleet. After the round."""
        return dict(self._after().sums)

    @property
    def grad_norm(self) -> float:
        """Norm of the mean gradient before clipping. After the round, until the next step begins."""
        if self._loop.position.step is not self or self.record is None:
            raise MisuseError(
                f"the gradients of step {self.index} are no longer there: ask before the next step begins"
            )
        return self._gradients.mean_gradient.norm() if self.applied else float("nan")

    @property
    def progress(self) -> float:
        """The fraction of the whole training that was done when this step began or, after its commit, ended, in [0, 1].

        It is exact and the same on every worker, so schedules can follow it.
        """
        return self._loop.position.progress

    def _after(self) -> StepRecord:
        if self.record is None:
            raise MisuseError(f"step {self.index} has no result yet: it has one after step.commit")
        return self.record


def _sum_of(name: str, value: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Return the sum of a figure's tensor; raise ValueError for one whose numbers may be meant one by one.

    ``rows``: samples of the micro-batch that the loop is in, of which each may have a number.
    """
    if value.numel() != 1 and value.dtype is not torch.bool and value.shape[:1] != (rows,):
        raise ValueError(
            f"step.add({name}=...) got a tensor of shape {tuple(value.shape)}, and a figure is one number: give "
            f"{name}=values.sum(), or each number under a name of its own. A table, such as counts per class, is "
            "made by fleet.evaluate(score, dataset, tables=...)"
        )
    return value.detach().to(torch.float64).sum()
