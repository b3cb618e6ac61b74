"""How a training follows the members of an elastic fleet.

Workers enter and leave at step boundaries, and some are lost in the middle of a step (`Membership`). Every worker does
the same to its training's state, at the same point between two calls, so these states stay equal. What a lost worker
had claimed goes back to the pool; the step under way goes on with the others' shares. `Entries` spaces the pauses in
which newcomers enter. A newcomer takes over a peer's state: models, everything tracked, feed, history and pace
(`newcomer_state`). A worker that fell far behind takes over a part of it (`loop_state`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.checkpoint import parts
from paceline.errors import Dropped, FleetError
from paceline.feed import Generators
from paceline.step.checks.replicas import handed_in
from paceline.step.checks.sameness import CAUSE
from paceline.step.context import LoopContext
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.elastic.transport import Elastic
from paceline.worker_exit import Leave

if TYPE_CHECKING:
    from paceline.gradients import Header
    from paceline.run_recorder import RunRecorder
    from paceline.step.script_loops import Passes
    from paceline.step.steps import StepLoop

PART = 0.2
"""The largest part of the time that pauses for entries may take."""
MOST_S = 60.0
"""Nobody waits longer than this to enter: what the script did before its next step may look like a pause."""
GIVERS = 2
"""Workers that know by digests what a newcomer need not be sent: the first gives its state, and the next if it dies."""
RATE = 0.2
"""Weight of the newest step in the running mean of a step's seconds."""


class Entries:
    """The spacing of entries: each one is a pause for all, and the next waits until pauses are `PART` of the time.

    All times are in seconds of one clock.
    """

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._last_s: float | None = None
        self._opened_s: float | None = None
        self._until_s = float("-inf")

    def may_open(self, now_s: float) -> bool:
        """Return whether those who wait may enter after the next round: never in the pause of another entry."""
        return self._opened_s is None and now_s >= self._until_s

    def opened(self, now_s: float) -> None:
        """Note that an entry has begun."""
        if self._opened_s is None:
            self._opened_s = now_s

    def round_over(self, now_s: float) -> None:
        """Note that a round of all members has ended, the first one after an entry included."""
        if self._opened_s is not None:
            pause_s = max(0.0, now_s - self._opened_s - (self._usual_s or 0.0))
            self._until_s = now_s + min(MOST_S, pause_s * (1 / PART - 1))
        elif self._last_s is not None:
            took_s = now_s - self._last_s
            self._usual_s = took_s if self._usual_s is None else self._usual_s + RATE * (took_s - self._usual_s)
        self._last_s, self._opened_s = now_s, None


