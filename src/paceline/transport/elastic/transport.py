"""A fleet whose workers come and go: the same calls as everywhere, over a group that is re-formed among the living.

One **generation** is one membership. The roster (`paceline.roster`) alone decides who is in it and when it is
over. A call that cannot end because a member is gone raises `GenerationOver` in the thread that waits in it; the
worker then re-forms its group with those who are left (`Reform`), and calls that were cut short are made again, unless
a peer that had finished them hands over their result (`HandOver`).

Between two calls the training sees one membership (``rank``, ``size``, ``workers``), the same for the same two calls on
every worker: a worker that was handed a result goes on under the old membership until its next call. Newcomers enter at
step boundaries alone, where everybody comes by agreement (`Elastic.re_form`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline import concurrency
from paceline.errors import Dropped, DroppedInCall, FleetError, GenerationOver, PacelineError
from paceline.roster import FINISHED, LEFT, Generation, RosterClient
from paceline.roster.calls import BACKGROUND, CALLS
from paceline.transport.base import Pending, Renew, RoundTensors, empty_ones, made
from paceline.transport.call_sequences import CallSequences
from paceline.transport.distributed import Distributed, facts_of, one_line
from paceline.transport.elastic.changes import MembershipListener
from paceline.transport.elastic.connector import Connector
from paceline.transport.elastic.handover import FleetLoop, HandOver, Lanes
from paceline.transport.elastic.reform import Join, Reform
from paceline.transport.group import Group, Never
from paceline.worker_exit import Leave

logger = logging.getLogger("paceline")

WAITED = "left (SIGTERM) while it waited"
STORE_S = 2.0
"""Seconds for which the store may fail while the roster answers; then the group is re-formed over a new connection."""


def joins_roster() -> bool:
    """Return whether this worker is to join an elastic fleet: a roster's address is given."""
    return bool(os.environ.get("PACELINE_ROSTER"))


