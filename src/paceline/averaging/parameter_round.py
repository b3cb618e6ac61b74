"""One round of parameters: what a worker brings to it, its sums, and what it gave when it is over.

It runs on the worker's own thread, or on one of its own beside the local steps that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import concurrency
from paceline.averaging.merge import SAMPLES, Merge, momentum_of
from paceline.averaging.period import NOTHING, Period, Unaveraged
from paceline.errors import GenerationOver
from paceline.gradients import Header
from paceline.gradients.buffers import BufferSnapshot, ModuleBuffers, RunningStatistics
from paceline.gradients.exchange import Buffers, share
from paceline.gradients.fleet_sums import Flats, Tensors, start_sum, try_sums
from paceline.gradients.header import Layout
from paceline.step.context import LoopContext
from paceline.step.step_state import measured
from paceline.transport.base import Pending
from paceline.transport.formats import Format
from paceline.transport.group import wait_for_all

Written = TypeVar("Written")


class ParameterRound:
    """A round of the averages."""

    def __init__(
        self, period: Period, *, header: Header, table: torch.Tensor, statistics: torch.Tensor, total: Flats
    ) -> None:
        """Hold what a worker brings; when the round is over, the tensors and ``header`` hold the fleet's sums.

        ``table``: the row of facts of each worker; ``statistics``: batch norm's, times this worker's samples;
        ``total``: room for the weighted updates.
        """
        self.period, self.header, self.table, self.statistics, self.total = period, header, table, statistics, total
        self.update: Sequence[torch.Tensor] | None = None
        """Beside local steps: this worker's update as it was when the round began."""
        self.seen: BufferSnapshot | None = None
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
        """Return the facts, as they are sent."""
        return [self.table, self.header.tensor(), *([self.statistics] if self.statistics.numel() else [])]

    def emptied(self, layout: Layout) -> ParameterRound:
        """Return another round of the same period, with room for the same sums; ``layout`` is the header's."""
        return ParameterRound(
            self.period,
            header=Header(layout),
            table=torch.zeros_like(self.table),
            statistics=torch.zeros_like(self.statistics),
            total=Flats(self.total.views),
        )

    def run_beside(self, exchange: Callable[[ParameterRound], object]) -> None:
        """Exchange on a thread of its own."""
        self._thread = concurrency.Thread(target=self._run, args=(exchange,), name="paceline-round", daemon=True)
        self._thread.start()

    def _run(self, exchange: Callable[[ParameterRound], object]) -> None:
        try:
            exchange(self)
        except BaseException as error:  # it is the waiting thread's
            self._error = error

    @property
    def facts(self) -> NDArray[np.float64]:
        """The facts of each worker's update, once the table is summed."""
        facts: NDArray[np.float64] = self.table[:, 2:].cpu().numpy()
        return facts

    @property
    def over(self) -> bool:
        """Whether nobody has to wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the round is over; an error of its thread is raised here."""
        if self._thread is not None:
            self._thread.join(timeout)
        if self._error is not None:
            raise self._error


