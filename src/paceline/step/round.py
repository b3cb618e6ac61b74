"""One step's round on one worker: micro-batches go in, the fleet's sums come out.

A round is made when its step is dealt, and closes in one of two ways. A `SynchronousRound` waits for everybody: the
user's thread runs it, and its sums overlap with the last backward. A `DeadlineRound` closes at its deadline, or when
the first shares are done, whoever is late: the proxy's thread runs it with what is finished, and the user's thread
takes over the result when it comes there (`late/deadline_round`). Which of the two a step has is decided by its plan,
in `GradientCombine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.errors import MisuseError
from paceline.feed.micro_batches import MicroBatch
from paceline.gradients import Header
from paceline.gradients.accumulation import MicroBatchGradient
from paceline.gradients.buckets import Among
from paceline.records import StepRecord
from paceline.step.ahead import StepAhead
from paceline.step.checks.sameness import ReplicaComparison
from paceline.step.context import LoopContext
from paceline.step.device import DeviceClock, mark, wait_for_event
from paceline.step.step_state import RoundPhase, StepState, Work, record_of, write_header

if TYPE_CHECKING:
    from paceline.step.late.deadline_round import WorkInFlight


class StepRound(ABC):
    """The base of both kinds of round: the open micro-batch, the header, the record."""

    def __init__(self, loop: LoopContext, step_state: StepState) -> None:
        self._loop, self.step_state, self._gradients = loop, step_state, loop.gradients
        self._apart: MicroBatchGradient | None = None
        """Gradients of the open micro-batch that have not joined the step's sum yet."""

    @property
    def _label(self) -> str:
        return f"the round of step {self.step_state.index}"

    # -- micro-batches: the user's thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the loop over the micro-batches, perhaps anew after it was left half done."""
        self._apart = None

    @abstractmethod
    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        """Return the next micro-batch, asked for at ``opened``, and when it was taken; None: there is no more."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        """Add a loss of the open micro-batch."""

    def _backward_apart(self, loss: torch.Tensor, weight: Any, *, among: Among, **graph: bool) -> None:
        """Add a loss of the open micro-batch beside the step's sum, which it joins complete or not at all."""
        more = self._gradients.accumulation.backward_apart(loss, weight, among=among, **graph)
        if self._apart is not None:  # each parameter has its gradient in one of the two; statistics are the later ones
            pairs = zip(self._apart.grads, more.grads, strict=True)
            more = more._replace(grads=[other if grad is None else grad for grad, other in pairs])
        self._apart = more

    def drop(self) -> None:
        """Forget the open micro-batch's gradients: it comes again."""
        self._apart = None

    @abstractmethod
    def end_backward(self) -> None:
        """Note that the open micro-batch has had all its losses."""

    @abstractmethod
    def end_micro_batch(self, work: Work) -> None:
        """Note that the open micro-batch is computed."""

    @abstractmethod
    def count_micro_batch(self, figures: dict[str, Any], opened: float) -> None:
        """Count the micro-batch taken at ``opened``, with the ``figures`` added meanwhile: the loop wants another."""

    @abstractmethod
    def may_be_left(self, busy: bool) -> bool:
        """Return whether the loop may leave its share half done; ``busy``: it is in a micro-batch."""

    @abstractmethod
    def end_work(self) -> None:
        """Note that the loop's last micro-batch is used."""

    # -- the round and after: the user's thread ------------------------------------------------------------------------

    @abstractmethod
    def run(self) -> bool:
        """Run the round, or wait for it; return False when a peer's state replaces its result."""

    @abstractmethod
    def make_record(self, applied: bool) -> StepRecord | None:
        """Return the record of this step for the script; make it where the round has not."""

    @abstractmethod
    def commit(self, began: float) -> None:
        """End the step on this worker, which began it at ``began`` and has made its update."""

    def count(self) -> None:
        """Count a round that is over before its commit: members change in a call between ``step.reduce()`` and that."""
        return

    def refuse_unlike(self, header: Header) -> None:
        """Raise MisuseError, before the update, where a comparison in this round found unlike workers."""
        return

    def repair_replicas(self, header: Header) -> None:
        """Make replicas equal, after the commit, that unlike devices have rounded apart."""
        return

    # -- what this worker reports --------------------------------------------------------------------------------------

    def _write_header(self, *, finite: bool, counts: bool = True, **facts: float) -> Header:
        """Return this worker's header for the round's members; ``facts``: those of this kind of round."""
        members = self._loop.membership
        intentions = members.intentions() if members is not None else {}
        return write_header(self._loop, self.step_state, {**facts, **intentions}, finite=finite, counts=counts)

    def _record_of(self, header: Header, **known: Any) -> StepRecord:
        loop = self._loop
        emulated = loop.machine is not None
        return record_of(
            self.step_state, header, loop.transport.slot_name, emulated=emulated, auto=loop.micro_batches.auto, **known
        )


