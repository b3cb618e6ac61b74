"""How a training follows who is there: workers enter and leave at step boundaries, and some are lost in the middle.

Every worker does the same to its training's state, at the same point between two calls, so these stay equal. What a
lost worker had claimed goes back to the pool; the step under way goes on with the others' shares. A newcomer takes over
a peer's whole state: models, everything tracked, feed, history and pace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline import concurrency
from paceline.checkpoint import content as checkpoint
from paceline.errors import Dropped, FleetError
from paceline.loop.entries import Entries
from paceline.loop.replicas import handed_in
from paceline.loop.training_state import changes
from paceline.signals import Leave
from paceline.transport.elastic.changes import MembershipChange
from paceline.transport.elastic.transport import Elastic

if TYPE_CHECKING:
    from paceline.combine import Header
    from paceline.loop.passes import Passes
    from paceline.loop.steps import Steps
    from paceline.run_recorder import RunRecorder


class Membership:
    """A loop's part in an elastic fleet."""

    def __init__(
        self,
        transport: Elastic,
        steps: Steps,
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
        """``ahead``: samples that this worker's loader likes to hold. ``agreed``: what must be the same in every
        worker's script. ``seen``: what this worker saw of its data; ``check_seen`` raises ValueError on a newcomer
        that sees other data than the fleet's. ``leads`` is called when this worker comes to lead, ``before_leaving``
        when it was asked to leave, at a step boundary."""
        self._transport, self._steps, self._recorder = transport, steps, recorder
        self._ahead, self._agreed, self._passes = ahead, agreed, passes
        self._seen, self._check_seen = seen, check_seen
        self._leads, self._before_leaving = leads, before_leaving
        self._due = (0, False, False)
        """Of the last round: its generation, whether the group is to be re-formed after it, and whether this worker
        has said that it leaves."""
        self.all_leave = False
        """Of the last round: whether everybody has said so."""
        self._led, self._entries = transport.rank == 0, Entries()
        transport.listener, transport.intact = self, steps.gradients.mean_gradient.intact
        transport.loop.begin(steps.place.loop + 1, passes.call_results.to_json())
        self._loop = transport.loop.number

    # -- at step boundaries ----------------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """This worker was asked to leave: it takes no further micro-batch."""
        return self._transport.leaving

    def intentions(self) -> dict[str, float]:
        """What this worker's header says of the boundary after the step."""
        reform = self._transport.reform
        anew = reform.must_change or (reform.may_change and self._entries.may_open(concurrency.monotonic()))
        return {"leaves": float(self._transport.leaving), "changes": float(anew)}

    def heard(self, header: Header, *, workers: Sequence[int], generation: int) -> None:
        """What the header of a round of all these workers says of the boundary after it."""
        self.round_over()
        leaves = bool(header.column("leaves")[workers.index(self._transport.id)])
        self._due = (generation, changes(header), leaves)
        self.all_leave = bool(header.column("leaves").all())

    def round_over(self) -> None:
        """Note that a round of all members has ended, with a deadline or without."""
        self._entries.round_over(concurrency.monotonic())

    def at_boundary(self, *, agreed: Callable[[], bool] = lambda: True) -> None:
        """Enter, leave, or re-form the group, where that is due. ``agreed`` may be a call of all workers: whether
        this is the place for it."""
        if self._transport.outside:
            self._enter()
            return
        generation, anew, mine = self._due
        if not anew:  # a worker that was handed the last round's result goes on as those do who had it
            return
        # The call is made by all who heard of the change or by none, however often the group was re-formed since.
        due = agreed()
        self._transport.deliver_members_changed()  # who was handed the call's result has been re-formed with since
        if not due or generation != self._transport.generation:
            return
        if mine:
            self._leave(agreed=True)
        self._entries.opened(concurrency.monotonic())
        try:
            self._transport.re_form()
        except Leave:
            self._leave(agreed=False)
        except Dropped as dropped:  # at a boundary nothing of this worker's is lost
            self._steps.loop.observe("note", {"level": "warning", "text": f"{dropped}; it enters anew"})
            self._enter()
            return
        self._transport.deliver_members_changed()

    def _enter(self) -> None:
        """Enter the fleet, as often as it goes on without this worker in the middle of that."""
        self._entries.opened(concurrency.monotonic())
        while not self._transport.take_over_later():
            self._transport.doing("waiting to enter")
            with suppress(Dropped):
                self._transport.re_form()
                return

    @property
    def still_outside(self) -> bool:
        """Whether this worker has entered the fleet, but in a later loop of the script than this one."""
        return self._transport.outside

    @property
    def passed_by(self) -> bool:
        """Whether the fleet is in a later loop of the script: a newcomer has nothing to do in this one."""
        return self._transport.outside and self._transport.loop.of_fleet() > self._loop

    def _leave(self, *, agreed: bool) -> None:
        self._before_leaving()
        self._transport.depart(agreed=agreed)
        raise Leave

    # -- what the transport asks for -------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        loop = self._steps.loop
        return {"ahead": self._ahead, **({"computes_on": loop.own_device} if loop.auto else {})}

    def keep_up(self) -> None:
        """Before this worker says anything of itself: see who is there."""
        self._transport.deliver_members_changed()

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        loop, combine, generation = self._steps.loop, self._steps.combine, change.generation
        with loop.training.changed:
            show()
            loop.training.members_changed(change.kept, ahead=_ahead(change))
            loop.full_shares = _kept_shares(loop.full_shares, change.kept)
            loop.devices = _devices(change)
            combine.members_changed(change.kept)
            step_state = combine.open_step
            if step_state is not None:
                lost = step_state.members_changed(change.kept, workers=generation.workers, generation=generation.number)
                loop.dealing.give_back(lost)
                loop.training.plan_ahead(step_state)
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
                **({"places": places} if (places := self._transport.places()) else {}),
            },
        )
        if self._transport.rank == 0 and not self._led:
            self._leads()
            for record in self._steps.training.recent:  # the last leader may not have come to write them
                self._recorder.event("step", vars(record))
        self._led = self._transport.rank == 0

    def give_state(self) -> torch.Tensor:
        run = {
            "agreed": dict(self._agreed()),
            "seen": json.dumps(self._seen()),
            "run_dir": str(self._recorder.run_dir.absolute()),
            "rounds": self._transport.lanes.rounds,
            "loop": self._loop,
            "passes": self._passes.state_dict(),
        }
        return checkpoint.pack({**self._steps.combine.whole_state(), **run})

    def take_over(self, data: torch.Tensor, change: MembershipChange) -> bool:
        """A newcomer takes over a peer's state. False: the fleet went on to a later loop while this worker waited, and
        its script has to come there first."""
        state = handed_in(self._transport, data, device=self._steps.loop.device)
        if state["loop"] > self._loop:
            return False
        if state["loop"] != self._loop:
            raise FleetError(f"this worker's script is in loop {self._loop} and the fleet in {state['loop']}")
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
        self._steps.loop.devices = _devices(change)
        self._recorder.go_on_in(Path(state["run_dir"]))
        self._due = (0, False, False)
        return True


def _ahead(change: MembershipChange) -> list[int]:
    """Samples that each member's loader likes to hold; 0 where its script has yet to make its loop."""
    return [int((facts or {}).get("ahead", 0)) for facts in change.facts]


def _devices(change: MembershipChange) -> tuple[str, ...]:
    return tuple(str((facts or {}).get("computes_on", "")) for facts in change.facts)


def _kept_shares(shares: tuple[int, ...], kept: tuple[int | None, ...]) -> tuple[int, ...]:
    """Everybody's share of a whole batch; none are known when one is new.

    >>> _kept_shares((10, 20, 30), (2, 0)), _kept_shares((10, 20, 30), (2, 0, None))
    ((30, 10), ())
    """
    ranks = [old for old in kept if old is not None and old < len(shares)]
    return tuple(shares[rank] for rank in ranks) if len(ranks) == len(kept) else ()