class Elastic(Distributed):
    """The transport of a fleet whose members change."""

    name = "elastic"
    elastic = True

    def __init__(
        self,
        device: torch.device,
        *,
        emulated: str | None = None,
        cpu_engine: bool = False,
        join: Join | None = None,
        connector: Callable[..., Connector] = Connector,
    ) -> None:
        """Enter at the roster.

        ``cpu_engine``: never sum by an engine that needs GPUs. ``join``: how to enter at the roster, by default as the
        environment says. ``connector``: connects the members of each generation.
        """
        super().__init__(device, CallSequences(CALLS, BACKGROUND, on_change=self._report))
        self.backend = "gloo"
        """The engine of the last group that had others in it; before the first, the one that every fleet can have."""
        self.listener: MembershipListener | None = None
        """The training."""
        self.intact: Callable[[], bool] = lambda: True
        """Whether the last round's result is still as it was, to be handed over."""
        self.fell_out = False
        """Whether the fleet went on without this worker, which has not entered again."""
        self.finished = False
        """Whether this worker has left at the end of its script, without an error."""
        self.lanes = Lanes(self._sequences)
        self._here = concurrency.local()
        """The group of the round that each thread is in."""
        self._store_failed_s: dict[str, float] = {}
        """When writing signals ("signals") or reading them ("board") first failed in this generation."""
        self.hand_over = HandOver(self)
        facts = {**facts_of(device), "emulated": emulated}
        join = join or _join_from_env(facts)
        self.reform = Reform(self, device, join=join, cpu_engine=cpu_engine, connector=connector)
        self.reform.client.on_beat = self._on_beat
        self.loop = FleetLoop(self, self.reform)
        self.entered(False)
        self.outside = self.reform.client.running
        if not self.outside:
            try:
                self.reform.start()
            except GenerationOver as over:
                self._re_form_in("paceline.join()", over)
                self.deliver_members_changed()
        else:
            self.reform.connector.engine_for([facts]).warm_up(device)
        self.at_rest = self.outside

    # -- who is there ----------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        return self.reform.group

    @property
    def watch(self) -> Reform:
        return self.reform

    @property
    def id(self) -> int:
        return self.reform.client.id

    def clock(self) -> float:
        return self.reform.client.clock()

    def show(self, generation: Generation) -> None:
        """Show the members of this generation to the training from now on."""
        self.workers, self.generation, self._store_failed_s = generation.workers, generation.number, {}
        self.rank, self.size = self.workers.index(self.id), len(self.workers)

    def entered(self, inside: bool) -> None:
        """Note whether this worker is in the fleet.

        Outside, some other worker leads as far as this one can see. After the constructor nothing else may change
        `outside`: rank, size and workers go with it, and change first, for another thread that finds this worker
        outside counts on them.
        """
        if not inside:  # the others wait for it in their next round
            self.rank, self.size, self.workers = 1, 2, (-1, self.id)
        self.outside = not inside
        if inside:
            self.fell_out = False
            self.loop.publish()

    def depart(self, *, agreed: bool) -> None:
        """Leave for good, at a step boundary.

        ``agreed``: all have it from the last round, and come to re-form the group.
        """
        self.reform.client.leave(LEFT if agreed else WAITED)
        self.entered(False)

    # -- from one generation to the next ---------------------------------------------------------------------------

    def re_form(self) -> None:
        """Re-form the group: all members come here at the same step boundary, and a newcomer at its first step."""
        self.reform.re_form(self.reform.number, orderly=True)

    def recover(
        self,
        over: GenerationOver,
        sums: Sequence[Pending] = (),
        tensors: Sequence[torch.Tensor] = (),
        *,
        renew: Renew = empty_ones,
        background: bool = False,
    ) -> Sequence[torch.Tensor] | None:
        self.reform.break_off(over.generation)
        ended = [pending.abandon() for pending in sums]
        if not all(ended):
            tensors = renew(tensors)
        self.reform.re_form(over.generation, orderly=False)
        return tensors if self.take_result(tensors, background=background) else None

    def _re_form_in(self, label: str, error: Exception, group: Group | None = None) -> None:
        """Form the next group after an error in a call, in this ``group`` or in the one that stands."""
        if isinstance(error, PacelineError) and not isinstance(error, GenerationOver):
            raise error
        over = self.reform.failed(error, group)  # the store's errors too: the roster may be gone, and come back
        if not isinstance(over, GenerationOver):
            raise over
        try:
            self.reform.re_form(over.generation, orderly=False)
        except Dropped as dropped:
            if self.listener is not None:
                raise DroppedInCall(f"{label}: {dropped}") from None
            self.entered(False)  # it has no part in the training yet: from here on it is one who is new
            logger.warning("%s: %s; it enters with the first step", label, dropped)

    def take_over_later(self) -> bool:
        return self.hand_over.take_over_later()

    def deliver_members_changed(self) -> None:
        if getattr(self._here, "group", None) is None:  # in a round everything is for its members
            self.reform.deliver_members_changed()

    def release(self) -> None:
        self.hand_over.recorded.set()

    def _group_of(self, generation: int) -> Group:
        stands, group, _ = self.reform.standing()
        if stands != generation or self.reform.is_over:
            raise GenerationOver(f"generation {generation} is over", generation=generation)
        return group

    def _group_here(self) -> Group:
        return getattr(self._here, "group", None) or self.group

    # -- calls -----------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *, lane: str) -> int:
        if lane == BACKGROUND:
            self.release()  # its thread has done with the round before
        self.deliver_members_changed()
        return self.lanes.enter(label, lane=lane)

    def _report(self) -> None:
        own = self._sequences
        self.reform.client.report(doing=own.doing, begun=own.begun, spots=own.spots())

    @contextmanager
    def round(self, label: str, *, background: bool = False, result: RoundTensors = ()) -> Iterator[list[torch.Tensor]]:
        lane, built_for = BACKGROUND if background else CALLS, self.generation
        try:
            with super().round(label, background=background):
                began, tensors = self._write_round(result, built_for)
                self.lanes[lane].pending = tensors
                yield tensors
        finally:
            self._here.group = None
        if not self.reform.finish(lane, began, facts=None, tensors=tensors):
            raise GenerationOver("the group was re-formed", generation=began)

    def _write_round(self, result: RoundTensors, built_for: int) -> tuple[int, list[torch.Tensor]]:
        """Make the tensors of a round for the members of one group, in which its sums then start.

        Another thread may re-form the group meanwhile: nothing has begun yet, so they are made again.
        """
        while True:
            began, group = self._standing()
            if not callable(result) and built_for != began:
                raise GenerationOver("members changed since the round was written", generation=built_for)
            self._here.group = group
            tensors = made(result)
            if self.generation == began:
                return began, tensors
            self._here.group = None

    def _standing(self) -> tuple[int, Group]:
        """Return the generation that stands, which the training follows, and its group."""
        while True:
            began, group, unheard = self.reform.standing()
            if self.outside:
                raise Dropped("the fleet went on without this worker", generation=began)
            if self.generation == began:
                return began, group
            if not unheard:
                raise GenerationOver("the training does not follow the group that stands", generation=began)
            self.deliver_members_changed()

    @torch.no_grad()
    def take_result(self, into: Sequence[torch.Tensor], *, background: bool = False) -> bool:
        """Return, after the group was re-formed, whether others had finished the round under way.

        Its result then stands in ``into``.
        """
        lane = self.lanes[BACKGROUND if background else CALLS]
        if not lane.given:
            self.deliver_members_changed()
            return False
        for mine, theirs in zip(into, lane.tensors, strict=True):
            mine.copy_(theirs)
        lane.given, lane.facts = False, None
        return True

    def gather(self, label: str, value: Any) -> list[Any]:
        if not self.outside:
            call = self._enter(label, lane=CALLS)
            try:
                values = self._try_gather(call, label, value)
            finally:
                self._leave(lane=CALLS)
            if values is not None:
                return values
            if self.listener is not None:
                raise DroppedInCall(f"{label}: the fleet went on without this worker")
        mine = json.dumps(value() if callable(value) else value)
        return [json.loads(mine) for _ in range(self.size)]

    def _try_gather(self, call: int, label: str, value: Any) -> list[Any] | None:
        """Gather until it succeeds; None: the fleet has gone on without this worker."""
        lane = self.lanes[CALLS]
        while not self.outside:
            if (values := self._gather_once(call, label, value)) is not None:
                return values
            if lane.given and not self.outside:
                lane.finish(facts=lane.facts, tensors=())
                return list(lane.facts or [])
            self.deliver_members_changed()
        return None

    def _gather_once(self, call: int, label: str, value: Any) -> list[Any] | None:
        """Gather among the members of one group; None: the next one has been formed."""
        try:
            began, group = self._standing()
        except GenerationOver as over:
            self._re_form_in(label, over)
            return None
        # For the members of this group, whoever comes meanwhile. An error in it is the script's own, and no group's.
        mine = value() if callable(value) else value
        try:
            values = group.gather(f"call/{call}", label, mine, watch=self.watch)
        except RuntimeError as error:
            self._re_form_in(label, error, group)
            return None
        return values if self.reform.finish(CALLS, began, facts=values, tensors=()) else None

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        while not self.outside:
            try:
                super().broadcast(tensors)
                return
            except GenerationOver as over:
                self._re_form_in("the leader's broadcast", over)
                if self.take_result(tensors):
                    return

    def sum(self, tensor: torch.Tensor) -> Pending:
        self.deliver_members_changed()
        return super().sum(tensor)

    def _started(self, start: Callable[[Group], Any]) -> Pending:
        """Start a work without raising: sums start inside backward, which must come to its end."""
        if self.reform.is_over:
            return Never(self.reform.why_over())
        try:
            return super()._started(start)
        except GenerationOver as over:
            return Never(over)

    def slot_name(self, slot: int) -> str:
        while True:
            try:
                return super().slot_name(slot)
            except GenerationOver as over:  # wait for the roster: then the worker that gave the name reports it
                self._re_form_in("the name of a figure", over)

    def was_signalled(self, name: str) -> bool:
        self.release()
        self.deliver_members_changed()
        self.reform.check()
        try:
            signalled = bool(self.group.board.check([name]))
        except RuntimeError:  # the roster is unreachable: each worker goes by its own clock and work
            self.roster_away = True
            self._store_failed_s.setdefault("board", concurrency.monotonic())
            return False
        self.roster_away = False
        self._store_failed_s.pop("board", None)  # a signal that could not be written stays lost, and this one is read
        return signalled

    def _write_store(self, request: Callable[[], Any]) -> Any:
        try:
            return super()._write_store(request)
        except GenerationOver:  # the threads that listen learn of that too
            self._store_failed_s.setdefault("signals", concurrency.monotonic())
        return 0

    def _on_beat(self) -> None:
        """Leave the generation when it cannot go on for this worker alone (on the client's thread).

        Nobody else can see that the roster answers and its store does not, so that this worker's signals were lost, or
        that a thread waits for a worker to which its connection is broken.
        """
        number = self.reform.number  # before the group: another thread may form a newer one meanwhile
        failed_s = min([*self._store_failed_s.values()], default=None)
        if self.group.hopeless:
            logger.warning("a connection to another worker is broken; the group is re-formed")
            self.reform.give_up(number)
        if failed_s is not None and concurrency.monotonic() - failed_s > STORE_S:
            self._store_failed_s = {}
            logger.warning("the connection to the roster's store is broken; the group is re-formed")
            self.reform.give_up(number)

    @property
    def calls(self) -> int:
        return self.lanes[CALLS].finished

    @calls.setter
    def calls(self, calls: int) -> None:
        self.lanes.skip_to(calls, lane=CALLS)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _await_end(self, client: RosterClient) -> None:
        """Wait until everybody has come to the end of the script.

        The others may have left before this worker hears that all are there: the roster, which had not heard from it
        for a while, then tells of the end. In the run's last generation it has missed nothing.
        """
        generation = self.generation
        try:
            self.gather("the end of the run", None)
        except SystemExit:
            if client.ended_in != generation:
                raise

    def close(self, *, failure: BaseException | None = None) -> None:
        client = self.reform.client
        try:
            if failure is None and self.fell_out:
                raise FleetError(
                    "the fleet went on without this worker, which was silent for too long, and its script ended before "
                    "it could enter again: what it holds is not the fleet's; start it again, and it enters anew"
                )
            if failure is None and not self.outside:
                self._await_end(client)
                self.finished = True
                client.leave(FINISHED)
            elif failure is not None and not (self.outside and isinstance(failure, SystemExit)):
                client.leave(WAITED if isinstance(failure, Leave) else f"ended with {one_line(failure)}")
        finally:
            self.reform.close()


def _join_from_env(facts: Mapping[str, Any]) -> Join:
    starter = os.environ.get("PACELINE_STARTER") or facts["host"]
    return partial(
        RosterClient,
        os.environ["PACELINE_ROSTER"],
        token=os.environ.get("PACELINE_TOKEN", ""),
        name=f"{starter}/{os.environ.get('PACELINE_WORKER') or os.getpid()}",
        facts=facts,
    )
