"""A step's round as the user's loop sees it: micro-batches go in, and it is run.

`StepRound` is the interface. Here is the round that waits for everybody: it runs on the user's thread, and its sums
overlap with the last backward. Rounds with a deadline are in deadline/rounds.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline import concurrency
from paceline.combine import Header
from paceline.combine.gradients.accumulation import Aside
from paceline.combine.gradients.buckets import Among
from paceline.errors import MisuseError
from paceline.feed.micro_batches import MicroBatch
from paceline.loop.context import LoopContext
from paceline.loop.device_clock import DeviceClock, mark, wait_for
from paceline.loop.replicas import likely_causes
from paceline.loop.sameness import unlike_modes, unlike_text
from paceline.loop.step_recording import record_of, write_header
from paceline.loop.step_state import RoundPhase, StepState, Work
from paceline.loop.training_state import differ
from paceline.records import StepRecord

COMPARE_EVERY = 100
"""Steps between two comparisons of the replicas' parameters, and how long a repair must hold."""
COMPARE_EARLY = (1, 2, 4, 8, 16, 32, 64)
"""Steps at which replicas are compared too: what parts them mostly does so from the beginning."""


class StepRound(Protocol):
    """One step's round on one worker."""

    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        """The next micro-batch, asked for at ``opened``, and when it was really taken. None: there is no more."""

    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        """Add a loss of the open micro-batch."""

    def drop(self) -> None:
        """The open micro-batch comes again: what it has had so far is for nothing."""

    def end_backward(self) -> None:
        """The open micro-batch has had all its losses."""

    def done(self, work: Work) -> None:
        """The open micro-batch is used."""

    def next(self, figures: dict[str, Any], opened: float) -> None:
        """The loop comes back for more. ``figures`` were added meanwhile; the micro-batch was taken at ``opened``."""

    def may_be_left(self, busy: bool) -> bool:
        """Whether the loop may go on to the round though it has not done its share. ``busy``: in a micro-batch."""

    def end_work(self, began: float) -> None:
        """All micro-batches, the first of them taken at ``began``, are used."""

    def run(self) -> bool:
        """Run the round, or wait for it. False: a peer's state is taken over instead of what it gave."""

    def record(self, header: Header, applied: bool) -> StepRecord | None:
        """What happened, as the script is told."""

    def commit(self, header: Header, began: float) -> None:
        """The update was made: this worker is done with the step, which it began at ``began``."""

    def refuse(self, header: Header) -> None:
        """Before the update: raise MisuseError where the workers do not hold the same, if this is the place to see."""

    def compare(self, header: Header) -> None:
        """After the commit: make replicas equal that have drifted apart, where this is the place for it."""


