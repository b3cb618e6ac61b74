"""Rounds of parameters between local steps (``combine="average"`` and ``"elastic-average"``).

Between two rounds lies a **period**: so many local steps, or so many seconds, in which a fast worker makes more steps
than a slow one and nobody waits. What a worker was dealt for a period and did not do stays in its queue, so every
sample of the epoch still counts exactly once.

A round may run beside the local steps that follow it (``overlap``). They go on with what is left of what was dealt, and
when the round is over its update lands between two of them.

Where workers come and go, those who are left run a round again when somebody is lost in it, with what they have done
themselves: only what a round counted is done, and the rest is dealt again. Others enter and leave right after a round,
when nobody waits in a call such as ``fleet.evaluate``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.combine import Header
from paceline.combine.averaging.groups import check_fits, over_group, place_of
from paceline.combine.averaging.merging import Averages, copies, make_merging, momentum_of
from paceline.combine.averaging.period import Ints, Period, above, by_the_clock, followed
from paceline.combine.averaging.rounds import Round
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.flats import Flats
from paceline.combine.gradients.gradients import broken_off
from paceline.combine.gradients.statistics import RunningStatistics
from paceline.combine.header import Layout
from paceline.errors import Dropped, FleetError, GenerationOver, MisuseError
from paceline.feed.dealing import Dealing
from paceline.loop.steps import Steps
from paceline.machines.failures import Failures, Trouble
from paceline.records import Plan, Range, StepRecord
from paceline.transport import Transport
from paceline.transport.base import Pending
from paceline.transport.elastic.transport import Elastic

Written = TypeVar("Written")

LEAVING_S = 5.0
"""How long the end of a failed training waits for a round's thread."""
AHEAD = 2
"""Periods' worth of samples dealt at once when rounds run beside local steps: one, and one for while its round runs."""


