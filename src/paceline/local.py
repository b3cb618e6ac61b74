"""Trainings whose workers step by themselves and merge parameters now and then (``combine="average"`` and
``"elastic-average"``).

A step of the user's loop is then a *local* step: this worker's own part of the global batch, its own gradient, its own
update. Between two rounds lies a **period**: so many local steps, or so many seconds, in which a fast worker makes more
steps than a slow one and nobody waits. What a worker was dealt for a period and did not do stays in its queue, so every
sample of the epoch still counts exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from paceline.combine import Header
from paceline.combine.averaging_settings import Averaging, ElasticAverage
from paceline.combine.header import Layout
from paceline.combine.merging import copies, decay_of, make_merging, momentum_of
from paceline.combine.scaling import is_active
from paceline.combine.statistics import RunningStatistics
from paceline.dealing import Dealing, MicroBatch
from paceline.errors import MisuseError
from paceline.loop import Steps
from paceline.machines.failures import Failures, Trouble
from paceline.records import Plan, Range, StepRecord
from paceline.step import Step
from paceline.turn import Turn

GENEROUS = 1.4
"""What is dealt for a period over what a worker did in the last one, so that nobody runs out."""
FIRST_STEPS = 4
"""Local steps dealt for the first period by the clock, while nobody's speed is known."""


class InSteps:
    """A period's samples, a local step at a time."""

    def __init__(self, inner: Dealing) -> None:
        self.inner = inner
        self.allowed = 0

    def take(self, largest: int | None = None) -> MicroBatch | None:
        if self.allowed <= 0:
            return None
        micro = self.inner.take(min(self.allowed, largest or self.allowed))
        if micro is not None:
            self.allowed -= micro.samples
        return micro

    @property
    def left(self) -> int:
        return min(max(0, self.allowed), self.inner.left)

    def shrink(self, size: int, *, again: bool) -> bool:
        before = self.inner.left
        shrunk = self.inner.shrink(size, again=again)
        self.allowed += self.inner.left - before
        return shrunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Period:
    """What this worker has done since the last round."""

    began: float
    shares: tuple[int, ...]
    """Samples dealt to each worker."""
    batch: int
    """Samples of one of this worker's local steps."""
    steps: int = 0
    samples: int = 0
    micro_batches: int = 0
    weight: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    slowest_s: float = 0.0
    contraction: float = 0.0
    added: dict[str, float] = field(default_factory=dict)


