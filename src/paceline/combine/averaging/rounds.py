"""One round of parameters: what a worker brings to it, and, when it is over, what it gave.

It runs on the worker's own thread, or on one of its own beside the local steps that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import concurrency
from paceline.combine import Header
from paceline.combine.averaging.period import Period
from paceline.combine.flats import Flats
from paceline.combine.gradients.buffers import SeenBuffers
from paceline.combine.gradients.exchange import Buffers
from paceline.combine.header import Layout


class Round:
    """A round of the averages."""

    def __init__(
        self, period: Period, *, header: Header, table: torch.Tensor, statistics: torch.Tensor, total: Flats
    ) -> None:
        """``table``: the row of facts of each worker; ``statistics``: batch norm's, times this worker's samples;
        ``total``: room for the weighted updates. With ``header`` they hold the fleet's sums when the round is over."""
        self.period, self.header, self.table, self.statistics, self.total = period, header, table, statistics, total
        self.update: Sequence[torch.Tensor] | None = None
        """Beside local steps: this worker's update as it was when the round began."""
        self.seen: SeenBuffers | None = None
        """This worker's buffers as they were when the round began."""
        self.buffers: Buffers | None = None
        """Those that all workers take over; None: none had changed."""
        self.averages = True
        """Whether parameters were averaged in it, and not only samples counted."""
        self.ended: float | None = None
        """When it was over, where another thread than the user's ran it."""
        self._thread: concurrency.Thread | None = None
        self._error: BaseException | None = None

    def wired(self) -> list[torch.Tensor]:
        """The facts, as they are sent."""
        return [self.table, self.header.tensor(), *([self.statistics] if self.statistics.numel() else [])]

    def emptied(self, layout: Layout) -> Round:
        """Another one of the same period, with room for the same sums; ``layout`` is the header's."""
        return Round(
            self.period,
            header=Header(layout),
            table=torch.zeros_like(self.table),
            statistics=torch.zeros_like(self.statistics),
            total=Flats(self.total.views),
        )

    def run_beside(self, exchange: Callable[[Round], object]) -> None:
        """Exchange on a thread of its own."""
        self._thread = concurrency.Thread(target=self._run, args=(exchange,), name="paceline-round", daemon=True)
        self._thread.start()

    def _run(self, exchange: Callable[[Round], object]) -> None:
        try:
            exchange(self)
        except BaseException as error:  # it is the waiting thread's
            self._error = error

    @property
    def facts(self) -> NDArray[np.float64]:
        """After the table's sum: what each worker says of its update."""
        facts: NDArray[np.float64] = self.table[:, 2:].cpu().numpy()
        return facts

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