class Membership:
    """A loop's part in an elastic fleet."""

    def __init__(
        self,
        transport: Elastic,
        steps: StepLoop,
        *,
        ahead: int,
        agreed: Callable[[], Mapping[str, Any]],
        recorder: RunRecorder,
        passes: Passes,
        seen: Callable[[], Any],
        check_seen: Callable[[Any], None],
        leads: Callable[[], None],
        before_leaving: Callable[[], None],
    ) -> None:
        """Register this loop with the transport, which then reports changes of members to it.

        Args:
            transport: The elastic fleet.
            steps: The loop.
            ahead: Samples that this worker's loader holds ready.
            agreed: Returns what must be the same in every worker's script.
            recorder: The run's log.
            passes: The script's loops so far.
            seen: Returns what this worker saw of its data.
            check_seen: Raises ValueError on a newcomer that sees other data than the fleet's.
            leads: Called when this worker becomes the leader.
            before_leaving: Called at a step boundary when this worker was asked to leave.
        """
        self._transport, self._steps, self._recorder = transport, steps, recorder
        self._ahead, self._agreed, self._passes = ahead, agreed, passes
        self._seen, self._check_seen = seen, check_seen
        self._leads, self._before_leaving = leads, before_leaving
        self._due = (0, False, False)
        """The last round's generation, whether the group is re-formed after it, and whether this worker leaves then."""
        self.all_leave = False
        """Whether all workers leave after the last round."""
        self._led, self._entries = transport.rank == 0, Entries()
        self._own: dict[str, torch.Tensor] = {}
        """On a newcomer: the parts of a state that it holds already, by digest."""
        steps.loop.replica.holding.due = True
        transport.listener, transport.intact = self, steps.gradients.mean_gradient.intact
        transport.loop.begin(steps.script_loop.number + 1, passes.call_results.to_json())
        self._loop_number = transport.loop.number
        # torch imports modules when it first writes and reads a state: in an entry all others would wait for that.
        parts.put_together(parts.take_apart({"any": torch.zeros(1)}), device=torch.device("cpu"))
        if transport.outside and not transport.grouped:  # once it has entered, all others would wait for that
            for bucket in steps.gradients.buckets.buckets:
                bucket.touch()

    # -- at step boundaries ----------------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether this worker was asked to leave: then it takes no further micro-batch."""
        return self._transport.leaving

    def intentions(self) -> dict[str, float]:
        """Return the header's facts about the boundary after the step: ``leaves`` and ``changes``."""
        reform = self._transport.reform
        anew = reform.must_change or (reform.may_change and self._entries.may_open(concurrency.monotonic()))
        return {"leaves": float(self._transport.leaving), "changes": float(anew)}

    def note_intentions(self, header: Header, *, workers: Sequence[int], generation: int) -> None:
        """Note what the summed header of a round reports of the boundary after it: everybody's `intentions`."""
        self.round_over()
        leaves = bool(header.column("leaves")[workers.index(self._transport.id)])
        self._due = (generation, header.members_change, leaves)
        self.all_leave = bool(header.column("leaves").all())

    def round_over(self) -> None:
        """Note that a round of all members has ended, with a deadline or without."""
        self._entries.round_over(concurrency.monotonic())

    def at_boundary(self, *, agreed: Callable[[], bool] = lambda: True) -> None:
        """Enter, leave, or re-form the group, where that is due.

        ``agreed`` returns whether all workers are at this boundary; it may be a call of all of them.
        """
        if self._transport.outside:
            self._enter()
            return
        if self._transport.rank < GIVERS and not self._transport.grouped:
            self._steps.loop.replica.holding.look_beside()
        generation, anew, mine = self._due
        if not anew:  # a worker that was handed the last round's result goes on as those do who had it
            return
        # All workers that had this round's header make the call, or none, however often the group was re-formed since.
        due = agreed()
        self._transport.deliver_members_changed()  # a worker that was handed the call's result was re-formed with since
        if not due or generation != self._transport.generation:
            return
        if mine:
            self._leave(agreed=True)
        self._entries.opened(concurrency.monotonic())
        try:
            self._transport.re_form()
        except Leave:
            self._leave(agreed=False)
        except Dropped as dropped:  # at a boundary no work of this worker is lost
            self._steps.loop.notes.warn(f"{dropped}; it enters anew")
            self._enter()
            return
        self._transport.deliver_members_changed()

    def _enter(self) -> None:
        """Enter the fleet; try again whenever it goes on without this worker meanwhile."""
        self._entries.opened(concurrency.monotonic())
        while not self._transport.take_over_later():
            self._transport.doing("waiting to enter")
            if not self._transport.grouped:
                self._own = self._steps.loop.replica.holding.look()
            with suppress(Dropped):
                self._transport.re_form()
                return

    @property
    def still_outside(self) -> bool:
        """Whether this worker has no state of the fleet yet: it was let in, but in a later loop of the script."""
        return self._transport.outside

    @property
    def passed_by(self) -> bool:
        """Whether the fleet is in a later loop of the script: a newcomer has nothing to do in this one."""
        return self._transport.outside and self._transport.loop.of_fleet() > self._loop_number

    def _leave(self, *, agreed: bool) -> None:
        self._before_leaving()
        self._transport.depart(agreed=agreed)
        raise Leave

    # -- what the transport asks for -------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        loop = self._steps.loop
        return {
            "ahead": self._ahead,
            **({"computes_on": loop.micro_batches.own_device} if loop.micro_batches.auto else {}),
        }

    def keep_up(self) -> None:
        """Follow changes of members before this worker reports anything."""
        self._transport.deliver_members_changed()

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        loop, combine = self._steps.loop, self._steps.combine
        combine.count_round()
        with loop.training.lock:
            show()
            loop.training.members_changed(change.old_ranks, ahead=_ahead(change), open_step=combine.open_step)
            loop.position.full_shares = _kept_shares(loop.position.full_shares, change.old_ranks)
            loop.micro_batches.devices = _devices(change)
            combine.members_changed(change.old_ranks)
        self._announce(change)

    def _announce(self, change: MembershipChange) -> None:
        generation = change.generation
        self._recorder.event(
            "generation",
            {
                "number": generation.number,
                "step": self._steps.training.index,
                "workers": list(generation.workers),
                "joined": [{"id": worker, **generation.facts[worker]} for worker in change.joined],
                "left": [{"id": gone.id, "text": gone.text} for gone in change.left],
                **({"wanting": generation.wanting} if generation.wanting else {}),
                **({"places": places} if (places := self._transport.places()) else {}),
            },
        )
        if self._transport.rank == 0 and not self._led:
            self._leads()
            for record in self._steps.training.recent:  # the last leader may not have come to write them
                self._recorder.event("step", vars(record))
        self._led = self._transport.rank == 0

    def held(self) -> Collection[str]:
        return self._own.keys()

    def give_state(self, held: Collection[str] = ()) -> list[torch.Tensor]:
        try:
            given = self._steps.combine.newcomer_state()
        except Exception as error:  # of the script's own objects: those who have a state train on
            text = f"a newcomer was given no state: {type(error).__name__}: {error}"
            self._steps.loop.notes.warn(text)
            return parts.take_apart({"refused": text})
        run = {
            "agreed": dict(self._agreed()),
            "seen": json.dumps(self._seen()),
            "run_dir": str(self._recorder.run_dir.absolute()),
            "rounds": self._transport.lanes.rounds,
            "loop": self._loop_number,
            "begun": self._steps.begun,
            "passes": self._passes.state_dict(),
        }
        holding = self._steps.loop.replica.holding
        return parts.take_apart({**given, **run}, held=lambda part: holding.leave_out(part, held))

    def take_over(self, data: list[torch.Tensor], change: MembershipChange) -> bool:
        """Take over a peer's state, on a newcomer.

        Returns False when the fleet went on to a later loop while this worker waited: its script must reach that first.
        """
        own, self._own = self._own, {}
        state = handed_in(
            self._transport, lambda on: parts.put_together(data, device=on, own=own), device=self._steps.loop.device
        )
        if "refused" in state:
            raise FleetError(state["refused"])
        if state["loop"] > self._loop_number:
            if data:
                parts.fill(data, own)  # the script goes on meanwhile
            return False
        if state["loop"] != self._loop_number:
            raise FleetError(f"this worker's script is in loop {self._loop_number} and the fleet in {state['loop']}")
        ours = self._agreed()
        for name, theirs in state["agreed"].items():
            if ours.get(name) != theirs:
                raise ValueError(
                    f"this worker's script is not the fleet's: {name} is {ours.get(name)!r} here and {theirs!r} there"
                )
        self._check_seen(json.loads(state.get("seen", "null")))
        self._transport.lanes.rounds = state["rounds"]
        self._passes.load_state_dict(state["passes"])
        self._steps.combine.take_over(state, ahead=_ahead(change))
        if state["begun"]:
            self._steps.first_was_checked()
        self._steps.loop.micro_batches.devices = _devices(change)
        self._recorder.go_on_in(Path(state["run_dir"]))
        self._due = (0, False, False)
        return True