class SynchronousRound(StepRound):
    """A round that waits for everybody, run by the user's thread."""

    def __init__(
        self,
        loop: LoopContext,
        step_state: StepState,
        replicas: ReplicaComparison | None = None,
        *,
        in_flight: WorkInFlight | None = None,
    ) -> None:
        """Make the round; ``in_flight``: work that may have missed the deadline of an earlier step."""
        super().__init__(loop, step_state)
        self._replicas, self._in_flight = replicas, in_flight
        self._late_s = 0.0
        self._round_s = 0.0
        self._clock = DeviceClock(loop.device)
        self.ahead: StepAhead | None = None
        """The step, where it is committed before the device has computed it."""

    def begin(self) -> None:
        super().begin()
        self._clock = DeviceClock(self._loop.device)

    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        self._clock.begin()
        return self._loop.micro_batches.source.take(), opened

    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        if among is not None and self._gradients.atomic:  # memory may run out in a later part: then none of them counts
            self._gradients.accumulation.prepare_apart()
            self._backward_apart(loss, weight, among=among, **graph)
        else:
            self._gradients.backward(loss, weight, last=micro.last, among=among, **graph)

    def end_backward(self) -> None:
        if self._apart is not None:
            self._gradients.accumulation.join_and_show(self._apart)
            self._apart = None

    def end_micro_batch(self, work: Work) -> None:
        self._loop.micro_batches.paces.append(work.slowest_s / work.samples)
        self.step_state.work.add(work)
        self._loop.micro_batches.timed(work)

    def count_micro_batch(self, figures: dict[str, Any], opened: float) -> None:
        if figures:
            self.step_state.work.add(Work(added=figures))

    def may_be_left(self, busy: bool) -> bool:
        return False

    def end_work(self) -> None:
        if self.step_state.work.micro_batches:
            self._clock.end()

    def start_rest_and_wait(self) -> bool:
        """Start the sums that are left and wait for the device; return whether this worker's gradients are finite.

        The round reports the device's true seconds, so it is waited for once per step.
        """
        self._gradients.start_rest()
        wait_for_event(mark(self._loop.device), self._loop, self.step_state.index)
        if (seconds := self._clock.seconds()) is not None:
            self.step_state.work.seconds = seconds
        return self._gradients.finite()

    def run(self) -> bool:
        step_state, transport = self.step_state, self._loop.transport
        if self._loop.membership is not None:
            self._loop.membership.keep_up()
        finite = self.start_rest_and_wait()
        entered = concurrency.perf_counter()
        header = self._exchange_as_group() if transport.grouped else self._exchange(finite)
        waited = concurrency.perf_counter() - entered
        self._round_s = max(0.0, waited - float(header.column("seconds").max() - step_state.work.seconds))
        step_state.header = header
        return True

    def run_ahead(self, clip_norm: float | None) -> StepAhead:
        """Make the mean of a worker alone on its device, without waiting for it."""
        self._gradients.start_rest()
        self.ahead = StepAhead(self._loop, self.step_state, self._clock, clip_norm)
        self.step_state.header = self.ahead.header
        return self.ahead

    def _exchange(self, finite: bool) -> Header:
        """Sum with the others."""

        def write() -> Header:
            self._late_s = self._in_flight.late_s if self._in_flight is not None else 0.0
            return self._write_header(finite=finite, late_s=self._late_s)

        return self._gradients.exchange.run(write, self.step_state.work.samples, self._label)

    def _exchange_as_group(self) -> Header:
        """Sum with the others, where each worker is a group of processes: the first one runs the round for all."""
        step_state, transport = self.step_state, self._loop.transport
        reports = transport.collect(self._label, (step_state.work.sums(), step_state.settings_digest))
        for work, _ in reports[1:]:
            step_state.work.add(work)
        vector = transport.once(self._label, lambda: self._exchange_for_all([digest for _, digest in reports]))
        header = Header(self._gradients.layout)
        header.vector[:] = vector
        return header

    def _exchange_for_all(self, digests: Sequence[float]) -> Any:
        if len(set(digests)) > 1:
            raise MisuseError(
                f"the processes of a worker have unlike learning rates or other settings of their optimisers in step "
                f"{self.step_state.index}: call scheduler.step() in every process, never in the first alone"
            )
        return self._exchange(self._gradients.start()).vector

    def make_record(self, applied: bool) -> StepRecord | None:
        """Make and return the step's record; from here on a change of members counts this round (`count`)."""
        step_state = self.step_state
        assert step_state.header is not None
        norm = self._gradients.mean_gradient.known_norm if applied else None
        step_state.record = self._record_of(step_state.header, round_s=self._round_s, grad_norm=norm)
        return self._loop.dealing.in_samples(step_state.record)

    def count(self) -> None:
        if self.step_state.record is not None and self.step_state.round_phase is RoundPhase.OPEN:
            self._loop.training.keep_before(self.step_state)
            self._count(began=self.step_state.began or self.step_state.opened)

    def commit(self, began: float) -> None:
        if not self.step_state.over:
            self._count(began)

    def _count(self, began: float) -> None:
        loop, step_state = self._loop, self.step_state
        assert step_state.record is not None
        assert step_state.header is not None
        if loop.membership is not None:
            loop.membership.note_intentions(
                step_state.header, workers=step_state.workers, generation=step_state.generation
            )
        with loop.training.lock:
            if self._in_flight is not None:
                self._in_flight.reported(self._late_s)
            wall_s = concurrency.perf_counter() - began
            record = loop.training.close(step_state, step_state.header, step_state.record, wall_s=wall_s)
            step_state.enter(RoundPhase.CLOSED)
            step_state.enter(RoundPhase.OVER)
            loop.training.lock.notify_all()
        if self.ahead is None:
            loop.training.note(record)

    def refuse_unlike(self, header: Header) -> None:
        if self._replicas is not None:
            self._replicas.refuse(self.step_state.index, header)

    def repair_replicas(self, header: Header) -> None:
        if self._replicas is not None:
            self._replicas.repair(self.step_state.index, header)
