"""Local steps (``combine="average"`` and ``"elastic-average"``): every worker steps by itself, or with its group.

A step of the user's loop is then a *local* step: this worker's own part of the global batch, its own gradient, its own
update. Workers in a group make their local steps together, with the mean of their gradients; what must be decided for
all of them, the first member says in the step's own sum. The rounds between local steps are averaged.py's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.combine import Header
from paceline.combine.averaging.averaged import Averaged
from paceline.combine.averaging.merging import decay_of
from paceline.combine.averaging.period import Period
from paceline.combine.gradients.scaling import is_active
from paceline.errors import MisuseError
from paceline.loop.step import Step
from paceline.loop.step_state import Turn
from paceline.records import Plan, StepRecord

OVER, LANDED = 1, 2
"""What a group's first member says in a local step: its period's time is up; the round under way is over."""


class LocalSteps(Averaged):
    """The steps of one worker."""

    _word = 0
    """What the group's first member said in the last local step."""
    _waited_s = 0.0
    """In the last local step, for the others of the group."""

    def _begin(self) -> Step | None:
        self._require_open()
        self._look_at_the_script()
        if self._outside:
            self._cross_boundary()
            if self._outside:  # it has entered in a later loop of the script
                return None
        if self._period is None and self._under_way is None:  # right after a round: everything done is counted
            self.at_boundary(self)
        # Steps begun are not told: a worker that waits for the others' round has not been passed by them.
        self._transport.doing(f"local step {self._next}")
        period, epoch = self._ready()
        parts = (0,) * len(self._members) if period is None else period.parts()
        share = parts[self._member]
        self._feed.take_up(share, done=self._uncounted() if share else 0)
        self.gradients.begin(max(1, sum(parts)))
        began = time.perf_counter()
        turn = Turn(
            plan=Plan(generation=self._transport.generation, step=self._next, samples=parts),
            shares=parts,
            epoch=epoch,
            dealt=sum(parts),
            expected=sum(parts),
            last=False,
            compare=False,
            opened=began,
            ends_epoch=period is None or self._may_end_epoch(period, parts),
        )
        turn.start(began)
        return Step(self, turn, share=share, began=began)

    def _uncounted(self) -> int:
        """Samples at the head of this worker's queue that it has done and no round has counted yet."""
        before = 0 if self._under_way is None else self._under_way.period.samples
        return before + (0 if self._period is None else self._period.samples)

    def _ready(self) -> tuple[Period | None, int]:
        """The open period, with something left in it for this worker's group, and its epoch; rounds are run until there
        is one. No period when that epoch ended on the way: this worker's loop hears of it by a step without
        micro-batches."""
        epoch = self._feed.epoch
        while True:
            self._period = self._period or self._open()
            if self._trouble().trains and not self._period.exhausted:
                return self._period, epoch
            if self._under_way is not None:
                self._arrive()
            elif not self._depart():
                self._cross_boundary()
                epoch = self._feed.epoch  # the others' loops heard of all ends before
            if self.finished or self._feed.epoch != epoch:
                return None, epoch

    def _may_end_epoch(self, period: Period, parts: Sequence[int]) -> bool:
        """Whether this step may well be the epoch's last; sure is that after its commit."""
        left = self._feed.remaining
        last = [done + part for done, part in zip(period.done, parts, strict=True)] == list(period.windows)
        return last and left is not None and sum(period.shares) >= left

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check_optimizers(optimizers)
        self._optimizers = tuple(optimizers)

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """A local step's gradient: this worker's own, or its group's mean."""
        turn, period = step.turn, self._period
        header = self._written(partial(self._write_step, turn, self.gradients.finish()))
        entered = time.perf_counter()
        self.gradients.exchange(header, turn.work.samples, f"local step {turn.index}")
        self._waited_s = time.perf_counter() - entered
        self._word = int(header.column("ended")[0])
        turn.header = header
        apply = self._may_apply(step, header)
        if apply:
            self.gradients.mean(header, clip_norm)
            if self._merging.decays and period is not None:
                period.contraction += decay_of(self._optimizers, getattr(self.combine, "weight_decay", None))
        turn.record = self._local_record(turn, header)
        step.record = turn.record
        return apply

    def _write_step(self, turn: Turn, finite: bool) -> Header:
        header, work = Header(self.gradients.layout), turn.work
        overflow = not finite and is_active(self.gradients.scaler)
        header.write(
            self._member,
            samples=work.samples,
            weight=float(work.weight),
            loss=float(work.loss_sum),
            squares=self.gradients.squares(float(work.weight)),
            seconds=work.seconds,
            micro_batches=work.micro_batches,
            overflow=overflow,
            nonfinite=not finite and not overflow,
            ended=self._say() if self._member == 0 else 0,
        )
        self._add_figures(header, work.added)
        return header

    def _say(self) -> int:
        """What the group's first member decides for all: they must end a period, and take over a round, together."""
        period, by_clock = self._period, getattr(self.combine, "period_s", None)
        if period is None:
            return 0
        elapsed = time.perf_counter() - period.began
        over = by_clock is not None and elapsed + elapsed / (period.steps + 1) / 2 >= by_clock
        landed = self._under_way is not None and self._under_way.over
        return OVER * over + LANDED * landed

    def _local_record(self, turn: Turn, header: Header) -> StepRecord:
        return StepRecord(
            **self._said(header),
            step=turn.index,
            epoch=turn.epoch,
            generation=self._transport.generation,
            workers=tuple(self._transport.workers[member] for member in self._members),
            planned=turn.shares,
            grad_norm=self.gradients.known_norm,
        )

    def _nonfinite_text(self, step: Step, header: Header, workers: list[int]) -> str:
        """A group's header in the fleet's numbers."""
        wide = Header(replace(self._layout, counters=0))
        wide.facts[list(self._members)] = header.facts
        return super()._nonfinite_text(step, wide, [self._members[member] for member in workers])

    def _warn_all(self, text: str) -> None:
        """A warning that the whole group has: its first member's is enough."""
        if self._member == 0:
            self._observe("note", {"level": "warning", "text": text})

    def commit(self, step: Step, updated: float) -> None:
        turn, period, work = step.turn, self._period, step.turn.work
        assert turn.header is not None
        self.gradients.clear(overflow=bool(turn.header.column("overflow").any()))
        self._next += 1
        if turn.dealt == 0:  # it only said that an epoch is over
            return
        assert period is not None
        if work.samples < turn.shares[self._member] and not self.leaving:
            raise MisuseError(f"step {step.index} was left half done: finish the loop over its micro-batches")
        self._count(period, step)
        epoch = self._feed.epoch
        self._advance()
        step.ends_epoch = self.finished or self._feed.epoch != epoch
        self._transport.doing(f"its own code after local step {step.index}")

    def _count(self, period: Period, step: Step) -> None:
        work, wall_s = step.turn.work, time.perf_counter() - step.began
        parts = list(step.turn.shares)
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

    def _advance(self) -> None:
        """Between two local steps: take over a round that is over, and begin the one that is due."""
        if self._under_way is not None and (self._word & LANDED or self._due()):
            self._arrive()
        if self._due():
            self._depart()
            if self._under_way is not None and self._period is not None and self._period.exhausted:
                self._arrive()

    def _due(self) -> bool:
        """Whether a round comes now: the period's steps, its samples or its time are over."""
        period = self._period
        if period is None:
            return False
        by_clock = getattr(self.combine, "period_s", None) is not None
        return self.leaving or period.exhausted or (period.over if by_clock else period.steps >= self._steps_a_period())
