"""``combine="average"`` and ``"elastic-average"`` as the loop uses them: local steps, and rounds of parameters between.

A step of the user's loop is a *local* step: this worker's own part of the global batch, its own gradient, its own
update. Workers in a group make their local steps together, with the mean of their gradients; what must be decided for
all of them, the first member says in the step's own sum.

Between two rounds lies a **period**: so many local steps, or so many seconds, in which a fast worker makes more steps
than a slow one and nobody waits. What a worker was dealt for a period and did not do stays in its queue, so every
sample of the epoch still counts exactly once. A round may run beside the local steps that follow it (``overlap``): they
go on with what is left of what was dealt, and when the round is over its update lands between two of them.
With ``every="end"`` rounds only count and deal, and the last one averages.

Where workers come and go, those who are left run a round again when somebody is lost in it, with what they have done
themselves: only what a round counted is done, and the rest is dealt again. Others enter and leave right after a round,
when nobody waits in a call such as ``fleet.evaluate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from paceline import concurrency
from paceline.combine import Header
from paceline.combine.averaging.contraction import contraction_of
from paceline.combine.averaging.groups import check_fits, over_group, place_of
from paceline.combine.averaging.period import Period
from paceline.combine.averaging.periods import Periods
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.base import CombineParts
from paceline.combine.gradients.combine import may_apply
from paceline.combine.gradients.scaling import is_active
from paceline.errors import MisuseError
from paceline.loop.context import LoopContext
from paceline.loop.rounds import InlineRound
from paceline.loop.step import Step
from paceline.loop.step_recording import WORK
from paceline.loop.step_state import StepState
from paceline.pace.period import time_is_up
from paceline.records import Plan, StepRecord

OVER, LANDED = 1, 2
"""What a group's first member says in a local step: its period's time is up; the round under way is over."""


class AveragingCombine:
    """Local steps, and a weighted average of parameters now and then."""

    def __init__(self, loop: LoopContext, settings: Averaging | ElasticAverage, parts: CombineParts) -> None:
        transport = loop.transport
        if transport.elastic:
            settings.check_elastic()
        overlaps = isinstance(settings, Averaging) and settings.overlap and transport.size > 1
        place = place_of(settings, rank=transport.rank, size=transport.size)
        grouped = len(place.groups) < transport.size
        once = isinstance(settings, Averaging) and settings.once
        asked = {"grouped": grouped, "overlaps": overlaps, "once": once}
        check_fits(transport, loop.dealing, parts.failures, **asked, varying=loop.gradients.varying)
        if grouped:
            loop.gradients = over_group(loop.gradients, transport, place.members, parts.models)
        self.loop, self._settings = loop, settings
        self.periods = Periods(loop, settings, parts, overlaps=overlaps)
        self._word = 0
        """What the group's first member said in the last local step."""
        self._waited_s = 0.0
        """In the last local step, for the others of the group."""

    @property
    def rounds(self) -> int:
        return self.periods.number

    @property
    def counts_steps(self) -> bool:
        dealer = self.periods.dealer
        return (dealer.period_s is None and not dealer.by_arrival) or self.loop.transport.size == 1

    @property
    def hands_over_state(self) -> bool:
        return self.loop.transport.elastic

    @property
    def _members(self) -> tuple[int, ...]:
        return self.periods.dealer.place.members

    @property
    def _member(self) -> int:
        return self.periods.dealer.place.member

    # -- a local step --------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        loop, periods = self.loop, self.periods
        periods.inside = True
        if periods.outside:
            periods.cross_boundary()
            if periods.outside:  # it has entered in a later loop of the script
                return None
        if periods.open is None and periods.under_way is None:  # right after a round: everything done is counted
            loop.at_boundary()
        # Steps begun are not told: a worker that waits for the others' round has not been passed by them.
        loop.transport.doing(f"local step {loop.next}")
        period, epoch = periods.ready()
        parts = (0,) * len(self._members) if period is None else period.parts()
        share = parts[self._member]
        loop.size_micro_batches(share)
        loop.dealing.take_up(share, done=periods.uncounted if share else 0)
        loop.gradients.begin(max(1, sum(parts)))
        began = concurrency.perf_counter()
        step_state = StepState(
            plan=Plan(generation=loop.transport.generation, step=loop.next, samples=parts),
            shares=parts,
            epoch=epoch,
            dealt=sum(parts),
            expected=sum(parts),
            last=False,
            compare=False,
            opened=began,
            ends_epoch=period is None or self._may_end_epoch(period, parts),
        )
        step_state.start(began)
        return Step(loop, self, step_state, InlineRound(loop, step_state), share=share, began=began)

    def _may_end_epoch(self, period: Period, parts: Sequence[int]) -> bool:
        """Whether this step may well be the epoch's last; sure is that after its commit."""
        left = self.loop.dealing.remaining
        last = [done + part for done, part in zip(period.done, parts, strict=True)] == list(period.windows)
        return last and left is not None and sum(period.shares) >= left

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """A local step's gradient: this worker's own, or its group's mean."""
        loop, step_state = self.loop, step.step_state
        assert isinstance(step.work, InlineRound)
        finite = step.work.finish()
        header = self.periods.exchange.persistently(partial(self._write_step, step_state, finite))
        entered = concurrency.perf_counter()
        loop.gradients.exchange.run(lambda: header, step_state.work.samples, f"local step {step_state.index}")
        self._waited_s = concurrency.perf_counter() - entered
        self._word = int(header.column("ended")[0])
        step_state.header = header
        apply = may_apply(self, step, header, ranks=self._members)
        if apply:
            loop.gradients.mean(header, clip_norm)
        step.record = step_state.record = self._record(step_state, header)
        return apply

    def _write_step(self, step_state: StepState, finite: bool) -> Header:
        gradients, work = self.loop.gradients, step_state.work
        header, overflow = Header(gradients.layout), not finite and is_active(gradients.scaler)
        header.write(
            self._member,
            **{fact: getattr(work, fact) for fact in WORK},
            weight=float(work.weight),
            **work.tally.facts(float(work.weight)),
            loss=float(work.loss_sum),
            squares=gradients.exchange.squares(float(work.weight)),
            overflow=overflow,
            nonfinite=not finite and not overflow,
            ended=self._say() if self._member == 0 else 0,
            **self.loop.sizes,
        )
        self.loop.add_figures(header, work.added)
        return header

    def _say(self) -> int:
        """What the group's first member decides for all: they must end a period, and take over a round, together."""
        period, by_clock = self.periods.open, self.periods.dealer.period_s
        if period is None:
            return 0
        elapsed = concurrency.perf_counter() - period.began
        over = by_clock is not None and time_is_up(elapsed, period.steps + 1, by_clock)
        landed = self.periods.under_way is not None and self.periods.under_way.over
        return OVER * over + LANDED * landed

    def _record(self, step_state: StepState, header: Header) -> StepRecord:
        transport = self.loop.transport
        return StepRecord(
            **self.loop.said(header),
            step=step_state.index,
            epoch=step_state.epoch,
            generation=transport.generation,
            workers=tuple(transport.workers[member] for member in self._members),
            planned=step_state.shares,
            grad_norm=self.loop.gradients.mean_gradient.known_norm,
        )

    def commit(self, step: Step, updated: float) -> None:
        loop, step_state, period, work = self.loop, step.step_state, self.periods.open, step.step_state.work
        assert step_state.header is not None
        contraction = self._contraction() if step.applied and self.periods.merging.decays else 0.0
        loop.gradients.clear(overflow=bool(step_state.header.column("overflow").any()))
        loop.next += 1
        if step_state.dealt == 0:  # it only said that an epoch is over
            return
        assert period is not None
        if work.samples < step_state.shares[self._member] and not loop.leaving:
            raise MisuseError(f"step {step.index} was left half done: finish the loop over its micro-batches")
        self._count(period, step)
        period.contraction += contraction
        epoch = loop.dealing.epoch
        self._advance()
        step.ends_epoch = loop.finished or loop.dealing.epoch != epoch
        loop.transport.doing(f"its own code after local step {step.index}")

    def _count(self, period: Period, step: Step) -> None:
        work, wall_s = step.step_state.work, concurrency.perf_counter() - step.began
        parts = list(step.step_state.shares)
        parts[self._member] = work.samples  # less than its share where this worker was asked to leave
        period.count(parts)
        period.micro_batches += work.micro_batches
        period.weight += float(work.weight)
        period.loss += float(work.loss_sum)
        period.slowest_s = max(period.slowest_s, work.slowest_s)
        period.wall_s += wall_s
        period.seconds += wall_s - self._waited_s
        period.over = bool(self._word & OVER)
        for name, value in work.added.items():
            period.added[name] = period.added.get(name, 0.0) + float(value)

    def _contraction(self) -> float:
        """Of the update just made. Optimisers that the script steps itself are known by their names."""
        optimizers = self.loop.optimizers or tuple(self.loop.tracking.optimizers.values())
        return contraction_of(optimizers, getattr(self._settings, "weight_decay", None))

    def _advance(self) -> None:
        """Between two local steps: take over a round that is over, and begin the one that is due."""
        periods = self.periods
        if periods.under_way is not None and (self._word & LANDED or self._due()):
            periods.land_round()
        if self._due():
            periods.end_period()
            if periods.under_way is not None and periods.open is not None and periods.open.exhausted:
                periods.land_round()

    def _due(self) -> bool:
        """Whether a round comes now: the period's steps, its samples or its time are over."""
        period, dealer = self.periods.open, self.periods.dealer
        if period is None:
            return False
        over = period.over if dealer.period_s is not None else period.steps >= dealer.steps_a_period
        return self.loop.leaving or period.exhausted or over

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Run rounds until everybody has come to the same call."""
        self.periods.check_whole(label)
        self.periods.meet(label)
        return self.shown()

    def shown(self) -> AbstractContextManager[Any]:
        self.periods.check_whole("a checkpoint")
        context: AbstractContextManager[Any] = self.periods.merging.shown()
        return context

    def models_were_set(self) -> None:
        self.loop.gradients.statistics_were_set()
        self.periods.rebase()

    def warn(self, text: str) -> None:
        """The group's first member tells it."""
        if self._member == 0:
            self.loop.observe("note", {"level": "warning", "text": text})

    def ended(self) -> None:
        self.periods.inside = False

    def close(self, *, orderly: bool) -> None:
        if orderly and (self.periods.overlaps or self.periods.once or self.periods.turns is not None):
            self.periods.inside = False
            self.meet("the end of the loop")  # else a round would wait for a worker that has left

    def wait_for_threads(self) -> None:
        self.periods.wait_for_thread()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """None: what a lost worker did in a period is dealt again as a whole."""
        return None

    def members_changed(self, kept: Sequence[int | None]) -> None:
        self.periods.members_changed(kept)

    def whole_state(self) -> dict[str, Any]:
        return self.periods.whole_state()

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        self.periods.take_over(state, ahead=ahead)

    def state_dict(self) -> dict[str, Any]:
        loop = self.loop
        training, gradients = loop.training.state_dict(), loop.gradients.state_dict()
        return {**training, "step": loop.next, "gradients": gradients, **self.periods.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self.loop
        loop.gradients.load_state_dict(state["gradients"])
        loop.training.load_state_dict(state)
        loop.next, loop.finished, loop.progress = state["step"], loop.training.finished, loop.training.progress
        self.periods.load_state_dict(state)
