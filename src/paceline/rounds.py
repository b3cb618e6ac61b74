"""One round of parameters: what a worker brings to it, and, when it is over, what it gave.

It runs on the worker's own thread, or on one of its own beside the local steps that follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from paceline.combine import Header
from paceline.period import Period


class Round:
    """A round of the averages."""

    def __init__(self, period: Period, *, header: Header, table: torch.Tensor, statistics: torch.Tensor) -> None:
        """``table``: the row of facts of each worker; ``statistics``: batch norm's, times this worker's samples. With
        ``header`` they hold the fleet's sums when the round is over."""
        self.period, self.header, self.table, self.statistics = period, header, table, statistics
        self.entered = time.perf_counter()
        self.update: Sequence[torch.Tensor] = ()
        """Beside local steps: this worker's update as it was when the round began."""
        self.total: Sequence[torch.Tensor] = ()
        """And what the fleet made of all updates."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run_beside(self, exchange: Callable[[Round], None]) -> None:
        """Exchange on a thread of its own."""
        self._thread = threading.Thread(target=self._run, args=(exchange,), name="paceline-round", daemon=True)
        self._thread.start()

    def _run(self, exchange: Callable[[Round], None]) -> None:
        try:
            exchange(self)
        except BaseException as error:  # it is the waiting thread's
            self._error = error

    @property
    def over(self) -> bool:
        """Whether nobody has to wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is over; an error of its thread is raised here."""
        if self._thread is not None:
            self._thread.join(timeout)
        if self._error is not None:
            raise self._error
