"""Rounds with a deadline: whether a loop may have them (`Allowed`), its parts for them (`Deadlines`), and the round.

The proxy's thread runs a `DeadlineRound` (`paceline.step.round` has the other kind). The loop is done with a
micro-batch before the device may be. It counts when the device is done with it while the round is still open
(`WorkInFlight`). The user's thread waits for the device; the proxy, which closes the round, only polls it. Both hold
the lock of the training's state when they count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from paceline import concurrency
from paceline.checkpoint import content as checkpoint
from paceline.errors import Dropped
from paceline.feed.micro_batches import MicroBatch
from paceline.gradients import Header
from paceline.gradients.accumulation import MicroBatchGradient
from paceline.gradients.buckets import Among
from paceline.gradients.exchange import Sum
from paceline.pace.steering import fit, ladder, recent_pace
from paceline.records import StepRecord
from paceline.step.context import LoopContext
from paceline.step.device import SideStream, StreamMark
from paceline.step.late.catch_up import Promises
from paceline.step.late.proxy import Proxy
from paceline.step.members import loop_state, take_loop_state
from paceline.step.round import StepRound
from paceline.step.step_state import LoopPhase, RoundPhase, StepState, Work


class MicroBatchInFlight(NamedTuple):
    """A micro-batch under way on the device."""

    step_state: StepState
    done: Work
    gradient: MicroBatchGradient
    mark: StreamMark
    began: float


class WorkInFlight:
    """This worker's micro-batches in flight, in the order in which the loop finished them."""

    def __init__(self, loop: LoopContext, side_stream: SideStream) -> None:
        self._device, self._gradients, self._paces = loop.device, loop.gradients, loop.micro_batches.paces
        self._lock, self._side_stream = loop.training.lock, side_stream
        self._waiting: deque[MicroBatchInFlight] = deque()
        self._landed = 0.0
        """The time when the last micro-batch was seen to be done."""
        self.late_s = 0.0
        """The most seconds by which a micro-batch came too late since a round has reported it."""

    def clear(self) -> None:
        """Forget all micro-batches: another step begins."""
        self._waiting.clear()

    def reported(self, late_s: float) -> None:
        """Note that a round is over which has reported ``late_s``; the lock is held."""
        if self.late_s <= late_s:  # else one came too late meanwhile, and is reported next
            self.late_s = 0.0

    def start(self, step_state: StepState, done: Work, gradient: MicroBatchGradient, began: float) -> None:
        """Add a micro-batch that the loop took at ``began`` and is done with.

        A GPU may have one more in flight meanwhile, and no more than that.
        """
        self._side_stream.keep(done, gradient)
        self._waiting.append(MicroBatchInFlight(step_state, done, gradient, StreamMark(self._device), began))
        self.land(leave=1 if self._device.type == "cuda" else 0)

    def add_figures(self, step_state: StepState, figures: dict[str, Any]) -> None:
        """Add figures that the script gave outside of a micro-batch."""
        self._side_stream.keep(figures)
        self._side_stream.follow()
        with self._lock, self._side_stream.work():
            step_state.work.add(Work(added=figures))

    def land(self, *, leave: int = 0) -> None:
        """Wait for all micro-batches except the last ``leave``, and count them."""
        while (flight := self._first_of_more_than(leave)) is not None:
            flight.mark.wait()
            with self._lock:
                if self._waiting and self._waiting[0] is flight:  # the proxy may have counted it
                    self._count_first()

    def count_landed(self) -> None:
        """Count what the device has done, on the proxy's thread."""
        while self._waiting and self._waiting[0].mark.passed():
            self._count_first()

    def _first_of_more_than(self, leave: int) -> MicroBatchInFlight | None:
        with self._lock:  # the proxy may take it in between
            return self._waiting[0] if len(self._waiting) > leave else None

    def _count_first(self) -> None:
        """Count the first micro-batch in the step in which it began, which may be over: the loop may be behind."""
        step_state, done, gradient, _, began = self._waiting.popleft()
        now = concurrency.perf_counter()
        if self._device.type == "cuda":  # only now is known how long it took
            done.slowest_s = now - max(began, self._landed)
            done.seconds = now - max(began, self._landed) if step_state.work.samples else now - began
            self._paces.append(done.slowest_s / done.samples)
        self._landed = now
        if self._waiting:
            step_state.busy_since = self._waiting[0].began
        elif step_state.busy_since is None or step_state.busy_since <= began:  # else the loop is in the next one
            step_state.busy_since = now
        if not step_state.takes_work:
            self.late_s = max(self.late_s, now - (step_state.until or step_state.opened))
            return
        with self._side_stream.work():
            self._gradients.accumulation.join(gradient)
            step_state.work.add(done)