class RoundExchange:
    """Writes rounds and runs them."""

    def __init__(
        self,
        loop: LoopContext,
        merge: Merge,
        models: Sequence[torch.nn.Module],
        *,
        overlaps: bool,
        averages: Callable[[ParameterRound], bool] = lambda round: True,
        wire_format: Format | None = None,
    ) -> None:
        """Write and run the rounds of this merge.

        ``averages``: whether a round whose facts are summed goes on to average; the answer is the same on all workers.
        ``wire_format``: format of the updates on the wire.
        """
        self._wire_format = wire_format
        self._loop, self.merge, self._overlaps, self._averages = loop, merge, overlaps, averages
        self.statistics = RunningStatistics(models)
        self.buffers = ModuleBuffers(loop.gradients.shared)
        self.fit()

    # -- written -----------------------------------------------------------------------------------------------------

    def write(
        self,
        period: Period,
        *,
        before: Unaveraged = NOTHING,
        number: int,
        call: float,
        present: bool,
        optimizers: Sequence[torch.optim.Optimizer],
        first_member: bool,
    ) -> ParameterRound:
        """Return what this worker brings to the round of this ``number``.

        ``before``: what it did in earlier periods that no average has in it; ``call``: what it waits to do together
        with the others; ``present``: whether its update counts.
        """
        transport, done = self._loop.transport, before + period
        self.statistics.note()
        table = torch.zeros(transport.size, self.merge.columns + 2, dtype=torch.float64)
        row = self.merge.row(
            steps=done.steps,
            samples=done.samples,
            contraction=done.contraction,
            momentum=momentum_of(optimizers),
            present=present,
        )
        table[transport.rank] = torch.tensor([call, period.wall_s, *row], dtype=torch.float64)
        header = self._write_period(period, number, first_member)
        statistics, total = self.statistics.payload(done.samples), Flats(self._loop.gradients.everything)
        seen = self.buffers.snapshot()
        header.counters[len(self.statistics) :] = self.buffers.flags(seen.changed)
        round = ParameterRound(period, header=header, table=table, statistics=statistics, total=total)
        round.seen = seen
        return round

    def _write_period(self, period: Period, number: int, first_member: bool) -> Header:
        loop, header = self._loop, Header(self.layout)
        header.write(
            loop.transport.rank,
            **measured(period),
            weight=period.weight,
            loss=period.loss,
            ended=False,
            **loop.micro_batches.sizes,
            **(loop.membership.intentions() if loop.membership is not None else {}),
        )
        loop.add_figures(header, period.added)
        if loop.transport.rank == 0:
            header.write_plan(loop.training.plan_for(number + 1))
        if first_member:  # batch norm's layers have counted the whole group's micro-batches on each member
            header.counters[: len(self.statistics)] = self.statistics.moved
        return header

    def persistently(self, write: Callable[[], Written]) -> Written:
        """Return what ``write`` returns; it may ask the store, which may be unreachable for a while."""
        while True:
            try:
                return write()
            except GenerationOver as over:
                self._loop.transport.recover(over)

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(self, round: ParameterRound, number: int) -> ParameterRound | None:
        """Run the sums of a round, on any thread, and return it, or another one that others handed over.

        None: members changed under it, and nothing came of it.
        """
        facts, rounds = round.wired(), [round]

        def average(sums: list[Pending]) -> None:
            round.averages = self._averages(round)
            if round.averages:
                round.total.fill(self.merge.part(round.facts, round.update))
                begun = self._start(round.total.flats, self._wire_format)
                sums += begun
                wait_for_all(begun)
                copies = round.seen.copies if round.seen is not None else None
                round.buffers = share(
                    self._loop.transport, self.buffers, round.header, len(self.statistics), sums, copies
                )
            if self._overlaps:
                self.finish_kernels()

        def renew(tensors: Tensors) -> Tensors:
            rounds.append(round.emptied(self.layout))
            return [*rounds[-1].wired(), *rounds[-1].total.flats]

        found = try_sums(
            self._loop.transport,
            f"the round after {number} rounds",
            [*facts, *round.total.flats],
            start=lambda tensors: self._start(facts),
            then=average,
            renew=renew,
            background=self._overlaps,
        )
        return None if found is None else rounds[-1]

    def _start(self, parts: Tensors, wire_format: Format | None = None) -> list[Pending]:
        """Start the fleet's sums of these tensors."""
        return [start_sum(self._loop.transport, part, wire_format) for part in parts]

    def finish_kernels(self) -> None:
        """Wait for what this thread has asked of the device: another thread goes on with it."""
        if self._loop.device.type == "cuda":
            torch.cuda.current_stream(self._loop.device).synchronize()

    # -- over --------------------------------------------------------------------------------------------------------

    def merge_statistics(self, round: ParameterRound) -> None:
        """Merge batch norm's running statistics, by samples as in every round, and take over other buffers."""
        if len(self.statistics):
            samples = float(round.facts[:, SAMPLES].sum())
            counts = round.header.counters[: len(self.statistics)].tolist()
            self.statistics.merge(round.statistics, samples, counts)
        if round.buffers is not None:
            self.buffers.take(*round.buffers)
        if len(self.statistics) or round.buffers is not None:
            self._loop.gradients.statistics_were_set()

    def members_changed(self, old_ranks: Sequence[int | None]) -> str | None:
        """Make room for other members, and return the merge's warning of them if there is one."""
        self.fit()
        return self.merge.members_changed(old_ranks)

    def fit(self) -> None:
        """Make room in the header for the present members."""
        self.layout = Layout(self._loop.transport.size, 0, len(self.statistics) + len(self.buffers))
