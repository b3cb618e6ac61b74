"""The exchange of a round of parameters: what this worker writes into it, its sums, and going on when some are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from paceline.combine import Header
from paceline.combine.averaging.merging import SAMPLES, Averages, Merging, momentum_of
from paceline.combine.averaging.period import NOTHING, Period, Unaveraged
from paceline.combine.averaging.rounds import Round
from paceline.combine.flats import Flats
from paceline.combine.gradients.buffers import ModuleBuffers
from paceline.combine.gradients.exchange import broken_off, share
from paceline.combine.gradients.statistics import RunningStatistics
from paceline.combine.header import Layout
from paceline.combine.wire import start_sum, wait_for_sums
from paceline.errors import GenerationOver
from paceline.loop.context import LoopContext
from paceline.loop.step_recording import measured
from paceline.transport.base import Pending
from paceline.transport.formats import Format

Written = TypeVar("Written")


class RoundExchange:
    """Writes rounds and runs them."""

    def __init__(
        self,
        loop: LoopContext,
        merging: Merging,
        models: Sequence[torch.nn.Module],
        *,
        overlaps: bool,
        averages: Callable[[Round], bool] = lambda round: True,
        form: Format | None = None,
    ) -> None:
        """``averages``: whether a round whose facts are summed goes on to average; all workers must say the same.
        ``form``: of the updates on the wire."""
        self._form = form
        self._loop, self.merging, self._overlaps, self._averages = loop, merging, overlaps, averages
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
    ) -> Round:
        """What this worker brings to the round of this ``number``. ``before``: what it did in earlier periods that no
        average has in it; ``call``: what it waits to do together with the others; ``present``: whether its update
        counts."""
        transport, done = self._loop.transport, before + period
        self.statistics.note()
        table = torch.zeros(transport.size, self.merging.columns + 2, dtype=torch.float64)
        row = self.merging.row(
            steps=done.steps,
            samples=done.samples,
            contraction=done.contraction,
            momentum=momentum_of(optimizers),
            present=present,
        )
        table[transport.rank] = torch.tensor([call, period.wall_s, *row], dtype=torch.float64)
        header = self._write_period(period, number, first_member)
        statistics, total = self.statistics.payload(done.samples), Flats(self._loop.gradients.everything)
        seen = self.buffers.look()
        header.counters[len(self.statistics) :] = self.buffers.flags(seen.changed)
        round = Round(period, header=header, table=table, statistics=statistics, total=total)
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
            **loop.sizes,
            **(loop.membership.intentions() if loop.membership is not None else {}),
        )
        loop.add_figures(header, period.added)
        if loop.transport.rank == 0:
            header.write_plan(loop.training.plan_for(number + 1))
        if first_member:  # batch norm's layers have counted the whole group's micro-batches on each member
            header.counters[: len(self.statistics)] = self.statistics.moved
        return header

    def persistently(self, write: Callable[[], Written]) -> Written:
        """What ``write`` gives. It may ask the store, which names figures and may be away for a while."""
        while True:
            try:
                return write()
            except GenerationOver as over:
                transport = self._loop.transport
                transport.re_form_after(over)
                transport.deliver_members_changed()

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(self, round: Round, number: int) -> Round | None:
        """The sums of a round; on any thread. They stand in ``round``, or in another one that others had to hand over.
        None: members changed under it, and nothing came of it."""
        facts = round.wired()
        label, sums = f"the round after {number} rounds", list[Pending]()
        try:
            with self._loop.transport.round(label, aside=self._overlaps, keeps=[*facts, *round.total.flats]):
                self._sum(facts, sums)
                round.averages = self._averages(round)
                if round.averages:
                    round.total.fill(self._part(round))
                    self._sum(round.total.flats, sums, self._form)
                    copies = round.seen.copies if round.seen is not None else None
                    round.buffers = share(
                        self._loop.transport, self.buffers, round.header, len(self.statistics), sums, copies
                    )
                if self._overlaps:
                    self.finish_kernels()
        except GenerationOver as over:
            return self._recover(over, sums, round)
        return round

    def _recover(self, over: GenerationOver, sums: Sequence[Pending], round: Round) -> Round | None:
        """Go on among those who live. The round, when some of them had finished it and gave its result."""
        transport = self._loop.transport
        if not broken_off(transport, over, sums):
            round = round.emptied(self.layout)  # something may still write into the other one
        transport.re_form_after(over)
        return round if transport.given([*round.wired(), *round.total.flats]) else None

    def _sum(self, parts: Sequence[torch.Tensor], sums: list[Pending], form: Format | None = None) -> None:
        """Sum over the fleet, and note the sums in ``sums`` as they are begun."""
        begun = [start_sum(self._loop.transport, part, form) for part in parts]
        sums += begun
        wait_for_sums(begun)

    def _part(self, round: Round) -> list[torch.Tensor]:
        if isinstance(self.merging, Averages):
            return self.merging.part(round.facts, round.update)
        return self.merging.part(round.facts)

    def finish_kernels(self) -> None:
        """What this thread has asked of the device is done: another thread goes on with it."""
        if self._loop.device.type == "cuda":
            torch.cuda.current_stream(self._loop.device).synchronize()

    # -- over --------------------------------------------------------------------------------------------------------

    def merge_statistics(self, round: Round) -> None:
        """Batch norm's running statistics: their mean by samples, as in every round; and other buffers."""
        if len(self.statistics):
            samples = float(round.facts[:, SAMPLES].sum())
            counts = round.header.counters[: len(self.statistics)].tolist()
            self.statistics.merge(round.statistics, samples, counts)
        if round.buffers is not None:
            self.buffers.take(*round.buffers)
        if len(self.statistics) or round.buffers is not None:
            self._loop.gradients.statistics_were_set()

    def members_changed(self, kept: Sequence[int | None]) -> None:
        self.fit()
        self.merging.members_changed(kept)

    def fit(self) -> None:
        """The header has room for those who are there."""
        self.layout = Layout(self._loop.transport.size, 0, len(self.statistics) + len(self.buffers))
