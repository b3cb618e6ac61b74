"""Work under a deadline: micro-batches that the loop is done with and the device perhaps not.

One counts once the device is done with it and the round is still open. The user's thread waits for the device; the
proxy, which closes the round, only looks. Both hold the lock of the training's state when they count.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from paceline import concurrency
from paceline.combine.gradients.accumulation import Aside
from paceline.deadline.side_stream import SideStream, StreamMark
from paceline.loop.context import LoopContext
from paceline.loop.step_state import StepState, Work


class MicroBatchInFlight(NamedTuple):
    """A micro-batch under way on the device."""

    step_state: StepState
    done: Work
    aside: Aside
    mark: StreamMark
    began: float


class WorkInFlight:
    """Those of this worker, in the order in which the loop finished them."""

    def __init__(self, loop: LoopContext, side_stream: SideStream) -> None:
        self._device, self._gradients, self._paces = loop.device, loop.gradients, loop.paces
        self._changed, self._side_stream = loop.training.changed, side_stream
        self._waiting: deque[MicroBatchInFlight] = deque()
        self._landed = 0.0
        """When the last one did."""
        self._late_s = 0.0

    def clear(self) -> None:
        """Another step begins."""
        self._waiting.clear()

    def late_s(self) -> float:
        """By how much work has come too late since the last call."""
        late, self._late_s = self._late_s, 0.0
        return late

    def start(self, step_state: StepState, done: Work, aside: Aside, began: float) -> None:
        """The loop, which took it at ``began``, is done with one. A device is given one more to do meanwhile, and no
        more than that."""
        self._side_stream.keep(aside[0])
        self._waiting.append(MicroBatchInFlight(step_state, done, aside, StreamMark(self._device), began))
        self.land(leave=1 if self._device.type == "cuda" else 0)

    def land(self, *, leave: int = 0) -> None:
        """Wait for all but the last so many."""
        while (flight := self._first_of_more_than(leave)) is not None:
            flight.mark.wait()
            with self._changed:
                if self._waiting and self._waiting[0] is flight:  # the proxy may have counted it
                    self._count_first()

    def count_landed(self) -> None:
        """For the proxy, which closes the step: count what the device has done; the rest never counts."""
        while self._waiting and self._waiting[0].mark.passed():
            self._count_first()

    def _first_of_more_than(self, leave: int) -> MicroBatchInFlight | None:
        with self._changed:  # the proxy may take it in between
            return self._waiting[0] if len(self._waiting) > leave else None

    def _count_first(self) -> None:
        """Count the first one in the step it was begun in, which may be over: the loop may be a step behind."""
        step_state, done, aside, _, began = self._waiting.popleft()
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
        if not step_state.open:
            self._late_s = max(self._late_s, now - (step_state.until or step_state.opened))
            return
        with self._side_stream.work():
            self._gradients.accumulation.join(aside)
            step_state.work.add(done)