class DeadlineRound(StepRound):
    """A round that closes at its deadline, or with the first shares that are done, whoever is late.

    The user's thread puts micro-batches in and takes the result over, perhaps steps later. The proxy's thread seals the
    round, runs it and makes its record.
    """

    def __init__(self, loop: LoopContext, step_state: StepState, deadlines: Deadlines) -> None:
        super().__init__(loop, step_state)
        self._deadlines = deadlines
        self._lock = loop.training.lock
        self._finished: Work | None = None
        """The micro-batch that the loop is done with, until it comes back for more."""
        self._late_s = 0.0

    # -- micro-batches: the user's thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._finished = None

    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        while self._still_open(opened):
            until = self.step_state.until
            room = 0 if self.step_state.loop_phase is LoopPhase.CUT_OFF else self._room()
            taken = self._loop.micro_batches.source.take(room) if room != 0 else None
            if taken is not None or not self._another_lap(until):
                return taken, opened
            opened = concurrency.perf_counter()
        return None, opened

    def _still_open(self, now: float) -> bool:
        """Return whether the round is open for the micro-batch that the loop asks for ``now``."""
        with self._lock:
            self.step_state.busy_since = now if self.step_state.takes_work else None
            return not self.step_state.closed

    def _room(self) -> int | None:
        """Return the samples that the time left allows, perhaps 0; None where there is no deadline."""
        step_state, dealing, micro_batches = self.step_state, self._loop.dealing, self._loop.micro_batches
        if step_state.until is None:
            return None
        largest, smallest = dealing.micro_batch, dealing.smallest
        sizes = [size for size in ladder(largest) if size >= smallest] if not micro_batches.uncut else [largest]
        fits = fit(step_state.until - concurrency.perf_counter(), recent_pace(list(micro_batches.paces)), sizes)
        if not fits and not step_state.work.samples:  # or a slow worker would never be seen to recover
            return sizes[-1]
        return fits

    def _another_lap(self, until: float | None) -> bool:
        """Return whether another lap, or an extension, deals more: the share is done, or nothing fits ``until``."""
        step_state = self.step_state
        if step_state.closed or not (step_state.last or step_state.floor):
            return False
        self._deadlines.in_flight.land()  # else what is dealt again might still come in
        try:
            return self._deadlines.proxy.wait_for_more(step_state, gone=False, until=until)
        except Dropped:  # the commit raises it again
            return False

    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        if self._check():
            self._backward_apart(loss, weight, among=among, **graph)

    def _check(self) -> bool:
        """Check the script's parameters and gradients; return False when the round is closed to its work."""
        with self._lock:
            if self.step_state.takes_work:
                self._gradients.accumulation.check_apart()
            return self.step_state.takes_work

    def end_backward(self) -> None:
        """Do nothing: the micro-batch joins the sum when the loop comes back for more (`count_micro_batch`)."""

    def end_micro_batch(self, work: Work) -> None:
        if self._loop.device.type != "cuda":
            self._loop.micro_batches.paces.append(work.slowest_s / work.samples)
        self._finished = work
        self._loop.micro_batches.timed(work)

    def count_micro_batch(self, figures: dict[str, Any], opened: float) -> None:
        finished, apart = self._finished, self._apart
        self._finished = self._apart = None
        if finished is None:
            self._deadlines.in_flight.add_figures(self.step_state, figures)
            return
        finished.added = figures
        self._check()
        self._deadlines.in_flight.start(
            self.step_state, finished, apart or self._gradients.accumulation.no_gradient(), opened
        )
        with self._lock:
            self._gradients.buckets.show()

    def may_be_left(self, busy: bool) -> bool:
        return not busy or not self.step_state.takes_work  # what is left stays in this worker's queue

    def end_work(self) -> None:
        """Do nothing: the proxy ends the work, and may have sealed the round long since."""

    # -- the round: the proxy's thread ---------------------------------------------------------------------------------

    def run_for_worker(self) -> tuple[Header, Sum, StepRecord]:
        """Close the round with what is finished and run it; return its header, its sums and its record."""
        entered = concurrency.perf_counter()
        header, total = self._gradients.exchange.run_in_background(self._seal, self._label)
        with self._lock:
            self._deadlines.in_flight.reported(self._late_s)
        return header, total, self._record_at(header, entered)

    def _seal(self) -> tuple[Header, Sum]:
        """Close the round to further work, and return what this worker brings to it."""
        step_state, deadlines = self.step_state, self._deadlines
        with self._lock:
            deadlines.in_flight.count_landed()
            step_state.enter(RoundPhase.CLOSED)
            counts = step_state.began is not None and (
                step_state.plan.wait_for is None
                or step_state.idle
                or step_state.last
                or bool(step_state.ranges)  # a lap below the floor has counted what everybody had finished
            )
            mine = self._gradients.close(step_state.work.samples) if counts else self._gradients.exchange.nothing()
            self._late_s = deadlines.in_flight.late_s
            busy = 0.0 if step_state.idle else concurrency.perf_counter() - (step_state.busy_since or step_state.opened)
            header = self._write_header(
                finite=mine.finite,
                counts=counts,
                unfinished_s=busy,
                behind=max(0, step_state.index - self._loop.position.next),
                late_s=self._late_s,
                wants_state=deadlines.proxy.backlog.wants_copy,
            )
            return header, mine

    def _record_at(self, header: Header, entered: float) -> StepRecord:
        """Return the record of the round, which is over and which this worker entered at ``entered``."""
        step_state = self.step_state
        wall_s = concurrency.perf_counter() - step_state.opened
        busy = float((header.column("seconds") + header.column("unfinished_s")).max())
        latest = max(entered - step_state.opened, min(busy, step_state.plan.deadline_s or busy))
        record = self._record_of(header, round_s=max(0.0, wall_s - latest), by_deadline=True)
        return replace(record, wall_s=wall_s + self._deadlines.commit_s)

    # -- its result: the user's thread ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Wait until the proxy has run the round, and take its result over; it may be over long since."""
        step_state, deadlines, proxy = self.step_state, self._deadlines, self._deadlines.proxy
        deadlines.in_flight.land()
        if step_state.takes_work and step_state.began is not None:
            self._check()
        if not step_state.over:
            proxy.wait_for_more(step_state, gone=True)
        with self._lock:
            self._lock.wait_for(lambda: step_state.over or proxy.error)
        if not step_state.over and proxy.error is not None:
            raise proxy.error
        assert step_state.header is not None
        self._gradients.buckets.show()
        deadlines.side_stream.rejoin()
        total = step_state.total
        if total is None:
            deadlines.promises.decline()
            return False
        buffers = [total.buffers[1]] if total.buffers is not None else []
        deadlines.side_stream.lend([*total.flats, total.statistics, *buffers])
        self._gradients.exchange.adopt(total, step_state.header)
        return True

    def make_record(self, applied: bool) -> StepRecord | None:
        return self.step_state.record

    def commit(self, began: float) -> None:
        self._deadlines.proxy.backlog.forget(self.step_state)


