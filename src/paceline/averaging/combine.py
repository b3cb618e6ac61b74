"""``combine="average"`` and ``"elastic-average"`` as the loop uses them: local steps, and rounds of parameters between.

A step of the user's loop is a *local* step: this worker's own part of the global batch, its own gradient, its own
update. Workers in a group make their local steps together, with the mean of their gradients; what must be decided for
all of them, the first member writes into the step's own sum.

Between two rounds lies a **period**: a number of local steps, or of seconds, in which a fast worker makes more steps
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

import torch

from paceline import concurrency
from paceline.averaging.merge import MergeSettings
from paceline.averaging.period import Period, group_position
from paceline.averaging.periods import Periods
from paceline.errors import MisuseError
from paceline.feed.dealing import Dealing
from paceline.gradients import Gradients, Header
from paceline.gradients.gradients import VaryingCount
from paceline.gradients.scaling import is_active
from paceline.machines.failures import Failures
from paceline.pace.shares import time_is_up
from paceline.records import Plan, StepRecord
from paceline.step.combine import CombineParts, may_apply
from paceline.step.context import LoopContext
from paceline.step.round import SynchronousRound
from paceline.step.step import Step
from paceline.step.step_state import WORK, StepState
from paceline.transport import Transport

PERIOD_OVER, ROUND_OVER = 1, 2
"""The bits by which a group's first member decides for all, in the header's field ``ended`` of a local step.

