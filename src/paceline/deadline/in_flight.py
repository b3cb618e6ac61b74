"""Work under a deadline: micro-batches that the loop is done with and the device perhaps not.

One counts once the device is done with it and the round is still open. The user's thread waits for the device; the
proxy, which closes the round, only looks. Both hold the books' lock when they count.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import torch

from paceline.combine import Gradients
from paceline.combine.gradients.accumulation import Aside
from paceline.deadline.side_stream import Beside, Mark
from paceline.loop.step_state import Turn, Work


class Flight(NamedTuple):
    """A micro-batch under way on the device."""

    done: Work
    aside: Aside
    mark: Mark
    began: float


class Flights:
    """Those of this worker, in the order in which the loop finished them."""

    def __init__(
        self,
        device: torch.device,
        *,
        beside: Beside,
        gradients: Gradients,
        changed: threading.Condition,
        paces: deque[float],
    ) -> None:
        """``changed``: the books' lock. ``paces``: where to note a micro-batch's seconds a sample, once known."""
        self._device, self._beside, self._gradients, self._changed = device, beside, gradients, changed
        self._paces = paces
        self._flying: deque[Flight] = deque()
        self._landed = 0.0
        """When the last one did."""
        self._late_s = 0.0

    def clear(self) -> None:
        """Another step begins."""
        self._flying.clear()

    def late_s(self) -> float:
        """By how much work has come too late since the last call."""
        late, self._late_s = self._late_s, 0.0
        return late

    def start(self, turn: Turn, done: Work, aside: Aside, began: float) -> None:
        """The loop, which took it at ``began``, is done with one. A device is given one more to do meanwhile, and no
        more than that."""
        self._beside.keep(aside[0])
        self._flying.append(Flight(done, aside, Mark(self._device), began))
        self.land(turn, leave=1 if self._device.type == "cuda" else 0)

    def land(self, turn: Turn, *, leave: int = 0) -> None:
        """Wait for all but the last so many."""
        while (flight := self._first_of_more_than(leave)) is not None:
            flight.mark.wait()
            with self._changed:
                if self._flying and self._flying[0] is flight:  # the proxy may have counted it
                    self._count_first(turn)

    def count_landed(self, turn: Turn) -> None:
        """For the proxy, which closes the turn: count what the device has done; the rest never counts."""
        while self._flying and self._flying[0].mark.passed():
            self._count_first(turn)

    def _first_of_more_than(self, leave: int) -> Flight | None:
        with self._changed:  # the proxy may take it in between
            return self._flying[0] if len(self._flying) > leave else None

    def _count_first(self, turn: Turn) -> None:
        done, aside, _, began = self._flying.popleft()
        now = time.perf_counter()
        if self._device.type == "cuda":  # only now is known how long it took
            done.slowest_s = now - max(began, self._landed)
            done.seconds = now - max(began, self._landed) if turn.work.samples else now - began
            self._paces.append(done.slowest_s / done.samples)
        self._landed = now
        if self._flying:
            turn.busy_since = self._flying[0].began
        elif turn.busy_since is None or turn.busy_since <= began:  # else the loop is in the next one
            turn.busy_since = now
        if not turn.open:
            self._late_s = max(self._late_s, now - (turn.until or turn.opened))
            return
        with self._beside.work():
            self._gradients.accumulation.join(aside)
            turn.work.add(done)