class Averaged(Steps):
    """A loop whose workers merge parameters now and then: its periods, and the rounds that end them."""

    def __init__(
        self,
        *,
        combine: Averaging | ElasticAverage,
        models: Sequence[torch.nn.Module],
        failures: Failures | None,
        lengths: Sequence[int],
        first_round: int = 0,
        **loop: Any,
    ) -> None:
        """``lengths``: how much of an epoch each worker claims when it opens; empty: it is dealt as it goes.
        ``first_round``: rounds of the run's loops before this one."""
        transport: Transport = loop["transport"]
        if transport.elastic:
            combine.check_elastic()
        self._groups, self._members, self._member = place_of(combine, rank=transport.rank, size=transport.size)
        self._overlaps = isinstance(combine, Averaging) and combine.overlap and transport.size > 1
        grouped = len(self._groups) < transport.size
        check_fits(transport, loop["dealing"], failures, grouped=grouped, overlaps=self._overlaps)
        if grouped:
            loop["gradients"] = over_group(loop["gradients"], transport, self._members, models)
        super().__init__(**loop)
        self.combine = combine
        self._feed: Dealing = loop["dealing"]
        self._merging = make_merging(combine, self.gradients.everything, self._transport)
        self._statistics = RunningStatistics(models)
        self._layout = Layout(self._transport.size, 0, len(self._statistics))
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._period: Period | None = None
        self._under_way: Round | None = None
        """A round that runs beside the local steps."""
        self._round = self.books.index = first_round
        """Rounds so far, as the records count them."""
        self._arrived = 0.0
        """When the last round was over, for this worker."""
        self._call = 0.0
        """What this worker waits to do together with the others, as a number; 0: nothing."""
        self._together = np.zeros(self._transport.size)
        self._lengths = tuple(lengths)
        self._speeds = np.zeros(self._transport.size)
        """Samples a second of each worker's own work in the last period it worked in."""
        self._rates = np.zeros(self._transport.size)
        """The same, waiting for the others of its group included."""
        self._failures = failures
        self._initial = copies(self.gradients.everything) if failures else []
        self._stale: list[torch.Tensor] = []
        self._plan: Plan | None = None

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self._round

    @property
    def most(self) -> int | None:
        by_clock = getattr(self.combine, "period_s", None) is not None and self._transport.size > 1
        return None if by_clock else super().most

    # -- periods -------------------------------------------------------------------------------------------------------

    def _open(self) -> Period:
        """Deal a period. Everybody works out the same shares from what the last round said."""
        self._cross_boundary()
        self._plan = self._plan or self._agree_on_plan()
        if self._lengths and self._feed.remaining == self._feed.length:
            self._feed.deal(self._lengths)  # an epoch opens: everybody claims its own part and the common one
        nothing = (0,) * len(self._members)
        period = Period(began=time.perf_counter(), shares=(), windows=nothing, batches=nothing, member=self._member)
        self._deal(period, None)
        self._statistics.begin()
        self._return_from_outage()
        return period

    def _agree_on_plan(self) -> Plan:
        """The leader hands a plan round where none came with the last round: before the first, or for other members."""

        def mine() -> dict[str, Any] | None:
            return self.books.plan_for(self._round).to_json() if self._transport.rank == 0 else None

        return Plan.from_json(self._transport.gather(f"the plan after {self._round} rounds", mine)[0])

    def _deal(self, period: Period, floors: Ints | None) -> None:
        """Deal to all, ``floors`` at least, and let the period go on with what this worker's group was dealt."""
        wanted, batches = self._wanted()
        wanted = np.where(self._waiting(), 0, wanted)
        if floors is not None:
            wanted = above(np.where(self._waiting(), 0, floors), wanted, self._feed.remaining)
        period.shares = self._feed.deal(tuple(wanted.tolist()))
        period.windows = tuple(period.shares[member] for member in self._members)
        period.batches = tuple(int(batches[member]) for member in self._members)

    def _waiting(self) -> NDArray[np.bool_]:
        """Who waits for the others to come to the same call. What is left of an epoch must not lie with them: those
        that are waited for may need it to get there."""
        waiting = self._together > 0
        return waiting & (not waiting.all() and not self._lengths)

    def _wanted(self) -> tuple[Ints, Ints]:
        """Samples to deal to each worker, and its samples of one local step."""
        size = self._transport.size
        equal = max(1, self.settings.global_batch // size)
        if isinstance(self.combine, Averaging) and self.combine.period_s is not None:
            shares, batches = by_the_clock(
                self._groups, batch=equal, speeds=self._speeds, rates=self._rates, period_s=self.combine.period_s
            )
        else:
            assert self._plan is not None
            # With a common part everybody has as much, and is to finish it at the same time.
            batches = np.full(size, equal) if self._lengths else np.maximum(1, np.asarray(self._plan.samples))
            shares = batches * self._steps_a_period()
        return shares * (AHEAD if self._overlaps else 1), batches

    def _steps_a_period(self) -> int:
        settings = self.combine
        return settings.tau if isinstance(settings, ElasticAverage) else settings.every_steps or 1

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _depart(self) -> bool:
        """End the period by a round. One beside local steps is only begun here: `_arrive` takes it over. False: the
        fleet has gone on without this worker, and what it did in the period does not count."""
        period, entered = self._period, time.perf_counter()
        assert period is not None
        if self._overlaps:
            self._depart_beside(period)
            return True
        try:
            round = self._run_out(period)
        except Dropped as dropped:
            self._give_up_period(dropped)
            return False
        self._merging.take(round.facts, round.total.views, self._optimizers)
        self._close_round(round, time.perf_counter() - entered)
        return True

    def _run_out(self, period: Period) -> Round:
        """Run a round to its end: once more, among those who are left, when somebody is lost in it."""
        if self.members is not None:
            self.members.keep_up()
        while (over := self._exchange(self._written(partial(self._write_round, period)))) is None:
            pass
        return over

    def _written(self, write: Callable[[], Written]) -> Written:
        """What ``write`` gives. It may ask the store, which names figures and may be away for a while."""
        while True:
            try:
                return write()
            except GenerationOver as over:
                assert isinstance(self._transport, Elastic)
                self._transport.recover(over)
                self._transport.follow()

    def _depart_beside(self, period: Period) -> None:
        assert isinstance(self._merging, Averages)
        round = self._write_round(period)
        round.update = self._merging.update()
        self._finish_kernels()
        self._under_way, self._period = round, period.followed(time.perf_counter())
        round.run_beside(self._exchange)

    def _arrive(self) -> None:
        """Wait for the round under way. Its update lands under what was done since it began."""
        round, waited = self._under_way, time.perf_counter()
        assert round is not None
        assert round.update is not None
        assert isinstance(self._merging, Averages)
        round.wait()
        self._under_way = None
        self._merging.land(round.total.views, round.update)
        self._close_round(round, time.perf_counter() - waited)

    def _write_round(self, period: Period) -> Round:
        self._statistics.note()
        table = torch.zeros(self._transport.size, self._merging.columns + 2, dtype=torch.float64)
        row = self._merging.row(
            steps=period.steps,
            samples=period.samples,
            contraction=period.contraction,
            momentum=momentum_of(self._optimizers),
            present=self._trouble().exchanges,
        )
        table[self._transport.rank] = torch.tensor([self._call, period.wall_s, *row])
        header, statistics = self._write_period(period), self._statistics.payload(period.samples)
        return Round(period, header=header, table=table, statistics=statistics, total=Flats(self.gradients.everything))

    def _write_period(self, period: Period) -> Header:
        header = Header(self._layout)
        header.write(
            self._transport.rank,
            samples=period.samples,
            weight=period.weight,
            loss=period.loss,
            seconds=period.seconds,
            micro_batches=period.micro_batches,
            slowest_s=period.slowest_s,
            ended=False,
            **(self.members.intentions() if self.members is not None else {}),
        )
        self._add_figures(header, period.added)
        if self._transport.rank == 0:
            header.write_plan(self.books.plan_for(self._round + 1))
        if self._member == 0:  # batch norm's layers have counted the whole group's micro-batches on each member
            header.counters[:] = self._statistics.moved
        return header

    def _exchange(self, round: Round) -> Round | None:
        """The sums of a round; on any thread. They stand in ``round``, or in another one that others had to hand over.
        None: members changed under it, and nothing came of it."""
        facts = round.wired()
        label, sums = f"the round after {self._round} rounds", list[Pending]()
        try:
            with self._transport.round(label, aside=self._overlaps, keeps=[*facts, *round.total.flats]):
                self._sum(facts, sums)
                round.total.fill(self._part(round))
                self._sum(round.total.flats, sums)
                if self._overlaps:
                    self._finish_kernels()
        except GenerationOver as over:
            return self._recover(over, sums, round)
        return round

    def _recover(self, over: GenerationOver, sums: Sequence[Pending], round: Round) -> Round | None:
        """Go on among those who live. The round, when some of them had finished it and gave its result."""
        transport = self._transport
        assert isinstance(transport, Elastic)
        if not broken_off(transport, over, sums):
            round = round.emptied(self._layout)  # something may still write into the other one
        transport.recover(over)
        return round if transport.given([*round.wired(), *round.total.flats]) else None

    def _sum(self, parts: Sequence[torch.Tensor], sums: list[Pending]) -> None:
        """Sum over the fleet, and note the sums in ``sums`` as they are begun."""
        begun = [self._transport.sum(part) for part in parts]
        sums += begun
        for pending in begun:
            pending.wait()

    def _part(self, round: Round) -> list[torch.Tensor]:
        if isinstance(self._merging, Averages):
            return self._merging.part(round.facts, round.update)
        return self._merging.part(round.facts)

    def _finish_kernels(self) -> None:
        """What this thread has asked of the device is done: another thread goes on with it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _close_round(self, round: Round, waited_s: float) -> None:
        """A round is over: everybody counts what it says. ``waited_s``: what this worker waited for it."""
        period, header, table = round.period, round.header, round.table.cpu().numpy()
        walls = table[:, 1]
        self._finish_statistics(round)
        ended = time.perf_counter()
        samples, seconds = header.column("samples").astype(int), header.column("seconds")
        ranges: tuple[tuple[Range, ...], ...] = self._feed.commit(tuple(samples.tolist()), False)
        late_s = 0.0 if self._overlaps else max(0.0, float(walls.max()) - period.wall_s)
        record = StepRecord(
            **self._said(header),
            step=self._round,
            epoch=self._feed.epoch,
            generation=self._transport.generation,
            workers=self._transport.workers,
            planned=period.shares,
            slowest_s=tuple(header.column("slowest_s").tolist()),
            wall_s=ended - max(period.began, self._arrived),
            round_s=max(0.0, waited_s - late_s),
            ranges=ranges,
        )
        self._speeds = np.where(seconds > 0, samples / np.maximum(seconds, 1e-9), self._speeds)
        self._rates = np.where(walls > 0, samples / np.maximum(walls, 1e-9), self._rates)
        self.books.observe(record)
        self._plan = header.read_plan()
        self._together = table[:, 0]
        self._round += 1
        self.books.index = self._round
        self._arrived = ended
        if self.members is not None:
            self.members.heard(header, workers=self._transport.workers, generation=self._transport.generation)
        self._go_on(np.asarray(period.shares) - samples)

    def _go_on(self, left: Ints) -> None:
        """After a round: the next period, the next epoch, or the end. ``left``: what each worker was dealt and had not
        done when the round began. It may be at work on it, beside the round, and keeps it."""
        if self._feed.remaining == 0:
            self._period = None
            self.books.next_epoch()
        elif self._overlaps:
            assert self._period is not None
            self._deal(self._period, left)
        else:
            self._period = None
        self.finished, self._progress = self.books.finished, self.books.progress
        if self.finished:
            self._show_for_good()

    def _finish_statistics(self, round: Round) -> None:
        """Batch norm's running statistics: their mean by samples, as in every round."""
        if len(self._statistics):
            samples = float(round.header.column("samples").sum())
            self._statistics.merge(round.statistics, samples, round.header.counters.tolist())
            self.gradients.statistics_were_set()

    def _show_for_good(self) -> None:
        """The training is over: everybody holds what is to be evaluated and saved."""
        with self._merging.shown():
            final = copies(self.gradients.everything)
        for parameter, value in zip(self.gradients.everything, final, strict=True):
            parameter.data.copy_(value)

    # -- together ------------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Run rounds until everybody has come to the same call; in the context the parameters are those to show."""
        if self.begun and not self.finished and self._transport.size > 1 and not self._outside:
            self._call = float(int.from_bytes(blake2b(label.encode(), digest_size=6).digest(), "big"))
            self._transport.doing(label)
            self._run_rounds_until_met()
            self._call = 0.0
            if len(set(self._together[self._together > 0].tolist())) > 1:
                raise MisuseError(f"not every worker called {label}: some are in another call, which cannot end")
        return self.shown()

    def models_were_set(self) -> None:
        super().models_were_set()
        self._merging.rebase()
        self._statistics.rebase()

    def shown(self) -> AbstractContextManager[Any]:
        return self._merging.shown()

    def _run_rounds_until_met(self) -> None:
        """In the round to which all bring a call nobody has done anything since it began, and all end up equal."""
        if self._under_way is not None:
            self._arrive()
        while not self.finished:
            self._period = self._period or self._open()
            if not self._depart():
                raise _dropped_in_a_call()
            if self._under_way is not None:
                self._arrive()
            if (self._together > 0).all():
                break

    def await_proxy(self) -> None:
        super().await_proxy()
        if self._under_way is not None:
            with suppress(FleetError):  # it was raised before
                self._under_way.wait(LEAVING_S)

    def close(self, *, orderly: bool = True) -> None:
        if orderly and self._overlaps and not self._closed:
            self.meet("the end of the loop")  # else a round would wait for a worker that has left
        super().close(orderly=orderly)

    # -- workers come and go ------------------------------------------------------------------------------------------

    @property
    def _outside(self) -> bool:
        """Whether this worker waits to enter a running fleet."""
        return isinstance(self._transport, Elastic) and self._transport.outside

    def _cross_boundary(self) -> None:
        """Right after a round, and before the next period is dealt: enter, leave, or form the fleet anew."""
        while self.members is not None:
            try:
                self.members.at_boundary(agreed=self._nobody_waits)
                return
            except Dropped as dropped:
                self._give_up_period(dropped)
                if self._call:
                    raise _dropped_in_a_call() from None

    def _nobody_waits(self) -> bool:
        """Whether no worker is in a call and serves rounds until the others have come to it: whoever entered now would
        not come. All workers ask."""
        return not any(self._transport.gather("whether others may enter", bool(self._call)))

    def _give_up_period(self, dropped: Dropped) -> None:
        """The fleet went on without this worker: it enters anew, with a peer's state, and what it did since the last
        round is dealt again."""
        self._period = None
        self._observe("note", {"level": "warning", "text": f"after {self._round} rounds: {dropped}; it enters anew"})

    def follow(self, kept: Sequence[int | None]) -> None:
        super().follow(kept)
        self._find_place()
        self._merging.follow(kept)
        self._speeds, self._rates = followed(self._speeds, kept), followed(self._rates, kept)
        self._plan = None
        if self._period is not None:
            self._period.follow(kept)
        self._warn_of_alpha()

    def _find_place(self) -> None:
        """Among the members that are there now, of whom none is known to wait."""
        rank, size = self._transport.rank, self._transport.size
        self._groups, self._members, self._member = place_of(self.combine, rank=rank, size=size)
        self._layout = Layout(size, 0, len(self._statistics))
        self._together = np.zeros(size)

    def _warn_of_alpha(self) -> None:
        size, combine = self._transport.size, self.combine
        if isinstance(combine, ElasticAverage) and combine.settling_alpha(size) != combine.alpha_for(size):
            text = f"alpha {combine.alpha} is not stable among {size} workers: it is {combine.settling_alpha(size):.3g}"
            self._warn_all(text)

    def whole_state(self) -> dict[str, Any]:
        """A newcomer begins with the parameters that are shown: those all have after a round, or the centre."""
        with self.shown():
            state = super().whole_state()
            state["models"] = deepcopy(state["models"])
        return {**state, **self._own_state()}

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        super().take_over(state, ahead=ahead)
        self._find_place()
        self._load_own_state(state)
        self._period = self._plan = None

    # -- emulated failures --------------------------------------------------------------------------------------------

    def _trouble(self) -> Trouble:
        return (
            Trouble() if self._failures is None else self._failures.at(worker=self._transport.rank, round=self._round)
        )

    @torch.no_grad()
    def _return_from_outage(self) -> None:
        if self._failures is None:
            return
        trouble = self._trouble()
        if trouble.returns_with is not None:
            source = self._initial if trouble.returns_with == "initial" or not self._stale else self._stale
            for parameter, value in zip(self.gradients.everything, source, strict=True):
                parameter.data.copy_(value)
        if trouble.exchanges:
            self._stale = copies(self.gradients.everything)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "merging": self._merging.state_dict(),
            "speeds": self._speeds.tolist(),
            "rates": self._rates.tolist(),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._round = self.books.index = state["round"]
        self._merging.load_state_dict(state["merging"])
        if len(state["speeds"]) == self._transport.size:
            self._speeds = np.array(state["speeds"])
            self._rates = np.array(state.get("rates", state["speeds"]))
        self._statistics.rebase()

    def state_dict(self) -> dict[str, Any]:
        books, gradients = self.books.state_dict(), self.gradients.state_dict()
        return {**books, "step": self._next, "gradients": gradients, **self._own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next = state["step"]
        if "merging" in state:
            self._load_own_state(state)
        else:  # it was saved under another combine
            self._round = self.books.index = 0
            self._merging.rebase()
            self._statistics.rebase()


def _dropped_in_a_call() -> FleetError:
    return FleetError(
        "this worker was silent for too long, and the fleet went on without it while it waited in a call for the "
        "others: start it again, and it enters anew"
    )
