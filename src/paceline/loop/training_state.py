"""The state of a training, the same on every worker: the feed, the history, the pacer and the plans.

It changes when a step is closed, by what its round said, and nowhere else. The leader asks its pacer for the step
after the open one as soon as that is dealt; the plan rides in the open step's round, so everybody holds the same plan
and nobody waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline import concurrency
from paceline.combine import Header
from paceline.feed.dealing import Dealing
from paceline.loop.step_state import StepState
from paceline.pace import Ask, Pacer
from paceline.pace.floor import More, least_samples, more
from paceline.pace.steering import for_all, goal, least, made_for, without_singles
from paceline.records import History, Plan, StepRecord
from paceline.settings import LoopSettings
from paceline.transport import Transport

RECENT_RECORDS = 100
"""Of the history, handed to a newcomer: its pacer's state knows what came before."""


class TrainingState:
    """What is planned, dealt and done."""

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
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.dealing, self.settings, self.pacer = dealing, settings, pacer
        self.first_epoch = first_epoch
        """Passes over the dataset before this loop."""
        self.changed = concurrency.Condition(concurrency.RLock())
        """Held while this state or a step's changes; notified after."""
        self.index = first_index
        self.epoch_step = 0
        """Steps of the open epoch that are over."""
        self.finished = False
        self.plan: Plan | None = None
        self.deadlines: Callable[[], bool] = lambda: False
        """Whether the next plan may have a deadline: asked for a pace that can do without."""
        self.learn: Callable[[StepRecord], None] | None = None
        """Hears of every record: a forecast that learns while the run goes on."""
        self._transport, self._history, self._observe = transport, history, observe
        self._unit, self._avoid_singles = unit, avoid_singles
        self._for_all_next = False
        """The next step waits for everybody, and compares the replicas."""
        self._newest: StepRecord | None = None
        """The newest record, as the pacer sees it."""
        self.promised: int | None = None
        """Steps of an epoch, as ``len(steps)`` has told somebody."""

    # -- open ------------------------------------------------------------------------------------------------------

    def open(self, plan: Plan) -> StepState:
        """Deal the next step."""
        expected, last = self._goal(self.epoch_step, self.dealing.remaining, self.dealing.length)
        plan = made_for(plan, expected)
        if self._for_all_next:
            plan = replace(for_all(plan, expected), deadline_s=None, wait_for=None)
        if last:
            plan = for_all(plan, expected)
        elif plan.total > expected and plan.total > (most := self._most(plan)):
            plan = for_all(plan, most)
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
            compare=self._for_all_next,
            opened=concurrency.perf_counter(),
            workers=self._transport.workers,
            generation=self._transport.generation,
            ends_epoch=left is not None and (last or sum(shares) >= left),
            progress=self.progress,
        )
        if plan.deadline_s is not None and not step_state.last:
            batch = self.settings.global_batch
            step_state.least = least_samples(plan.least_count, batch if left is None else min(batch, left))
        self.plan_ahead(step_state)
        return step_state

    def plan_ahead(self, step_state: StepState) -> None:
        """The leader: plan the step after the open one, for its round."""
        if self._transport.rank == 0 and len(self._history) > 0:
            step_state.next_plan = self._plan_after(step_state)

    def members_changed(self, kept: Sequence[int | None], *, ahead: Sequence[int]) -> None:
        """Other members are there: by new rank, ``kept`` says who they were. What those who are gone had claimed is
        dealt again; a plan for the old members is void."""
        self.dealing.members_changed(kept, rank=self._transport.rank, ahead=ahead)
        self.plan = None

    def _goal(self, epoch_step: int, left: int | None, length: int | None) -> tuple[int, bool]:
        """How many samples the epoch's step of this number should count, and whether it is the epoch's last.

        After step k of an epoch min((k + 1) * global_batch, length) samples should be done: what a deadline left
        undone, the next steps make up for, and the last one takes all that is left. So does the last but one where
        that is one batch at most: two thin steps would do harm.
        """
        batch = self.settings.global_batch
        if left is None or length is None:
            return batch, False
        if (epoch_step + 1) * batch >= length or (left <= batch and (epoch_step + 2) * batch >= length):
            return left, True
        return min(left, goal(epoch_step, done=length - left, batch=batch)), False

    def _most(self, plan: Plan) -> int:
        """Samples that may be dealt. However fast all are, an epoch keeps its number of steps, give or take one: so
        much is left for every later step but one that it can do its least, or its floor. In mid-epoch
        that binds nobody."""
        length, left, batch = self.dealing.length, self.dealing.remaining, self.settings.global_batch
        if length is None or left is None:
            return plan.total
        later, floor = max(0, -(-length // batch) - 2 - self.epoch_step), least_samples(plan.least_count, batch)
        return min(left, max(plan.expects or 1, floor, left - later * max(least(batch), floor)))

    def _without_singles(self, plan: Plan, last: bool) -> Plan:
        """Batch norm cannot train on a single sample: nobody is dealt one, and no step may leave just one over."""
        left = self.dealing.remaining
        if last:
            plan = replace(plan, deadline_s=None, wait_for=None)
        elif left is not None and plan.total > left - 2 > 0:
            plan = for_all(plan, left - 2)
        return without_singles(plan)

    # -- plans -----------------------------------------------------------------------------------------------------

    def first_plan(self) -> Plan:
        """For a step that no plan came for with the round before."""
        total, last = self._goal(self.epoch_step, self.dealing.remaining, self.dealing.length)
        return self._ask(self.index, self.dealing.epoch, total, last)

    def _plan_after(self, step_state: StepState) -> Plan | None:
        """The plan after the open step, supposing that what is hoped for gets done."""
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
            deadlines=self.deadlines(),
        )
        return replace(self.pacer.plan(ask), expects=total)

    # -- close -----------------------------------------------------------------------------------------------------

    def lap(self, step_state: StepState, done: tuple[int, ...], shares: tuple[int, ...]) -> None:
        """A part of the epoch's last step is over: ``done`` more samples count, and the rest is dealt again. In a thin
        step just what is missing is, and nobody keeps anything else."""
        step_state.ranges = joined(step_state.ranges, self.dealing.commit(done, False))
        dealt, kept = self.dealing.deal(shares), step_state.shares if step_state.last else step_state.counted
        step_state.shares = tuple(before + more for before, more in zip(kept, dealt, strict=True))
        step_state.extra = dealt[self._transport.rank]

    def extend(
        self, step_state: StepState, counts: Sequence[int], free: Sequence[bool], busy: Sequence[bool]
    ) -> More | None:
        """At a step's deadline, by what each has counted: more samples for those that are free, and more time for all.
        None when the round may close; nothing changes either when work is to be recalled, by a lap."""
        plan, smallest, before = step_state.plan, self.dealing.smallest, step_state.counted
        assert plan.deadline_s is not None
        dealt = sum(step_state.shares) - sum(before)
        kept = smallest if smallest > 1 else 0  # or a single sample would be left over
        given = more(
            counts,
            step_state.shares,
            free=free,
            busy=busy,
            least=step_state.least,
            so_far_s=plan.deadline_s,
            room=max(0, min(self._most(plan), (self.dealing.remaining or 0) - kept) - dealt),
            unit=self._unit,
            smallest=smallest,
            patience=step_state.patience,
        )
        if given is not None and not given.recall:
            shares = self.dealing.deal([share - old for share, old in zip(given.shares, before, strict=True)])
            step_state.shares = tuple(share + old for share, old in zip(shares, before, strict=True))
            step_state.extended(given.seconds)
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
        """The round is over: count what it says. Returns the record, completed. ``by_deadline``: it did not wait for
        everybody, so the user's loop may be anywhere, and save. ``wall_s``: the step's, where the record lacks it."""
        if by_deadline:
            step_state.before = self.state_dict()
        rest = record.samples
        if step_state.ranges:
            rest = tuple(all_ - before for all_, before in zip(record.samples, step_state.counted, strict=True))
        ranges = joined(step_state.ranges, self.dealing.commit(rest, header.total("ended") == len(header.facts)))
        record = replace(record, ranges=ranges, wall_s=record.wall_s if wall_s is None else wall_s)
        told = self._remember(record)
        self.index += 1
        self.epoch_step += 1
        self.plan = header.read_plan()
        if self.plan is None and len(self._history) > 1 and not self._transport.elastic:
            self.plan = replace(step_state.plan, step=self.index)  # the leader thought that this was the last step
        # A step for everybody: to compare replicas that differed, or because workers enter or leave after it.
        self._for_all_next = by_deadline and (differ(header) or differ(header, "modes") or changes(header))
        step_state.ends_epoch = self.dealing.remaining == 0
        if step_state.ends_epoch:
            self._open_epoch(self.dealing.epoch + 1)
        step_state.progress, step_state.finishes, step_state.record = self.progress, self.finished, told
        return told

    def note(self, record: StepRecord) -> None:
        """Tell of the newest record."""
        self._observe("step", vars(record))
        change = getattr(self.pacer, "change", None)
        if change is not None and change.step == record.step and self.deadlines():
            self._observe("pace", vars(change))
        if self.learn is not None and self._newest is not None:
            self.learn(self._newest)

    # -- for rounds between local steps ------------------------------------------------------------------------------

    def plan_for(self, step: int) -> Plan:
        """A plan for one global batch."""
        return self._ask(step, self.dealing.epoch, self.settings.global_batch, False)

    def observe(self, record: StepRecord) -> None:
        """A round of parameters is over."""
        self.note(self._remember(record))

    def _remember(self, record: StepRecord) -> StepRecord:
        """Returns the record as all others are told of it, in samples; the pacer plans in what is dealt."""
        told, self._newest = self.dealing.told(record), record
        self._history.append(told)
        if self._transport.size > 1 or self._transport.elastic:  # a worker alone has nothing to divide
            self.pacer.observe(record)
        return told

    @property
    def end_epoch(self) -> int:
        """The first epoch that is no longer this loop's."""
        return self.first_epoch + self.settings.epochs

    @property
    def passes(self) -> int:
        """Passes over the dataset that have begun, in this loop and before it."""
        return self.end_epoch if self.finished else self.dealing.epoch + 1

    def finish(self, step: int) -> None:
        """This loop was over before ``step``, in a run that this one goes on from."""
        self.index, self.finished = step, True

    def next_epoch(self) -> None:
        self._open_epoch(self.dealing.epoch + 1)

    def _open_epoch(self, epoch: int) -> None:
        """Open an epoch or, beyond the last, finish."""
        self.finished = epoch >= self.end_epoch
        length = self.dealing.length
        # Steps beyond an epoch's number, because workers were lost in its last ones, are saved in the next.
        self.epoch_step = 0 if length is None else max(0, self.epoch_step + length // -self.settings.global_batch)
        if not self.finished:
            self.dealing.open(epoch)
            self._check_promise(epoch)

    def _check_promise(self, epoch: int) -> None:
        """A custom order may have another length in every epoch."""
        now = None if self.dealing.length is None else -(-self.dealing.length // self.settings.global_batch)
        if self.promised is None or now in (None, self.promised):
            return
        text = (
            f"epoch {epoch} has {now} steps, and len(steps) was asked when an epoch had {self.promised}: the order has "
            "another length, so let schedules follow step.progress"
        )
        self.promised = now
        self._observe("note", {"level": "warning", "text": text, "everywhere": True})

    @property
    def progress(self) -> float:
        """The part of this loop that is done."""
        done = self.dealing.epoch - self.first_epoch + self.dealing.progress
        return 1.0 if self.finished else done / self.settings.epochs

    # -- state -----------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """Everything, for a newcomer among the same members."""
        recent = json.dumps([record.to_json() for record in self.recent])
        own = {"pacer": self.pacer.state_dict(), "history": recent, "for_all_next": self._for_all_next}
        return {**self.state_dict(), **own}

    @property
    def recent(self) -> list[StepRecord]:
        """The last records."""
        return list(self._history)[-RECENT_RECORDS:]

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """A peer's `whole_state`: this worker's is then equal to it."""
        self.pacer.load_state_dict(state["pacer"])
        self._history.replace(StepRecord.from_json(record) for record in json.loads(state["history"]))
        self.index, self.epoch_step, self.plan = state["step"], state["epoch_step"], None
        self.first_epoch, self._for_all_next = state["first_epoch"], state["for_all_next"]
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
        # Saved with another global batch: as many steps as would have done so much. With the same one, whatever is
        # undone was left so by deadlines.
        same = state.get("global_batch") == batch or abs(saved * batch - done) < batch
        self.epoch_step = saved if same else done // batch


def differ(header: Header, what: str = "fingerprint") -> bool:
    """Whether the workers that gave a fingerprint of what they hold, or of their modes, gave unlike ones."""
    if not header.total(what):
        return False
    prints = header.column(what)
    return len(set(prints[prints > 0].tolist())) > 1


def changes(header: Header) -> bool:
    """Whether the group is to be re-formed as soon as all are at one place."""
    return header.total("leaves") > 0 or header.total("changes") > 0


def joined(before: tuple[tuple[Any, ...], ...], more: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """Each worker's ranges of several laps.

    >>> joined((((0, 2),), ()), (((2, 3),), ((5, 6),)))
    (((0, 2), (2, 3)), ((5, 6),))
    """
    return tuple(a + b for a, b in zip(before, more, strict=True)) if before else more