class Deadlines:
    """The parts of a loop for rounds that wait for nobody: a proxy, work in flight on the device, and catching up."""

    def __init__(
        self, loop: LoopContext, make_round: Callable[[StepState], DeadlineRound | None], *, copies: bool = True
    ) -> None:
        """Make the parts.

        ``make_round`` makes the round of a step that the proxy opens, and returns None where it has no deadline.
        ``copies``: whether a worker that is far behind may take over a copy of a peer's state.
        """
        if loop.dealing.length is None:
            raise ValueError(
                "rounds with a deadline (pace joint or cutoff) need a dataset with a length: an iterable one cannot "
                "give again what a deadline cut off; use pace adaptive"
            )
        self._loop, self.make_round, self._copies = loop, make_round, copies
        self.side_stream = SideStream(loop.device)
        self.in_flight = WorkInFlight(loop, self.side_stream)
        self.promises = Promises(loop.transport)
        self.commit_s = 0.0
        """The seconds of the last update."""
        self.proxy = Proxy(loop, self)

    def copyable(self) -> bool:
        """Return whether a copy of a peer's state would hold everything that has state."""
        script = self._loop.script
        return self._copies and script.copyable and script.plain and not self._loop.tracking.stepped_untracked()

    def round_over(self) -> None:
        """Note that a round with a deadline has ended: entries of newcomers are spaced by these rounds too."""
        if self._loop.membership is not None:
            self._loop.membership.round_over()

    # -- the loop's course -------------------------------------------------------------------------------------------

    def between_steps(self) -> int | None:
        """Send the copies that were promised, and take over one that has come; return the step that it follows."""
        self._give()
        return self._take_copy()

    def begin(self) -> None:
        """Begin another step on this worker."""
        self.in_flight.clear()
        self.side_stream.follow()

    def end(self) -> None:
        """Send the copies that were promised: the loop has come to its end."""
        self._give()

    def _give(self) -> None:
        self.promises.give(self._packed, after=self._loop.position.next - 1)

    def _packed(self) -> torch.Tensor:
        return checkpoint.pack(loop_state(self._loop))

    def _take_copy(self) -> int | None:
        """Take over a peer's state where one was promised, and with it the peer's position in the training."""
        loop, proxy, backlog = self._loop, self.proxy, self.proxy.backlog
        with loop.training.lock:
            loop.training.lock.wait_for(lambda: proxy.error or backlog.copied is None or backlog.copied.here)
            copy, backlog.copied = backlog.copied, None
        error = proxy.error or (copy.error if copy is not None else None)
        if error is not None:
            raise error
        if copy is None:
            return None
        skipped = copy.index + 1 - loop.position.next
        take_loop_state(loop, checkpoint.unpack(copy.data, device=loop.device))
        assert loop.position.next == copy.index + 1
        text = f"worker {loop.transport.rank} was {skipped} steps behind and took over a peer's state"
        loop.notes.warn(text)
        return copy.index

    # -- newcomers and the end ---------------------------------------------------------------------------------------

    def restart(self, position: Any) -> None:
        """Start a new proxy where a peer's is: this newcomer has taken over the peer's state."""
        self.proxy.stop()
        self.proxy = Proxy(self._loop, self)
        self.proxy.take_position(position)

    def members_changed(self) -> None:
        self.promises.members_changed()
        self.proxy.backlog.forget_copy()

    def close(self, *, orderly: bool) -> None:
        if orderly:
            if self._loop.position.finished:
                self._give()
            self.promises.close()  # whoever takes over a copy does not see the step behind which the script left
            self.promises.join()
        self.proxy.stop_together() if orderly and not self._loop.position.finished else self.proxy.stop()
        if orderly:
            self.proxy.join()


class Allowed:
    """The check, before every plan, whether the plan may have a deadline.

    Where the script or the transport cannot do with deadlines the pace stays adaptive, and the reason is logged once.
    """

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def __call__(self) -> bool:
        """Return whether the next plan may have a deadline."""
        if why := self.why_not():
            self._loop.notes.log_once(f"pace {self._loop.training.pacer.name} stays adaptive: {why}")
        return not why

    def why_not(self) -> str:
        """Return the reason why there may be no deadline; empty when there may be one."""
        loop, transport = self._loop, self._loop.transport
        if loop.dealing.length is None:
            return "an iterable dataset cannot give again what a deadline cut off"
        if transport.backend == "nccl":
            return "rounds over NCCL have a deadline only where pace='joint' asks for one"
        if transport.elastic and loop.device.type == "cuda":
            return "workers with GPUs come and go, and rounds may turn to NCCL"
        if loop.script.own_updates:
            return "step.reduce() gives the gradient to the script, which may need that of the whole batch"
        if loop.gradients.accumulation.refrozen:
            return "parameters were frozen or unfrozen in this loop, which rounds with a deadline cannot follow"
        return ""
