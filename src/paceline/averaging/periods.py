"""The periods of an average, one after another, and the rounds of parameters that end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline import concurrency
from paceline.averaging.merge import MergeSettings, Turns, copies
from paceline.averaging.parameter_round import ParameterRound, RoundExchange
from paceline.averaging.period import NOTHING, Ints, Period, PeriodDealer
from paceline.errors import Dropped, FleetError, MisuseError
from paceline.gradients.header import number_of
from paceline.machines.failures import Failures, Trouble
from paceline.records import Range, StepRecord
from paceline.step.combine import CombineParts
from paceline.step.context import LoopContext
from paceline.step.members import newcomer_state, take_newcomer_state

LEAVING_S = 5.0
"""How long the end of a failed training waits for a round's thread."""


class Periods:
    """The open period of one worker, the round that may be under way beside it, and what comes after."""

    def __init__(
        self,
        loop: LoopContext,
        settings: MergeSettings,
        parts: CombineParts,
        *,
        overlaps: bool,
    ) -> None:
        self._loop, self.overlaps, self.once = loop, overlaps, settings.once
        self.merge = settings.merge(loop.gradients.everything, loop.transport)
        self.dealer = PeriodDealer(loop, settings, overlaps=overlaps, lengths=parts.lengths)
        self.exchange = RoundExchange(
            loop, self.merge, parts.models, overlaps=overlaps, averages=self._averages_in, wire_format=parts.wire_format
        )
        self._before = NOTHING
        """What this worker did in earlier periods, and no average has in it."""
        self.turns: Turns | None = None
        if self.dealer.by_arrival:
            self.turns = self.merge.turns(self, loop, first=parts.first_round)
        self.open: Period | None = None
        self.under_way: ParameterRound | None = None
        """A round that runs beside the local steps."""
        self.number = loop.training.index = parts.first_round
        """Rounds so far, as the records count them."""
        self._landed = 0.0
        """When the last round was over, for this worker."""
        self._call = 0.0
        """What this worker waits to do together with the others, as a number; 0: nothing."""
        self.inside = False
        """Whether the script is in the loop."""
        self._outages = EmulatedOutages(parts.failures, loop.gradients.everything)

    def check_parameters_shared(self, what: str) -> None:
        """Raise MisuseError where ``what`` would show one worker's own parameters for everybody's."""
        if self.once and self.inside and not self._loop.position.finished and self._loop.transport.size > 1:
            raise MisuseError(
                f'{what} in a loop with Averaging(every="end"): until the loop is over each worker has parameters of '
                "its own; do it after the loop, or leave every= out and give every_steps= or period_s="
            )

    # -- periods -------------------------------------------------------------------------------------------------------

    def ready(self) -> tuple[Period | None, int]:
        """Return the open period, with something left in it for this worker's group, and its epoch.

        Rounds are run until there is one. No period when that epoch ended on the way: this worker's loop gets a step
        without micro-batches. Nor when this worker is `outside`, because the fleet is in a later loop of the script.
        """
        feed = self._loop.dealing
        epoch = feed.epoch
        while True:
            self.open = self.open or self.open_next()
            if self.open is None:
                return None, epoch
            if self.trouble().trains and not self.open.exhausted:
                return self.open, epoch
            if self.turns is not None:
                self.turns.stand_still()
            elif self.under_way is not None:
                self.land_round()
            elif not self.end_period():
                self.cross_boundary()
                epoch = feed.epoch  # the others' loops have seen all ends before
            if self.outside or self._loop.position.finished or feed.epoch != epoch:
                return None, epoch

    def open_next(self) -> Period | None:
        """Open the next period; None where this worker is `outside`."""
        self.cross_boundary()
        if self.outside:
            return None
        period = self.dealer.open(self.number)
        self.exchange.statistics.begin()
        if self.turns is not None:
            self._landed = concurrency.perf_counter()
            self.turns.start()
        self._outages.come_back(self.trouble(), self._loop.script.optimizers)
        return period

    def trouble(self) -> Trouble:
        number = self.number if self.turns is None else self.turns.number
        return self._outages.at(worker=self._loop.transport.rank, round=number)

    @property
    def uncounted(self) -> int:
        """Samples at the head of this worker's queue that it has done and no round has counted yet."""
        before = 0 if self.under_way is None else self.under_way.period.samples
        return before + (0 if self.open is None else self.open.samples)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def end_period(self) -> bool:
        """End the period by a round; return False where the fleet has gone on without this worker.

        What it did in the period then does not count. A round beside local steps is only begun here: `land_round` takes
        it over.
        """
        period, entered = self.open, concurrency.perf_counter()
        assert period is not None
        if self.overlaps:
            self._begin_beside(period)
            return True
        if self.turns is not None:
            self.turns.arrive(self._write_round(period), self._call)
            if self.open is not None:
                self._outages.come_back(self.trouble(), self._loop.script.optimizers)
            return True
        try:
            round = self._run_out(period)
        except Dropped as dropped:
            self._give_up_period(dropped)
            return False
        if round.averages:
            self.merge.take(round.facts, round.total.views, self._loop.script.optimizers)
        self.close_round(round, concurrency.perf_counter() - entered)
        return True

    def _averages_in(self, round: ParameterRound) -> bool:
        """Return whether parameters are averaged in this round.

        With ``every="end"`` that is the one in which the last epoch ends, or to which all who have left the loop bring
        the same call.
        """
        if not self.once:
            return True
        loop, done = self._loop, int(round.header.column("samples").sum())
        last = loop.dealing.remaining == done and loop.dealing.epoch + 1 >= loop.training.end_epoch
        return last or bool((round.table[:, 0] > 0).all())

    def _run_out(self, period: Period) -> ParameterRound:
        """Run a round to its end: once more, among those who are left, when somebody is lost in it."""
        if self._loop.membership is not None:
            self._loop.membership.keep_up()
        write = partial(self._write_round, period)
        while (over := self.exchange.run(self.exchange.persistently(write), self.number)) is None:
            pass
        return over

    def _write_round(self, period: Period) -> ParameterRound:
        return self.exchange.write(
            period,
            before=self._before,
            number=self.number,
            call=self._call,
            present=self.trouble().exchanges,
            optimizers=self._loop.script.optimizers,
            first_member=self.dealer.position.member == 0,
        )

    def _begin_beside(self, period: Period) -> None:
        round = self._write_round(period)
        round.update = self.merge.update()
        self.exchange.finish_kernels()
        self.under_way, self.open = round, period.followed(concurrency.perf_counter())
        number = self.number
        round.run_beside(lambda round: self.exchange.run(round, number))

    def land_round(self) -> None:
        """Wait for the round under way. Its update lands under what was done since it began."""
        round, waited = self.under_way, concurrency.perf_counter()
        assert round is not None
        assert round.update is not None
        round.wait()
        self.under_way = None
        self.merge.land(round.total.views, round.update)
        self.close_round(round, concurrency.perf_counter() - waited)

    # -- after a round -------------------------------------------------------------------------------------------------

    def close_round(self, round: ParameterRound, waited_s: float) -> None:
        """Count what a round that is over holds; ``waited_s``: what this worker waited for it."""
        loop, period, header, table = self._loop, round.period, round.header, round.table.cpu().numpy()
        self._before = NOTHING if round.averages else self._before + period
        if round.averages:
            self.exchange.merge_statistics(round)
        ended, walls = round.ended or concurrency.perf_counter(), table[:, 1]
        samples = header.column("samples").astype(int)
        ranges: tuple[tuple[Range, ...], ...] = loop.dealing.commit(tuple(samples.tolist()))
        late_s = 0.0 if self._nobody_is_late else max(0.0, float(walls.max()) - period.wall_s)
        record = StepRecord(
            **loop.work_fields(header),
            step=self.number,
            epoch=loop.dealing.epoch,
            generation=loop.transport.generation,
            workers=loop.transport.workers,
            planned=period.shares,
            slowest_s=tuple(header.column("slowest_s").tolist()),
            wall_s=max(0.0, ended - max(period.began if self.turns is None else 0.0, self._landed)),
            round_s=max(0.0, waited_s - late_s),
            ranges=ranges,
        )
        self.dealer.note_speeds(samples, seconds=header.column("seconds"), walls=walls)
        loop.training.add_round(record)
        self.dealer.plan, self.dealer.together = header.read_plan(), table[:, 0]
        self.number += 1
        loop.training.index = self.number
        self._landed = ended
        if loop.membership is not None:
            loop.membership.note_intentions(
                header, workers=loop.transport.workers, generation=loop.transport.generation
            )
        self._go_on(np.asarray(period.shares) - samples)

    def _go_on(self, left: Ints) -> None:
        """Go on after a round: with the next period, the next epoch, or the end.

        ``left``: what each worker was dealt and had not done when the round began. It may be at work on it, beside the
        round, and keeps it.
        """
        loop = self._loop
        if loop.dealing.remaining == 0:
            self.open = None
            loop.training.next_epoch()
        elif self._nobody_is_late:
            assert self.open is not None
            self.dealer.deal(self.open, left)
        else:
            self.open = None
        loop.position.finished, loop.position.progress = loop.training.finished, loop.training.progress
        if loop.position.finished:
            self._show_for_good()

    @property
    def _nobody_is_late(self) -> bool:
        """Whether local steps go on while others are in a round."""
        return self.overlaps or self.turns is not None

    def _show_for_good(self) -> None:
        """Let everybody hold what is to be evaluated and saved: the training is over."""
        parameters = self._loop.gradients.everything
        with self.merge.shown():
            final = copies(parameters)
        for parameter, value in zip(parameters, final, strict=True):
            parameter.data.copy_(value)

    def wait_for_thread(self) -> None:
        """Wait for the thread of a round that is under way when the training has failed."""
        if self.turns is not None:
            self.turns.join(LEAVING_S)
        if self.under_way is not None:
            with suppress(FleetError):  # it was raised before
                self.under_way.wait(LEAVING_S)

    # -- together ------------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> None:
        """Run rounds until everybody has come to the same call."""
        loop = self._loop
        if not loop.position.begun or loop.position.finished or loop.transport.size == 1 or self.outside:
            return
        self._call = float(number_of(label.encode()))
        loop.transport.doing(label)
        self._run_rounds_until_met() if self.turns is None else self.turns.wait_until_met()
        self._call = 0.0
        together = self.dealer.together
        if len(set(together[together > 0].tolist())) > 1:
            raise MisuseError(f"not every worker called {label}: some are in another call, which cannot end")

    def _run_rounds_until_met(self) -> None:
        """Run rounds until all bring a call.

        In that round nobody has done anything since it began, and all end up equal.
        """
        if self.under_way is not None:
            self.land_round()
        while not self._loop.position.finished:
            self.open = self.open or self.open_next()
            if self.open is None or not self.end_period():
                raise _dropped_in_a_call()
            if self.under_way is not None:
                self.land_round()
            if (self.dealer.together > 0).all():
                break

    # -- workers come and go -------------------------------------------------------------------------------------------

    @property
    def outside(self) -> bool:
        """Whether this worker waits to enter a running fleet."""
        return self._loop.transport.outside

    def cross_boundary(self) -> None:
        """Enter, leave, or re-form the group, right after a round and before the next period is dealt."""
        while self._loop.membership is not None:
            try:
                self._loop.membership.at_boundary(agreed=self._nobody_waits)
                return
            except Dropped as dropped:
                self._give_up_period(dropped)
                if self._call:
                    raise _dropped_in_a_call() from None

    def _nobody_waits(self) -> bool:
        """Return whether no worker is in a call and serves rounds until the others have come to it.

        Whoever entered now would not come. All workers ask.
        """
        return not any(self._loop.transport.gather("whether others may enter", bool(self._call)))

    def _give_up_period(self, dropped: Dropped) -> None:
        """Give the period up: the fleet went on without this worker.

        It enters anew, with a peer's state, and what it did since the last round is dealt again.
        """
        self.open = None
        text = f"after {self.number} rounds: {dropped}; it enters anew"
        self._loop.notes.warn(text)

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        self.dealer.members_changed(old_ranks)
        warning = self.exchange.members_changed(old_ranks)
        if self.open is not None:
            self.open.members_changed(old_ranks)
        if warning is not None and self.dealer.position.member == 0:
            self._loop.notes.warn(warning)

    # -- state ---------------------------------------------------------------------------------------------------------

    def newcomer_state(self) -> dict[str, Any]:
        """Return what a newcomer needs, with the parameters to show: those all have after a round, or the centre."""
        with self.merge.shown():
            state = newcomer_state(self._loop)
            state["models"] = deepcopy(state["models"])
        return {**state, **self.state_dict()}

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        take_newcomer_state(self._loop, state, ahead=ahead)
        self.dealer.find_position()
        self.exchange.fit()
        self.load_state_dict(state)
        self.open = self.dealer.plan = None

    def rebase(self) -> None:
        """Start from the parameters as they are: they were set from outside."""
        self.merge.rebase()
        self.exchange.statistics.rebase()
        self.exchange.buffers.rebase()

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.number, "merging": self.merge.state_dict(), **self.dealer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "merging" not in state:  # it was saved under another combine
            self.number = self._loop.training.index = 0
            self.rebase()
            return
        self.number = self._loop.training.index = state["round"]
        self.merge.load_state_dict(state["merging"])
        self.dealer.load_state_dict(state)
        self.exchange.statistics.rebase()
        self.exchange.buffers.rebase()