The period's time is up, and the round that runs beside the local steps has its result.
"""


class AveragingCombine:
    """Local steps, and a weighted average of parameters now and then."""

    def __init__(self, loop: LoopContext, settings: MergeSettings, parts: CombineParts) -> None:
        transport = loop.transport
        if transport.elastic:
            settings.check_elastic()
        overlaps = settings.overlaps_rounds and transport.size > 1
        position = group_position(settings, rank=transport.rank, size=transport.size)
        grouped = len(position.groups) < transport.size
        asked = {"grouped": grouped, "overlaps": overlaps, "once": settings.once}
        check_fits(transport, loop.dealing, parts.failures, **asked, varying=loop.gradients.varying)
        if grouped:
            loop.gradients = over_group(loop.gradients, transport, position.members, parts.models)
        self.loop = loop
        self.periods = Periods(loop, settings, parts, overlaps=overlaps)
        self._decided = 0
        """The bits that the group's first member reported in the last local step."""
        self._waited_s = 0.0
        """Seconds of waiting for the others of the group in the last local step."""

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
        return self.periods.dealer.position.members

    @property
    def _member(self) -> int:
        return self.periods.dealer.position.member

    # -- a local step --------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        loop, periods = self.loop, self.periods
        periods.inside = True
        if periods.outside:
            periods.cross_boundary()
            if periods.outside:  # it has entered in a later loop of the script
                return None
        if periods.open is None and periods.under_way is None:  # right after a round: everything done is counted
            loop.save_if_due()
        # The step's number is not reported: a worker that waits for the others' round has not been passed by them.
        loop.transport.doing(f"local step {loop.position.next}")
        period, epoch = periods.ready()
        if loop.transport.outside:
            return None
        parts = (0,) * len(self._members) if period is None else period.parts()
        share = parts[self._member]
        loop.size_micro_batches(share)
        loop.dealing.begin_share(share, done=periods.uncounted if share else 0)
        loop.gradients.begin(max(1, sum(parts)))
        began = concurrency.perf_counter()
        step_state = StepState(
            plan=Plan(generation=loop.transport.generation, step=loop.position.next, samples=parts),
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
        return Step(loop, self, step_state, SynchronousRound(loop, step_state), share=share, began=began)

    def _may_end_epoch(self, period: Period, parts: Sequence[int]) -> bool:
        """Return whether this step may well be the epoch's last; that is certain after its commit."""
        left = self.loop.dealing.remaining
        last = [done + part for done, part in zip(period.done, parts, strict=True)] == list(period.windows)
        return last and left is not None and sum(period.shares) >= left

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """Compute a local step's gradient: this worker's own, or its group's mean."""
        loop, step_state = self.loop, step._step_state
        assert isinstance(step._step_round, SynchronousRound)
        finite = step._step_round.start_rest_and_wait()
        header = self.periods.exchange.persistently(partial(self._write_step, step_state, finite))
        entered = concurrency.perf_counter()
        loop.gradients.exchange.run(lambda: header, step_state.work.samples, f"local step {step_state.index}")
        self._waited_s = concurrency.perf_counter() - entered
        self._decided = int(header.column("ended")[0])
        step_state.header = header
        apply = may_apply(self, step, header, ranks=self._members)
        if apply:
            loop.gradients.mean(header, clip_norm)
        step._record = step_state.record = self._record(step_state, header)
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
            ended=self._decision() if self._member == 0 else 0,
            **self.loop.micro_batches.sizes,
        )
        self.loop.add_figures(header, work.added)
        return header

    def _decision(self) -> int:
        """Return what the group's first member decides for all: they end a period, and take over a round, together."""
        period, by_clock = self.periods.open, self.periods.dealer.period_s
        if period is None:
            return 0
        elapsed = concurrency.perf_counter() - period.began
        over = by_clock is not None and time_is_up(elapsed, period.steps + 1, by_clock)
        landed = self.periods.under_way is not None and self.periods.under_way.over
        return PERIOD_OVER * over + ROUND_OVER * landed

    def _record(self, step_state: StepState, header: Header) -> StepRecord:
        transport = self.loop.transport
        return StepRecord(
            **self.loop.work_fields(header),
            step=step_state.index,
            epoch=step_state.epoch,
            generation=transport.generation,
            workers=tuple(transport.workers[member] for member in self._members),
            planned=step_state.shares,
            grad_norm=self.loop.gradients.mean_gradient.known_norm,
        )

    def commit(self, step: Step, update_began: float) -> None:
        loop, step_state, period, work = self.loop, step._step_state, self.periods.open, step._step_state.work
        assert step_state.header is not None
        contraction = self._contraction() if step.applied else 0.0
        loop.gradients.clear(overflow=bool(step_state.header.column("overflow").any()))
        loop.position.next += 1
        if step_state.dealt == 0:  # it only shows the end of an epoch
            return
        assert period is not None
        if work.samples < step_state.shares[self._member] and not loop.leaving:
            raise MisuseError(f"step {step.index} was left half done: finish the loop over its micro-batches")
        self._count(period, step)
        period.contraction += contraction
        epoch = loop.dealing.epoch
        self._advance()
        step.ends_epoch = loop.position.finished or loop.dealing.epoch != epoch
        loop.transport.doing(f"its own code after local step {step.index}")

    def _count(self, period: Period, step: Step) -> None:
        work, wall_s = step._step_state.work, concurrency.perf_counter() - step._began
        parts = list(step._step_state.shares)
        parts[self._member] = work.samples  # less than its share where this worker was asked to leave
        period.count(parts)
        period.micro_batches += work.micro_batches
        period.weight += float(work.weight)
        period.loss += float(work.loss_sum)
        period.slowest_s = max(period.slowest_s, work.slowest_s)
        period.wall_s += wall_s
        period.seconds += wall_s - self._waited_s
        period.over = bool(self._decided & PERIOD_OVER)
        for name, value in work.added.items():
            period.added[name] = period.added.get(name, 0.0) + float(value)

    def _contraction(self) -> float:
        """Return ``log rho`` of the update just made. Optimisers that the script steps itself are known by name."""
        optimizers = self.loop.script.optimizers or tuple(self.loop.tracking.optimizers.values())
        return self.periods.merge.contraction(optimizers)

    def _advance(self) -> None:
        """Take over a round that is over, and begin the one that is due, between two local steps."""
        periods = self.periods
        if periods.under_way is not None and (self._decided & ROUND_OVER or self._due()):
            periods.land_round()
        if self._due():
            periods.end_period()
            if periods.under_way is not None and periods.open is not None and periods.open.exhausted:
                periods.land_round()

    def _due(self) -> bool:
        """Return whether a round comes now: the period's steps, its samples or its time are over."""
        period, dealer = self.periods.open, self.periods.dealer
        if period is None:
            return False
        over = period.over if dealer.period_s is not None else period.steps >= dealer.steps_per_round
        return self.loop.leaving or period.exhausted or over

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Run rounds until everybody has come to the same call."""
        step = self.loop.position.step
        if self.periods.inside and step is not None and not step.committed and self.loop.transport.size > 1:
            raise MisuseError(
                f"{label} in the middle of local step {step.index}: with paceline.Averaging every worker is at a "
                "step of its own, so call it behind step.commit"
            )
        self.periods.check_parameters_shared(label)
        self.periods.meet(label)
        return self.shown()

    def shown(self) -> AbstractContextManager[Any]:
        self.periods.check_parameters_shared("a checkpoint")
        context: AbstractContextManager[Any] = self.periods.merge.shown()
        return context

    def models_were_set(self) -> None:
        self.loop.gradients.statistics_were_set()
        self.periods.rebase()

    def warn(self, text: str) -> None:
        """Log a warning, once per group."""
        if self._member == 0:
            self.loop.notes.warn(text)

    def complete(self) -> None:
        """Do nothing: a local step waits for its device."""

    def ended(self) -> None:
        self.periods.inside = False

    def close(self, *, orderly: bool) -> None:
        by_clock = self.periods.dealer.period_s is not None
        if orderly and (by_clock or self.periods.overlaps or self.periods.once or self.periods.turns is not None):
            self.periods.inside = False
            self.meet("the end of the loop")  # else a round would wait for a worker that has left

    def wait_for_threads(self) -> None:
        self.periods.wait_for_thread()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """None: what a lost worker did in a period is dealt again as a whole."""
        return None

    def count_round(self) -> None:
        return

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        self.periods.members_changed(old_ranks)

    def newcomer_state(self) -> dict[str, Any]:
        return self.periods.newcomer_state()

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        self.periods.take_over(state, ahead=ahead)

    def state_dict(self) -> dict[str, Any]:
        loop = self.loop
        training, gradients = loop.training.state_dict(), loop.gradients.state_dict()
        return {**training, "step": loop.position.next, "gradients": gradients, **self.periods.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self.loop
        loop.gradients.load_state_dict(state["gradients"])
        loop.training.load_state_dict(state)
        loop.position.move_to(state["step"], finished=loop.training.finished, progress=loop.training.progress)
        self.periods.load_state_dict(state)


def check_fits(
    transport: Transport,
    dealing: Dealing,
    failures: Failures | None,
    *,
    grouped: bool,
    overlaps: bool,
    once: bool,
    varying: VaryingCount | None = None,
) -> None:
    """Raise ValueError for what averages, groups or overlapped rounds cannot bear."""
    if varying is not None and varying.rule != "none":
        raise ValueError(
            f"lr_scaling={varying.rule!r} compares a step's count with global_batch, and a local step counts one "
            "worker's part of it: leave lr_scaling out, or use combine='gradients'"
        )
    if failures is not None and transport.elastic:
        raise ValueError(
            "failures by chance (lost, frozen, restart) are emulated in a fleet of fixed size alone: where workers "
            "come and go, ask for real ones, such as --failures kill:1@20"
        )
    if dealing.length is None:
        raise ValueError(
            "averages need a dataset with a length: workers make unlike numbers of local steps, and a stream does not "
            "say what is left of it; use combine='gradients'"
        )
    if failures is not None and (grouped or overlaps or once):
        what = "groups, whose members step together" if grouped else "overlap" if overlaps else 'every="end"'
        raise ValueError(f"emulated failures cannot be had with {what}: leave one of them out")


def over_group(
    gradients: Gradients, transport: Any, members: Sequence[int], models: Sequence[torch.nn.Module]
) -> Gradients:
    """Return the gradients of a group: combined at every local step over a transport of its own."""
    if gradients.keep_graph:
        raise ValueError(
            "an optimiser that needs second derivatives has them of this worker's own loss only: leave groups out"
        )
    if not hasattr(transport, "subgroup"):
        raise ValueError(f"the transport {transport.name!r} cannot form groups: leave groups out")
    gradients.detach()
    combined = Gradients(transport.subgroup(members), models, overlap=gradients.overlap, shared=gradients.shared)
    combined.next_scaler, combined.atomic, combined.varying = gradients.next_scaler, gradients.atomic, gradients.varying
    return combined