class InlineRound:
    """A round that waits for everybody."""

    def __init__(
        self,
        loop: LoopContext,
        step_state: StepState,
        replicas: ReplicaComparison | None = None,
        *,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``late_s``: by how much work of an earlier step came too late for its deadline, since it was last asked."""
        self._loop, self._step_state, self._gradients, self._replicas = loop, step_state, loop.gradients, replicas
        self._late_s = late_s
        self._aside: Aside | None = None
        """Where a micro-batch may have to come again (``micro_batch="auto"``): the gradients of its parts so far."""
        self._round_s = 0.0
        self._clock = DeviceClock(loop.device)

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        self._clock.begin()
        return self._loop.source.take(), opened

    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        if among is not None and self._gradients.whole:  # the part before may be for nothing
            self._gradients.accumulation.begin_whole()
            self._aside = both(
                self._aside, self._gradients.accumulation.backward_aside(loss, weight, among=among, **graph)
            )
        else:
            self._gradients.backward(loss, weight, last=micro.last, among=among, **graph)

    def drop(self) -> None:
        self._aside = None

    def end_backward(self) -> None:
        if self._aside is not None:
            self._gradients.accumulation.join_whole(self._aside)
            self._aside = None

    def done(self, work: Work) -> None:
        self._loop.paces.append(work.slowest_s / work.samples)
        self._step_state.work.add(work)
        self._loop.timed(work)

    def next(self, figures: dict[str, Any], opened: float) -> None:
        if figures:
            self._step_state.work.add(Work(added=figures))

    def may_be_left(self, busy: bool) -> bool:
        return False

    def end_work(self, began: float) -> None:
        if self._step_state.work.micro_batches:
            self._clock.end()

    def finish(self) -> bool:
        """Start the sums that are left, and wait for the device, once a step: the round needs its true time. True if
        this worker's gradients are finite."""
        self._gradients.finish()
        wait_for(mark(self._loop.device), self._loop, self._step_state.index)
        if (seconds := self._clock.seconds()) is not None:
            self._step_state.work.seconds = seconds
        return self._gradients.finite()

    # -- the round ---------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        step_state = self._step_state
        if self._loop.membership is not None:
            self._loop.membership.keep_up()
        finite = self.finish()
        entered = concurrency.perf_counter()
        label, transport = f"the round of step {step_state.index}", self._loop.transport
        if not transport.grouped:
            header = self._exchange(label, finite)
        else:
            told = transport.collect(label, (step_state.work.sums(), step_state.rates))
            for work, _ in told[1:]:
                step_state.work.add(work)
            vector = transport.once(label, lambda: self._exchange_as_group(label, [rates for _, rates in told]))
            header = Header(self._gradients.layout)
            header.vector[:] = vector
        waited = concurrency.perf_counter() - entered
        self._round_s = max(0.0, waited - float(header.column("seconds").max() - step_state.work.seconds))
        step_state.header = header
        return True

    def _exchange(self, label: str, finite: bool) -> Header:
        """Sum with the others, as often as it takes."""
        samples = self._step_state.work.samples
        while (header := self._gradients.exchange.run(lambda: self._write_header(finite), samples, label)) is None:
            pass
        return header

    def _exchange_as_group(self, label: str, rates: Sequence[float]) -> Any:
        """The same on the first of a worker's processes, for all of them: what the header then holds."""
        if len(set(rates)) > 1:
            raise MisuseError(
                f"the processes of a worker have unlike learning rates or other settings of their optimisers in step "
                f"{self._step_state.index}: call scheduler.step() in every process, never in the first alone"
            )
        return self._exchange(label, self._gradients.start()).vector

    def _write_header(self, finite: bool) -> Header:
        members = self._loop.membership
        intentions = members.intentions() if members is not None else {}
        return write_header(self._loop, self._step_state, {"late_s": self._late_s(), **intentions}, finite=finite)

    def record(self, header: Header, applied: bool) -> StepRecord | None:
        loop, step_state = self._loop, self._step_state
        norm = self._gradients.mean_gradient.known_norm if applied else None
        step_state.record = record_of(
            step_state,
            header,
            loop.transport.slot_name,
            round_s=self._round_s,
            emulated=loop.machine is not None,
            auto=loop.auto,
            grad_norm=norm,
        )
        return loop.dealing.told(step_state.record)

    def commit(self, header: Header, began: float) -> None:
        loop, step_state = self._loop, self._step_state
        assert step_state.record is not None
        if loop.membership is not None:
            loop.membership.heard(header, workers=step_state.workers, generation=step_state.generation)
        with loop.training.changed:
            record = loop.training.close(
                step_state, header, step_state.record, wall_s=concurrency.perf_counter() - began
            )
            step_state.enter(RoundPhase.CLOSED)
            step_state.enter(RoundPhase.OVER)
            loop.training.changed.notify_all()
        loop.training.note(record)

    def refuse(self, header: Header) -> None:
        if self._replicas is not None:
            self._replicas.refuse(self._step_state.index, header)

    def compare(self, header: Header) -> None:
        if self._replicas is not None:
            self._replicas.compare(self._step_state.index, header)


class ReplicaComparison:
    """Replicas are compared now and then. Where they differ the run is stopped, or, where unlike devices round
    differently, they are made equal."""

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def fingerprint(self, step_state: StepState) -> float:
        """Of what this worker holds, in steps in which replicas are compared; else 0."""
        early = self._loop.alike and step_state.index in COMPARE_EARLY
        regular = step_state.index % COMPARE_EVERY == 0 or early
        due = self._loop.transport.size > 1 and (regular or step_state.compare)
        self._loop.gradients.accumulation.asks_modes = due
        if not due or self._loop.compared == step_state.index:
            return 0.0
        return 1.0 + self._loop.contents().number(self._loop.transport)

    def refuse(self, step: int, header: Header) -> None:
        """Before the update of a step that all have waited for: raise MisuseError where workers of like devices do not
        hold the same, or have unlike modules in evaluation mode. Unlike devices round differently (`compare`)."""
        loop = self._loop
        if loop.alike and differ(header):
            everybody = loop.transport.gather("comparing replicas", lambda: loop.contents().by_name())
            causes = likely_causes(loop.tracking.missing())
            raise MisuseError(
                unlike_text(everybody, when=f"in step {step}", causes=causes)
                or f"workers did not hold the same when step {step} began"
            )
        if differ(header, "modes"):
            everybody = loop.transport.gather("comparing modes", loop.gradients.accumulation.evaluating)
            if text := unlike_modes(everybody, step=step):
                raise MisuseError(text)

    def compare(self, step: int, header: Header) -> None:
        """All workers' fingerprints are in the header of a round that all have waited for."""
        if not differ(header):
            return
        found = self._loop.repair()
        self._loop.gradients.statistics_were_set()
        text = found.text(step, missing=self._loop.tracking.missing())
        if not found.harmless:
            raise MisuseError(text)
        self._loop.warn_all(f"{text}. Parameters and everything tracked were set to worker 0's")


def both(first: Aside | None, second: Aside) -> Aside:
    """The gradients of two parts of a micro-batch, and the statistics after both."""
    if first is None:
        return second
    return [other if grad is None else grad for grad, other in zip(first[0], second[0], strict=True)], second[1]