class EmulatedOutages:
    """Failures of one worker as ``--failures`` emulates them: periods without training or exchange, and its return."""

    def __init__(self, failures: Failures | None, parameters: Sequence[torch.Tensor]) -> None:
        self._failures, self._parameters = failures, parameters
        self._initial = copies(parameters) if failures else []
        self._stale: list[torch.Tensor] = []

    def at(self, *, worker: int, round: int) -> Trouble:
        """Return what is wrong with the worker in a round."""
        return Trouble() if self._failures is None else self._failures.at(worker=worker, round=round)

    @torch.no_grad()
    def come_back(self, trouble: Trouble, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Begin a period: a worker that returns has the parameters that its trouble left it, and a new optimiser."""
        if self._failures is None:
            return
        if trouble.returns_with is not None:
            source = self._initial if trouble.returns_with == "initial" or not self._stale else self._stale
            for parameter, value in zip(self._parameters, source, strict=True):
                parameter.data.copy_(value)
            for optimizer in optimizers:
                make_new(optimizer)
        if trouble.exchanges:
            self._stale = copies(self._parameters)


def make_new(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser as it was before its first step: no moments, and a count of 0 where it counts by group."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), int):
            group["step"] = 0


def _dropped_in_a_call() -> FleetError:
    return FleetError(
        "this worker was silent for too long, and the fleet went on without it while it waited in a call for the "
        "others: start it again, and it enters anew"
    )