def _ahead(change: MembershipChange) -> list[int]:
    """Return the samples that each member's loader holds ready; 0 where its script has yet to make its loop."""
    return [int((facts or {}).get("ahead", 0)) for facts in change.facts]


def _devices(change: MembershipChange) -> tuple[str, ...]:
    return tuple(str((facts or {}).get("computes_on", "")) for facts in change.facts)


def _kept_shares(shares: tuple[int, ...], old_ranks: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return everybody's share of a whole batch; empty when a member is new.

    >>> _kept_shares((10, 20, 30), (2, 0)), _kept_shares((10, 20, 30), (2, 0, None))
    ((30, 10), ())
    """
    ranks = [old for old in old_ranks if old is not None and old < len(shares)]
    return tuple(shares[rank] for rank in ranks) if len(ranks) == len(old_ranks) else ()


def loop_state(loop: LoopContext) -> dict[str, Any]:
    """Return this worker's replica and its position in the training, at a step boundary."""
    return {
        **loop.replica.snapshot(),
        "gradients": loop.gradients.state_dict(),
        "calls": loop.transport.calls,
        "next": loop.position.next,
        "finished": loop.position.finished,
        "progress": loop.position.progress,
        "full_shares": list(loop.position.full_shares),
        "trained": loop.gradients.accumulation.trained,
        "buffers": loop.gradients.accumulation.buffers.unsaved(),
        "random": Generators().state_dict(),
    }


def take_loop_state(loop: LoopContext, state: Mapping[str, Any]) -> None:
    """Take over a peer's replica and its position in the training."""
    loop.replica.restore(state)
    loop.gradients.accumulation.train_only(state["trained"])
    loop.gradients.load_state_dict(state["gradients"])
    loop.gradients.accumulation.buffers.take_unsaved(state["buffers"])
    loop.gradients.statistics_were_set()
    loop.transport.calls = state["calls"]
    loop.position.move_to(state["next"], finished=state["finished"], progress=state["progress"])
    loop.position.full_shares = tuple(state["full_shares"])
    numbers = Generators()
    numbers.load_state_dict(state["random"])
    numbers.restore()


def newcomer_state(loop: LoopContext) -> dict[str, Any]:
    """Return all that a newcomer needs, whatever the combine, to be where this worker is at a step boundary."""
    with loop.training.lock:
        order, training = loop.dealing.order_digest(), loop.training.newcomer_state()
    return {**loop_state(loop), "training": training, "order": order, "seed": loop.seed}


def take_newcomer_state(loop: LoopContext, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
    """Take over a peer's `newcomer_state`. ``ahead``: samples that each worker's loader holds ready."""
    take_loop_state(loop, state)
    with loop.training.lock:
        loop.training.take_over(state["training"], ahead=ahead)
        if loop.dealing.order_digest() != state["order"]:
            raise ValueError(f"this worker's order({loop.dealing.epoch}) is not the fleet's. {CAUSE}")
        loop.seed = state["seed"]
