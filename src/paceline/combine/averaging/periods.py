"""The periods of an average, one after another, and the rounds of parameters that end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from paceline import concurrency
from paceline.combine.averaging.dealing import PeriodDealer
from paceline.combine.averaging.exchange import RoundExchange
from paceline.combine.averaging.merging import Averages, copies, make_merging
from paceline.combine.averaging.outages import EmulatedOutages
from paceline.combine.averaging.period import NOTHING, Ints, Period
from paceline.combine.averaging.rounds import Round
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.averaging.turns import Turns
from paceline.combine.base import CombineParts
from paceline.combine.header import number_of
from paceline.errors import Dropped, FleetError, MisuseError
from paceline.loop.context import LoopContext
from paceline.loop.handover import take_whole_state, whole_state
from paceline.machines.failures import Trouble
from paceline.records import Range, StepRecord

LEAVING_S = 5.0
"""How long the end of a failed training waits for a round's thread."""


class Periods:
    """The open period of one worker, the round that may be under way beside it, and what comes after."""

    def __init__(
        self,
        loop: LoopContext,
        settings: Averaging | ElasticAverage,
        parts: CombineParts,
        *,
        overlaps: bool,
    ) -> None:
        self._loop, self._settings, self.overlaps = loop, settings, overlaps
        self.once = isinstance(settings, Averaging) and settings.once
        self.merging = make_merging(settings, loop.gradients.everything, loop.transport)
        self.dealer = PeriodDealer(loop, settings, overlaps=overlaps, lengths=parts.lengths)
        self.exchange = RoundExchange(
            loop, self.merging, parts.models, overlaps=overlaps, averages=self._averages_in, form=parts.form
        )
        self._before = NOTHING
        """What this worker did in earlier periods, and no average has in it."""
        self.turns = Turns(self, loop, first=parts.first_round) if self.dealer.by_arrival else None
        self.open: Period | None = None
        self.under_way: Round | None = None
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

    def check_whole(self, what: str) -> None:
        """Raise MisuseError where ``what`` would show one worker's own parameters for everybody's."""
        if self.once and self.inside and not self._loop.finished and self._loop.transport.size > 1:
            raise MisuseError(
                f'{what} in a loop with Averaging(every="end"): until the loop is over each worker has parameters of '
                "its own; do it after the loop, or leave every= out and give every_steps= or period_s="
            )

    # -- periods -------------------------------------------------------------------------------------------------------

    def ready(self) -> tuple[Period | None, int]:
        """The open period, with something left in it for this worker's group, and its epoch; rounds are run until there
        is one. No period when that epoch ended on the way: this worker's loop hears of it by a step without
        micro-batches."""
        feed = self._loop.dealing
        epoch = feed.epoch
        while True:
            self.open = self.open or self.open_next()
            if self.trouble().trains and not self.open.exhausted:
                return self.open, epoch
            if self.turns is not None:
                self.turns.stand_still()
            elif self.under_way is not None:
                self.land_round()
            elif not self.end_period():
                self.cross_boundary()
                epoch = feed.epoch  # the others' loops heard of all ends before
            if self._loop.finished or feed.epoch != epoch:
                return None, epoch

    def open_next(self) -> Period:
        self.cross_boundary()
        period = self.dealer.open(self.number)
        self.exchange.statistics.begin()
        if self.turns is not None:
            self._landed = concurrency.perf_counter()
            self.turns.start()
        self._outages.come_back(self.trouble(), self._loop.optimizers)
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
        """End the period by a round. One beside local steps is only begun here: `land_round` takes it over. False: the
        fleet has gone on without this worker, and what it did in the period does not count."""
        period, entered = self.open, concurrency.perf_counter()
        assert period is not None
        if self.overlaps:
            self._begin_beside(period)
            return True
        if self.turns is not None:
            self.turns.arrive(self._write_round(period), self._call)
            if self.open is not None:
                self._outages.come_back(self.trouble(), self._loop.optimizers)
            return True
        try:
            round = self._run_out(period)
        except Dropped as dropped:
            self._give_up_period(dropped)
            return False
        if round.averages:
            self.merging.take(round.facts, round.total.views, self._loop.optimizers)
        self.close_round(round, concurrency.perf_counter() - entered)
        return True

    def _averages_in(self, round: Round) -> bool:
        """Whether parameters are averaged in this round. ``every="end"``: the one in which the last epoch ends, or to
        which all who have left the loop bring the same call."""
        if not self.once:
            return True
        loop, done = self._loop, int(round.header.column("samples").sum())
        last = loop.dealing.remaining == done and loop.dealing.epoch + 1 >= loop.training.end_epoch
        return last or bool((round.table[:, 0] > 0).all())

    def _run_out(self, period: Period) -> Round:
        """Run a round to its end: once more, among those who are left, when somebody is lost in it."""
        if self._loop.membership is not None:
            self._loop.membership.keep_up()
        write = partial(self._write_round, period)
        while (over := self.exchange.run(self.exchange.persistently(write), self.number)) is None:
            pass
        return over

    def _write_round(self, period: Period) -> Round:
        return self.exchange.write(
            period,
            before=self._before,
            number=self.number,
            call=self._call,
            present=self.trouble().exchanges,
            optimizers=self._loop.optimizers,
            first_member=self.dealer.place.member == 0,
        )

    def _begin_beside(self, period: Period) -> None:
        assert isinstance(self.merging, Averages)
        round = self._write_round(period)
        round.update = self.merging.update()
        self.exchange.finish_kernels()
        self.under_way, self.open = round, period.followed(concurrency.perf_counter())
        number = self.number
        round.run_beside(lambda round: self.exchange.run(round, number))

    def land_round(self) -> None:
        """Wait for the round under way. Its update lands under what was done since it began."""
        round, waited = self.under_way, concurrency.perf_counter()
        assert round is not None
        assert round.update is not None
        assert isinstance(self.merging, Averages)
        round.wait()
        self.under_way = None
        self.merging.land(round.total.views, round.update)
        self.close_round(round, concurrency.perf_counter() - waited)

    # -- after a round -------------------------------------------------------------------------------------------------

    def close_round(self, round: Round, waited_s: float) -> None:
        """A round is over: everybody counts what it says. ``waited_s``: what this worker waited for it."""
        loop, period, header, table = self._loop, round.period, round.header, round.table.cpu().numpy()
        self._before = NOTHING if round.averages else self._before + period
        if round.averages:
            self.exchange.merge_statistics(round)
        ended, walls = round.ended or concurrency.perf_counter(), table[:, 1]
        samples = header.column("samples").astype(int)
        ranges: tuple[tuple[Range, ...], ...] = loop.dealing.commit(tuple(samples.tolist()), False)
        late_s = 0.0 if self._nobody_is_late else max(0.0, float(walls.max()) - period.wall_s)
        record = StepRecord(
            **loop.said(header),
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
        self.dealer.observe(samples, seconds=header.column("seconds"), walls=walls)
        loop.training.observe(record)
        self.dealer.plan, self.dealer.together = header.read_plan(), table[:, 0]
        self.number += 1
        loop.training.index = self.number
        self._landed = ended
        if loop.membership is not None:
            loop.membership.heard(header, workers=loop.transport.workers, generation=loop.transport.generation)
        self._go_on(np.asarray(period.shares) - samples)

    def _go_on(self, left: Ints) -> None:
        """After a round: the next period, the next epoch, or the end. ``left``: what each worker was dealt and had not
        done when the round began. It may be at work on it, beside the round, and keeps it."""
        loop = self._loop
        if loop.dealing.remaining == 0:
            self.open = None
            loop.training.next_epoch()
        elif self._nobody_is_late:
            assert self.open is not None
            self.dealer.deal(self.open, left)
        else:
            self.open = None
        loop.finished, loop.progress = loop.training.finished, loop.training.progress
        if loop.finished:
            self._show_for_good()

    @property
    def _nobody_is_late(self) -> bool:
        """Whether local steps go on while others are in a round."""
        return self.overlaps or self.turns is not None

    def _show_for_good(self) -> None:
        """The training is over: everybody holds what is to be evaluated and saved."""
        parameters = self._loop.gradients.everything
        with self.merging.shown():
            final = copies(parameters)
        for parameter, value in zip(parameters, final, strict=True):
            parameter.data.copy_(value)

    def wait_for_thread(self) -> None:
        """Of a round that is under way when the training has failed."""
        if self.turns is not None:
            self.turns.join(LEAVING_S)
        if self.under_way is not None:
            with suppress(FleetError):  # it was raised before
                self.under_way.wait(LEAVING_S)

    # -- together ------------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> None:
        """Run rounds until everybody has come to the same call."""
        loop = self._loop
        if not loop.begun or loop.finished or loop.transport.size == 1 or self.outside:
            return
        self._call = float(number_of(label.encode()))
        loop.transport.doing(label)
        self._run_rounds_until_met() if self.turns is None else self.turns.wait_until_met()
        self._call = 0.0
        together = self.dealer.together
        if len(set(together[together > 0].tolist())) > 1:
            raise MisuseError(f"not every worker called {label}: some are in another call, which cannot end")

    def _run_rounds_until_met(self) -> None:
        """In the round to which all bring a call nobody has done anything since it began, and all end up equal."""
        if self.under_way is not None:
            self.land_round()
        while not self._loop.finished:
            self.open = self.open or self.open_next()
            if not self.end_period():
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
        """Right after a round, and before the next period is dealt: enter, leave, or re-form the group."""
        while self._loop.membership is not None:
            try:
                self._loop.membership.at_boundary(agreed=self._nobody_waits)
                return
            except Dropped as dropped:
                self._give_up_period(dropped)
                if self._call:
                    raise _dropped_in_a_call() from None

    def _nobody_waits(self) -> bool:
        """Whether no worker is in a call and serves rounds until the others have come to it: whoever entered now would
        not come. All workers ask."""
        return not any(self._loop.transport.gather("whether others may enter", bool(self._call)))

    def _give_up_period(self, dropped: Dropped) -> None:
        """The fleet went on without this worker: it enters anew, with a peer's state, and what it did since the last
        round is dealt again."""
        self.open = None
        text = f"after {self.number} rounds: {dropped}; it enters anew"
        self._loop.observe("note", {"level": "warning", "text": text})

    def members_changed(self, kept: Sequence[int | None]) -> None:
        self.dealer.members_changed(kept)
        self.exchange.members_changed(kept)
        if self.open is not None:
            self.open.members_changed(kept)
        self._warn_of_alpha()

    def _warn_of_alpha(self) -> None:
        size, settings = self._loop.transport.size, self._settings
        if isinstance(settings, ElasticAverage) and settings.settling_alpha(size) != settings.alpha_for(size):
            stable = settings.settling_alpha(size)
            text = f"alpha {settings.alpha} is not stable among {size} workers: it is {stable:.3g}"
            if self.dealer.place.member == 0:
                self._loop.observe("note", {"level": "warning", "text": text})

    # -- state ---------------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """A newcomer begins with the parameters that are shown: those all have after a round, or the centre."""
        with self.merging.shown():
            state = whole_state(self._loop)
            state["models"] = deepcopy(state["models"])
        return {**state, **self.state_dict()}

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        take_whole_state(self._loop, state, ahead=ahead)
        self.dealer.find_place()
        self.exchange.fit()
        self.load_state_dict(state)
        self.open = self.dealer.plan = None

    def rebase(self) -> None:
        """The parameters were set by somebody else."""
        self.merging.rebase()
        self.exchange.statistics.rebase()
        self.exchange.buffers.rebase()

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.number, "merging": self.merging.state_dict(), **self.dealer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "merging" not in state:  # it was saved under another combine
            self.number = self._loop.training.index = 0
            self.rebase()
            return
        self.number = self._loop.training.index = state["round"]
        self.merging.load_state_dict(state["merging"])
        self.dealer.load_state_dict(state)
        self.exchange.statistics.rebase()
        self.exchange.buffers.rebase()


def _dropped_in_a_call() -> FleetError:
    return FleetError(
        "this worker was silent for too long, and the fleet went on without it while it waited in a call for the "
        "others: start it again, and it enters anew"
    )
