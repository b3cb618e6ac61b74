"""Work under a deadline: micro-batches that the loop is done with and the device perhaps not.

A micro-batch counts when the device is done with it while the round is still open. The user's thread waits for the
device; the proxy, which closes the round, only polls it. Both hold the lock of the training's state when they count.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from paceline import concurrency
from paceline.gradients.accumulation import MicroBatchGradient
from paceline.step.context import LoopContext
from paceline.step.device import SideStream, StreamMark
from paceline.step.step_state import StepState, Work


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