class LocalSteps(Steps):
    """The steps of one worker, and the rounds between them."""

    def __init__(
        self,
        *,
        combine: Averaging | ElasticAverage,
        models: Sequence[torch.nn.Module],
        failures: Failures | None,
        lengths: Sequence[int],
        **loop: Any,
    ) -> None:
        """``lengths``: how much of an epoch each worker claims when it opens; empty: it is dealt as it goes."""
        super().__init__(**loop)
        self.combine = combine
        self.dealing: Any = InSteps(loop["dealing"])
        self._feed: Dealing = loop["dealing"]
        self._feed.smallest = 1
        self._merging = make_merging(combine, self.gradients.everything, self._transport)
        self._statistics = RunningStatistics(models)
        self._layout = Layout(self._transport.size, 0, len(self._statistics))
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._period: Period | None = None
        self._round = 0
        self._call = 0.0
        """What this worker waits to do together with the others, as a number; 0: nothing."""
        self._together = np.zeros(self._transport.size)
        self._moved = torch.empty(0)
        self._lengths = tuple(lengths)
        self._speeds = np.zeros(self._transport.size)
        self._failures = failures
        self._initial = copies(self.gradients.everything) if failures else []
        self._stale: list[torch.Tensor] = []
        self._plan: Plan | None = None

    # -- local steps ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Shared updates so far."""
        return self._round

    def _begin(self) -> Step:
        if self._closed:
            raise MisuseError("this loop has ended: a later fleet.steps took its place, or the fleet was left")
        self._transport.doing(f"local step {self._next}", begun=self._next + 1)
        epoch = self._feed.epoch
        period = self._ready()
        own = 0 if period is None else period.shares[self._transport.rank] - period.samples
        share = 0 if period is None else min(period.batch, own)
        self.dealing.allowed = share
        self.gradients.begin(max(1, share))
        began = time.perf_counter()
        left = self._feed.remaining
        turn = Turn(
            plan=Plan(generation=self._transport.generation, step=self._next, samples=(share,)),
            shares=(share,),
            epoch=epoch,
            dealt=share,
            expected=share,
            last=False,
            compare=False,
            opened=began,
            ends_epoch=period is None or (left is not None and sum(period.shares) >= left and share == own),
        )
        turn.start(began)
        return Step(self, turn, share=share, began=began)

    def _ready(self) -> Period | None:
        """The open period, with something left in it for this worker; rounds are run until there is one. None when an
        epoch ended on the way: this worker's loop hears of it by a step without micro-batches."""
        epoch = self._feed.epoch
        while True:
            if self._period is None:
                self._period = self._open()
            if self._trouble().trains and self._period.samples < self._period.shares[self._transport.rank]:
                return self._period
            self._run_round_now()
            if self.finished or self._feed.epoch != epoch:
                return None

    def _open(self) -> Period:
        """Deal a period. Everybody works out the same shares from what the last round said."""
        size, rank = self._transport.size, self._transport.rank
        self._plan = self._plan or self._hand_round_plan()
        equal = np.full(size, max(1, self.settings.global_batch // size))
        if isinstance(self.combine, Averaging) and self.combine.period_s is not None:
            batches = equal
            wanted = np.ceil(GENEROUS * self._speeds * self.combine.period_s / batches)
            shares = np.where(self._speeds > 0, np.maximum(wanted, 1), FIRST_STEPS).astype(int) * batches
        else:
            # With a common part everybody has as much, and is to finish it at the same time.
            batches = equal if self._lengths else np.maximum(1, np.asarray(self._plan.samples))
            shares = batches * self._steps_a_period()
        if self._lengths and self._feed.remaining == self._feed.length:
            self._feed.deal(self._lengths)  # an epoch opens: everybody claims its own part and the common one
        dealt = self._feed.deal(tuple(int(share) for share in shares))
        self._feed.take_up(dealt[rank])
        self._statistics.begin()
        self._return_from_outage()
        return Period(began=time.perf_counter(), shares=dealt, batch=int(batches[rank]))

    def _steps_a_period(self) -> int:
        settings = self.combine
        return settings.tau if isinstance(settings, ElasticAverage) else settings.every_steps or 1

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check_optimizers(optimizers)
        self._optimizers = tuple(optimizers)

    def exchange(self, step: Step, clip_norm: float | None) -> bool:
        """A local step's own gradient: nobody else has a part in it."""
        turn = step.turn
        finite = self.gradients.finish()
        header = Header(self.gradients.layout)
        overflow = not finite and is_active(self.gradients.scaler)
        header.write(
            0,
            samples=turn.work.samples,
            weight=float(turn.work.weight),
            loss=float(turn.work.loss_sum),
            overflow=overflow,
            nonfinite=not finite and not overflow,
        )
        self.gradients.exchange(header, turn.work.samples, f"local step {turn.index}")
        turn.header = header
        apply = self._may_apply(step, header)
        if apply:
            self.gradients.mean(header, clip_norm)
            if self._merging.decays:
                assert self._period is not None
                self._period.contraction += decay_of(self._optimizers, getattr(self.combine, "weight_decay", None))
        turn.record = self._local_record(turn)
        step.record = turn.record
        return apply

    def _local_record(self, turn: Turn) -> StepRecord:
        work, weight = turn.work, float(turn.work.weight)
        return StepRecord(
            step=turn.index,
            epoch=turn.epoch,
            generation=self._transport.generation,
            workers=(self._transport.rank,),
            planned=turn.shares,
            samples=(work.samples,),
            seconds=(work.seconds,),
            micro_batches=(work.micro_batches,),
            weight=weight,
            loss=float(work.loss_sum) / weight if weight else None,
            grad_norm=self.gradients.known_norm,
            sums={name: float(value) for name, value in work.added.items()},
        )

    def commit(self, step: Step, updated: float) -> None:
        turn, period = step.turn, self._period
        assert turn.header is not None
        self.gradients.clear(overflow=bool(turn.header.column("overflow").any()))
        self._next += 1
        work = turn.work
        if turn.shares[0] == 0:  # it only said that an epoch is over
            return
        assert period is not None
        period.steps += 1
        period.samples += work.samples
        period.micro_batches += work.micro_batches
        period.weight += float(work.weight)
        period.loss += float(work.loss_sum)
        period.slowest_s = max(period.slowest_s, work.slowest_s)
        period.seconds += time.perf_counter() - step.began
        for name, value in work.added.items():
            period.added[name] = period.added.get(name, 0.0) + float(value)
        if work.samples < turn.shares[0]:
            raise MisuseError(f"step {step.index} was left half done: finish the loop over its micro-batches")
        epoch = self._feed.epoch
        if self._due(period):
            self._run_round_now()
        step.ends_epoch = self.finished or self._feed.epoch != epoch
        self._transport.doing(f"its own code after local step {step.index}")

    def _due(self, period: Period) -> bool:
        """Whether the round comes now: the period's steps, its samples or its time are over."""
        if period.samples >= period.shares[self._transport.rank]:
            return True
        if isinstance(self.combine, Averaging) and self.combine.period_s is not None:
            step_s = period.seconds / period.steps
            return time.perf_counter() - period.began + step_s / 2 >= self.combine.period_s
        return period.steps >= self._steps_a_period()

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _run_round_now(self) -> None:
        period = self._period
        assert period is not None
        rank, trouble = self._transport.rank, self._trouble()
        entered = time.perf_counter()
        header = self._write_period(period)
        table = torch.zeros(self._transport.size, self._merging.columns + 1, dtype=torch.float64)
        table[rank, 0] = self._call
        table[rank, 1:] = torch.tensor(
            self._merging.row(
                steps=period.steps,
                samples=period.samples,
                contraction=period.contraction,
                momentum=momentum_of(self._optimizers),
                present=trouble.exchanges,
            )
        )
        with self._transport.round(f"the round after {self._round} rounds"):
            self._merge_statistics(header, period)
            pending = [self._transport.sum(table), self._transport.sum(header.tensor(torch.device("cpu")))]
            for one in pending:
                one.wait()
            self._merging.merge(table[:, 1:].numpy(), self._optimizers)
        self._finish_statistics(header)
        self._close_period(period, header, entered)
        self._together = table[:, 0].numpy()

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
        )
        for name, value in period.added.items():
            header.add(self._transport.slot(name), value)
        if self._transport.rank == 0:
            header.write_plan(self._books.plan_for(self._round + 1))
        return header

    def _merge_statistics(self, header: Header, period: Period) -> None:
        """Batch norm's running statistics: their mean by samples, as in every round."""
        self._statistics.note()
        header.counters[:] = self._statistics.moved
        self._moved = self._statistics.payload(period.samples)
        if len(self._statistics):
            self._transport.sum(self._moved).wait()

    def _finish_statistics(self, header: Header) -> None:
        if len(self._statistics):
            samples = float(header.column("samples").sum())
            self._statistics.merge(self._moved, samples, header.counters.tolist())

    def _close_period(self, period: Period, header: Header, entered: float) -> None:
        ended = time.perf_counter()
        samples = tuple(int(count) for count in header.column("samples"))
        seconds = header.column("seconds")
        weight = float(header.column("weight").sum())
        ranges: tuple[tuple[Range, ...], ...] = self._feed.commit(samples, False)
        record = StepRecord(
            step=self._round,
            epoch=self._feed.epoch,
            generation=self._transport.generation,
            workers=self._transport.workers,
            planned=period.shares,
            samples=samples,
            seconds=tuple(seconds.tolist()),
            micro_batches=tuple(int(n) for n in header.column("micro_batches")),
            slowest_s=tuple(header.column("slowest_s").tolist()),
            wall_s=ended - period.began,
            round_s=max(0.0, ended - entered - max(0.0, float(seconds.max()) - period.seconds)),
            weight=weight,
            loss=float(header.column("loss").sum()) / weight if weight else None,
            sums={self._transport.slot_name(slot): value for slot, value in header.sums().items()},
            ranges=ranges,
        )
        self._speeds = np.where(seconds > 0, np.asarray(samples) / np.maximum(seconds, 1e-9), self._speeds)
        self._books.observe(record)
        self._plan = header.read_plan()
        self._round += 1
        self._period = None
        if self._feed.remaining == 0:
            self._books.next_epoch()
        self.finished, self._progress = self._books.finished, self._books.progress
        if self.finished:
            self._show_for_good()

    def _show_for_good(self) -> None:
        """The training is over: everybody holds what is to be evaluated and saved."""
        with self._merging.shown():
            final = copies(self.gradients.everything)
        for parameter, value in zip(self.gradients.everything, final, strict=True):
            parameter.data.copy_(value)

    # -- together ------------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Run rounds until everybody has come to the same call; in the context the parameters are those to show."""
        if self.begun and not self.finished and self._transport.size > 1:
            self._call = float(int.from_bytes(blake2b(label.encode(), digest_size=6).digest(), "big"))
            self._transport.doing(label)
            while True:
                if self._period is None:
                    self._period = self._open()
                self._run_round_now()
                if (self._together > 0).all() or self.finished:
                    break
            self._call = 0.0
            if len(set(self._together[self._together > 0].tolist())) > 1:
                raise MisuseError(f"not every worker called {label}: some are in another call, which cannot end")
        return self._merging.shown()

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

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._books.state_dict(),
            "step": self._next,
            "round": self._round,
            "gradients": self.gradients.state_dict(),
            "merging": self._merging.state_dict(),
            "speeds": self._speeds.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next, self._round = state["step"], state.get("round", 0)
        if "merging" in state:
            self._merging.load_state_dict(state["merging"])
            if len(state["speeds"]) == self._transport.size:
                self._speeds = np.array(state["speeds"])
        else:
            self._merging.rebase()
        self._statistics.rebase()

    @property
    def index(self) -> int:
        return self._next
