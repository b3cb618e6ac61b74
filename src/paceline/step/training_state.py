"""The state of a training, the same on every worker: the feed, the history, the pacer and the plans.

A step is opened (dealt), perhaps extended or dealt again in laps, and closed: its round's summed header then changes
this state, in the same way on every worker. When a step is opened, the leader asks its pacer for the plan of the next
step; the plan travels in the open step's header, so everybody holds the same plan and nobody waits for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline import concurrency
from paceline.feed.dealing import Dealing
from paceline.gradients import Header
from paceline.pace import Ask, Pacer
from paceline.pace.steering import More, goal, least, least_samples, made_for, more, scaled_to, without_singles
from paceline.records import History, LoopSettings, Plan, StepRecord
from paceline.step.step_state import StepState
from paceline.transport import Transport

RECENT_RECORDS = 100
"""The number of last records that a newcomer is handed; the pacer's state holds what it learned from older ones."""


class TrainingState:
    """The plan, the feed's dealing, the pacer and the history of one loop."""

    def __init__(
        self,
        *,
        transport: Transport,
        pacer: Pacer,
        dealing: Dealing,
        settings: LoopSettings,
        unit: int,
        avoid_singles: bool,
        history: History,
        first_index: int,
        first_epoch: int = 0,
        log_event: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.dealing, self.settings, self.pacer = dealing, settings, pacer
        self.first_epoch = first_epoch
        """The number of passes over the dataset before this loop."""
        self.lock = concurrency.Condition(concurrency.RLock())
        """The lock that is held while this state or a step's state changes, and notified after."""
        self.index = first_index
        self.epoch_step = 0
        """The number of steps of the open epoch that are over."""
        self.finished = False
        self.plan: Plan | None = None
        self._may_have_deadline: Callable[[], bool] = lambda: False
        self.learn: Callable[[StepRecord], None] | None = None
        """Called with every record: a forecast that learns while the run goes on."""
        self._transport, self._history, self._log_event = transport, history, log_event
        self._unit, self._avoid_singles = unit, avoid_singles
        self._next_waits_for_all = False
        """Whether the next step waits for everybody, and compares the replicas."""
        self._newest: StepRecord | None = None
        """The newest record, as the pacer sees it."""
        self.promised: int | None = None
        """The steps per epoch by which ``len(steps)`` was answered; None: it was not asked for."""

    def ask_for_deadlines(self, may_have: Callable[[], bool]) -> None:
        """Ask, before every plan of a pace that can do without, whether the plan may have a deadline."""
        self._may_have_deadline = may_have

    # -- open ------------------------------------------------------------------------------------------------------

    def open(self, plan: Plan) -> StepState:
        """Deal the next step."""
        expected, last = self._goal(self.epoch_step, self.dealing.remaining, self.dealing.length)
        plan = made_for(plan, expected)
        if self._next_waits_for_all:
            plan = replace(scaled_to(plan, expected), deadline_s=None, wait_for=None)
        if last:
            plan = scaled_to(plan, expected)
        elif plan.total > expected and plan.total > (most := self._most(plan)):
            plan = scaled_to(plan, most)
        if self._avoid_singles:
            plan = self._without_singles(plan, last)
        shares = self.dealing.deal(plan.samples)
        left = self.dealing.remaining
        step_state = StepState(
            plan=plan,
            shares=shares,
            epoch=self.dealing.epoch,
            dealt=sum(shares),
            expected=min(expected, sum(shares)),
            last=last and left is not None and sum(shares) == left,
            compare=self._next_waits_for_all,
            opened=concurrency.perf_counter(),
            workers=self._transport.workers,
            generation=self._transport.generation,
            ends_epoch=left is not None and (last or sum(shares) >= left),
            progress=self.progress,
        )
        if plan.deadline_s is not None and not step_state.last:
            batch = self.settings.global_batch
            step_state.floor = least_samples(plan.least_count, batch if left is None else min(batch, left))
        self.plan_ahead(step_state)
        return step_state

    def plan_ahead(self, step_state: StepState) -> None:
        """Plan, on the leader, the step after the open one; the plan travels in the open one's round."""
        if self._transport.rank == 0 and len(self._history) > 0:
            step_state.next_plan = self._plan_after(step_state)

    def recount(self, step_state: StepState) -> int | None:
        """Return how many complete shares close the open step, by every record there is; None: as planned.

        The leader alone decides. In an epoch's last step everything is to be finished.
        """
        plan, transport = step_state.plan, self._transport
        if transport.rank != 0 or plan.wait_for is None or step_state.last or step_state.hurried:
            return None
        ask = Ask(
            step=step_state.index,
            total=step_state.expected,
            workers=step_state.workers,
            epoch=step_state.epoch,
            generation=step_state.generation,
        )
        return self.pacer.recount(ask, max(plan.samples))

    def members_changed(
        self, old_ranks: Sequence[int | None], *, ahead: Sequence[int], open_step: StepState | None = None
    ) -> None:
        """Follow a change of members: ``old_ranks`` has the old rank, or None, of each new rank.

        What those who are gone had claimed is dealt again; a plan for the old members is void. ``open_step`` goes on
        with the shares of those who live. What the lost workers had done in its earlier laps was counted, and the
        gradients of it are lost with them, so it is dealt again too.
        """
        self.dealing.members_changed(old_ranks, rank=self._transport.rank, ahead=ahead)
        self.plan = None
        if open_step is None:
            return
        lost = [piece for rank, ranges in enumerate(open_step.ranges) if rank not in old_ranks for piece in ranges]
        open_step.workers, open_step.generation = self._transport.workers, self._transport.generation
        open_step.shares = tuple(0 if old is None else open_step.shares[old] for old in old_ranks)
        if open_step.ranges:
            open_step.ranges = tuple(() if old is None else open_step.ranges[old] for old in old_ranks)
        open_step.expected = min(open_step.expected, sum(open_step.shares))
        open_step.plan = _plan_for_survivors(open_step.plan, old_ranks, generation=self._transport.generation)
        open_step.next_plan, open_step.decided_count, open_step.hurried = None, None, True
        self.dealing.give_back(lost)
        self.plan_ahead(open_step)

    def _goal(self, epoch_step: int, left: int | None, length: int | None) -> tuple[int, bool]:
        """Return the samples that the epoch's step of this number should count, and whether it is the epoch's last.

        After step k of an epoch min((k + 1) * global_batch, length) samples should be done: what a deadline left
        undone, the next steps make up for, and the last one takes all that is left. So does the last but one where
        that is one batch at most: two thin steps would do harm.
        """
        batch = self.settings.global_batch
        if left is None or length is None:
            return batch, False
        if not self.pacer.keep_batch:
            return min(left, batch), left <= batch
        if (epoch_step + 1) * batch >= length or (left <= batch and (epoch_step + 2) * batch >= length):
            return left, True
        return min(left, goal(epoch_step, done=length - left, batch=batch)), False

    def _most(self, plan: Plan) -> int:
        """Return the most samples that may be dealt.

        However fast all workers are, an epoch keeps its number of steps, give or take one: enough is left for every
        later step except one to do its least, or its floor. In mid-epoch that binds nobody.
        """
        length, left, batch = self.dealing.length, self.dealing.remaining, self.settings.global_batch
        if length is None or left is None:
            return plan.total
        later, floor = max(0, -(-length // batch) - 2 - self.epoch_step), least_samples(plan.least_count, batch)
        return min(left, max(plan.expects or 1, floor, left - later * max(least(batch), floor)))

    def _without_singles(self, plan: Plan, last: bool) -> Plan:
        """Change the plan so that nobody is dealt a single sample, and none is left over: batch norm needs two."""
        left = self.dealing.remaining
        if last:
            plan = replace(plan, deadline_s=None, wait_for=None)
        elif left is not None and plan.total > left - 2 > 0:
            plan = scaled_to(plan, left - 2)
        return without_singles(plan)

    # -- plans -----------------------------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        """Return a plan for a step for which none came with the round before."""
        total, last = self._goal(self.epoch_step, self.dealing.remaining, self.dealing.length)
        return self._ask(self.index, self.dealing.epoch, total, last)

    def _plan_after(self, step_state: StepState) -> Plan | None:
        """Return the plan for the step after the open one, supposing that this one counts what it is expected to."""
        epoch, left, length, step = step_state.epoch, self.dealing.remaining, self.dealing.length, self.epoch_step + 1
        if left is not None:
            left -= step_state.expected
            if step_state.last or left <= 0:
                epoch, step, length = epoch + 1, 0, self.dealing.next_length
                left = length
        if epoch >= self.end_epoch:
            return None
        total, last = self._goal(step, left, length)
        return self._ask(step_state.index + 1, epoch, total, last)

    def _ask(self, step: int, epoch: int, total: int, last: bool) -> Plan:
        if self._transport.size == 1:
            return Plan(generation=self._transport.generation, step=step, samples=(total,), expects=total)
        ask = Ask(
            step=step,
            total=total,
            workers=self._transport.workers,
            epoch=epoch,
            generation=self._transport.generation,
            unit=min(self._unit, total),
            last=last,
            deadlines=self._may_have_deadline(),
        )
        return replace(self.pacer.plan(ask), expects=total)

    # -- close -----------------------------------------------------------------------------------------------------

    def lap(self, step_state: StepState, done: tuple[int, ...], shares: tuple[int, ...]) -> None:
        """Begin another lap: count ``done`` more samples of each worker, and deal ``shares``.

        In the epoch's last step ``step_state.shares`` keeps all that was dealt before; in a step below its floor, only
        what was counted.
        """
        self.keep_before(step_state)
        step_state.ranges = joined(step_state.ranges, self.dealing.commit(done))
        dealt, kept = self.dealing.deal(shares), step_state.shares if step_state.last else step_state.counted
        step_state.shares = tuple(before + more for before, more in zip(kept, dealt, strict=True))
        step_state.extra = dealt[self._transport.rank]

    def keep_before(self, step_state: StepState) -> None:
        """Keep the state before anything of the step is counted: a loop that has yet to take it over may save."""
        if step_state.before is None:
            step_state.before = self.state_dict()

    def extend(
        self, step_state: StepState, counts: Sequence[int], free: Sequence[bool], busy: Sequence[bool]
    ) -> More | None:
        """Deal more samples, at a step's deadline, to the workers that are free, and move the deadline for all.

        ``counts`` has the samples that each worker has counted. Returns None when the round may close. Nothing changes
        then, nor where work is to be recalled: a lap does that.
        """
        plan, smallest, before = step_state.plan, self.dealing.smallest, step_state.counted
        assert plan.deadline_s is not None
        dealt = sum(step_state.shares) - sum(before)
        kept = smallest if smallest > 1 else 0  # or a single sample would be left over
        given = more(
            counts,
            step_state.shares,
            free=free,
            busy=busy,
            least=step_state.floor,
            so_far_s=plan.deadline_s,
            room=max(0, min(self._most(plan), (self.dealing.remaining or 0) - kept) - dealt),
            unit=self._unit,
            smallest=smallest,
            patience=step_state.patience,
        )
        if given is not None and not given.recall:
            shares = self.dealing.deal([share - old for share, old in zip(given.shares, before, strict=True)])
            step_state.shares = tuple(share + old for share, old in zip(shares, before, strict=True))
            step_state.extend_deadline(given.seconds)
        return given

    def close(
        self,
        step_state: StepState,
        header: Header,
        record: StepRecord,
        *,
        by_deadline: bool = False,
        wall_s: float | None = None,
    ) -> StepRecord:
        """Count what the header of a round that is over reports, and return the step's record, completed.

        ``by_deadline``: the round did not wait for everybody, so the user's loop may be anywhere, and may save the
        state before this step. ``wall_s``: the seconds of the step, where the record lacks them.
        """
        if by_deadline:
            self.keep_before(step_state)
        rest = record.samples
        if step_state.ranges:
            rest = tuple(all_ - before for all_, before in zip(record.samples, step_state.counted, strict=True))
        ranges = joined(step_state.ranges, self.dealing.commit(rest, (header.column("ended") > 0).tolist()))
        record = replace(record, ranges=ranges, wall_s=record.wall_s if wall_s is None else wall_s)
        shown = self._remember(record)
        self.index += 1
        self.epoch_step += 1
        self.plan = header.read_plan()
        if self.plan is None and len(self._history) > 1 and not self._transport.elastic:
            self.plan = replace(step_state.plan, step=self.index)  # the leader thought that this was the last step
        # A step for everybody: to compare replicas that differed, or because workers enter or leave after it.
        self._next_waits_for_all = by_deadline and (header.differ() or header.differ("modes") or header.members_change)
        step_state.ends_epoch = self.dealing.remaining == 0
        if step_state.ends_epoch:
            self.next_epoch()
        step_state.progress, step_state.finishes, step_state.record = self.progress, self.finished, shown
        return shown

    def note(self, record: StepRecord) -> None:
        """Log the newest record, and let the forecast learn from it."""
        self._log_event("step", vars(record))
        change = self.pacer.change
        if change is not None and change.step == record.step and self._may_have_deadline():
            self._log_event("pace", vars(change))
        if self.learn is not None and self._newest is not None:
            self.learn(self._newest)

    def amend(self, late: Mapping[str, Any]) -> StepRecord:
        """Complete the newest record by facts that the device had yet to compute; log it, and return it."""
        assert self._newest is not None
        self._newest = replace(self._newest, **late)
        shown = replace(self._history[-1], **late)
        self._history.amend(shown)
        self.note(shown)
        return shown

    # -- for rounds between local steps ------------------------------------------------------------------------------

    def plan_for(self, step: int) -> Plan:
        """Return a plan for one global batch."""
        return self._ask(step, self.dealing.epoch, self.settings.global_batch, False)

    def add_round(self, record: StepRecord) -> None:
        """Take in the record of a round of parameters."""
        self.note(self._remember(record))

    def _remember(self, record: StepRecord) -> StepRecord:
        """Keep a record and return it in samples, as logs and scripts see it; the pacer plans in what is dealt."""
        shown, self._newest = self.dealing.in_samples(record), record
        self._history.append(shown)
        if self._transport.size > 1 or self._transport.elastic:  # a worker alone has nothing to divide
            self.pacer.observe(record)
        return shown

    @property
    def end_epoch(self) -> int:
        """The first epoch that is no longer this loop's."""
        return self.first_epoch + self.settings.epochs

    @property
    def passes(self) -> int:
        """The number of passes over the dataset that have begun, in this loop and before it."""
        return self.end_epoch if self.finished else self.dealing.epoch + 1

    def finish(self, step: int) -> None:
        """Note that this loop was over before ``step``, in a run that this one goes on from."""
        self.index, self.finished = step, True

    def next_epoch(self) -> None:
        self._open_epoch(self.dealing.epoch + 1)

    def _open_epoch(self, epoch: int) -> None:
        """Open an epoch or, beyond the last, finish."""
        self.finished = epoch >= self.end_epoch
        length = self.dealing.length
        # An epoch that took more steps, because workers were lost in its last ones, is followed by one with fewer.
        self.epoch_step = 0 if length is None else max(0, self.epoch_step + length // -self.settings.global_batch)
        if not self.finished:
            self.dealing.open(epoch)
            self._check_promise(epoch)

    def _check_promise(self, epoch: int) -> None:
        """Warn when an epoch has another number of steps than ``len(steps)`` gave: custom orders may vary in length."""
        now = None if self.dealing.length is None else -(-self.dealing.length // self.settings.global_batch)
        if self.promised is None or now in (None, self.promised):
            return
        text = (
            f"epoch {epoch} has {now} steps, and len(steps) was asked when an epoch had {self.promised}: the order has "
            "another length, so let schedules follow step.progress"
        )
        self.promised = now
        self._log_event("note", {"level": "warning", "text": text, "everywhere": True})

    @property
    def progress(self) -> float:
        """The fraction of this loop that is done."""
        done = self.dealing.epoch - self.first_epoch + self.dealing.progress
        return 1.0 if self.finished else done / self.settings.epochs

    # -- state -----------------------------------------------------------------------------------------------------

    def newcomer_state(self) -> dict[str, Any]:
        """Return all of this state, for a newcomer among the same members."""
        recent = json.dumps([vars(record) for record in self.recent])  # `to_json` copies deeply, and all others wait
        own = {"pacer": self.pacer.state_dict(), "history": recent, "next_waits_for_all": self._next_waits_for_all}
        return {**self.state_dict(), **own}

    @property
    def recent(self) -> list[StepRecord]:
        """The last records."""
        return list(self._history)[-RECENT_RECORDS:]

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """Take over a peer's `newcomer_state`; ``ahead`` has the samples that each worker's loader holds ready."""
        self.pacer.load_state_dict(state["pacer"])
        self._history.replace(StepRecord.from_json(record) for record in json.loads(state["history"]))
        self.index, self.epoch_step, self.plan = state["step"], state["epoch_step"], None
        self.first_epoch, self._next_waits_for_all = state["first_epoch"], state["next_waits_for_all"]
        self.finished = state["dealing"] is None
        if state["dealing"] is not None:
            self.dealing.take_over(state["dealing"], rank=self._transport.rank, ahead=ahead)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.index,
            "epoch": self.end_epoch if self.finished else self.dealing.epoch,
            "first_epoch": self.first_epoch,
            "epoch_step": self.epoch_step,
            "global_batch": self.settings.global_batch,
            "dealing": None if self.finished else self.dealing.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.index, self.first_epoch = state["step"], state.get("first_epoch", 0)
        if state["dealing"] is None or state["epoch"] >= self.end_epoch:
            self._open_epoch(state["epoch"])  # an epoch was over
            return
        self.dealing.load_state_dict(state["dealing"])
        length, left, batch = self.dealing.length, self.dealing.remaining, self.settings.global_batch
        done = 0 if length is None or left is None else length - left
        saved = state.get("epoch_step", 0)
        # Saved with another global batch: the number of this one's steps that would have done as many samples. Saved
        # with the same one, whatever is undone was left so by deadlines.
        same = state.get("global_batch") == batch or abs(saved * batch - done) < batch
        self.epoch_step = saved if same else done // batch


def _plan_for_survivors(plan: Plan, old_ranks: Sequence[int | None], *, generation: int) -> Plan:
    """Return a plan for the members after a change, with 0 samples for those who are new."""
    forecast = plan.forecast_s
    if forecast is not None:
        forecast = tuple(math.nan if old is None else forecast[old] for old in old_ranks)
    samples = tuple(0 if old is None else plan.samples[old] for old in old_ranks)
    return replace(plan, generation=generation, samples=samples, forecast_s=forecast)


def joined(before: tuple[tuple[Any, ...], ...], more: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """Return each worker's ranges of several laps.

    >>> joined((((0, 2),), ()), (((2, 3),), ((5, 6),)))
    (((0, 2), (2, 3)), ((5, 6),))
    """
    return tuple(a + b for a, b in zip(before, more, strict=True)) if before else more
