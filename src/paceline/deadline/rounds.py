"""Rounds with a deadline, as the user's loop sees them: the proxy runs them, and the loop takes over what they gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline import concurrency
from paceline.checkpoint import content as checkpoint
from paceline.combine import Header
from paceline.combine.gradients.accumulation import Aside
from paceline.combine.gradients.buckets import Among
from paceline.deadline.catch_up import Promises
from paceline.deadline.in_flight import WorkInFlight
from paceline.deadline.proxy import Proxy
from paceline.deadline.side_stream import SideStream
from paceline.errors import Dropped
from paceline.feed.micro_batches import MicroBatch
from paceline.loop.context import LoopContext
from paceline.loop.handover import place_of, take_place
from paceline.loop.rounds import both
from paceline.loop.step_recording import record_of, write_header
from paceline.loop.step_state import LoopPhase, StepState, Work
from paceline.pace.fitting import fit, ladder, recent_pace
from paceline.records import StepRecord


class Deadlines:
    """What a loop has for rounds that wait for nobody: a proxy, work in flight on the device, and catching up."""

    def __init__(self, loop: LoopContext, opened: Callable[[StepState], None]) -> None:
        """``opened`` is told of every step that the proxy opens."""
        if loop.dealing.length is None:
            raise ValueError(
                "rounds with a deadline (pace joint or cutoff) need a dataset with a length: an iterable one cannot "
                "give again what a deadline cut off; use pace adaptive"
            )
        self._loop, self.opened = loop, opened
        self.side_stream = SideStream(loop.device)
        self.in_flight = WorkInFlight(loop, self.side_stream)
        self.promises = Promises(loop.transport)
        self.commit_s = 0.0
        """Seconds of the last update."""
        self.proxy = Proxy(loop, self)

    def copyable(self) -> bool:
        """Whether a copy of a peer's state would hold everything that has state."""
        return self._loop.copyable and not self._loop.tracking.stepped_untracked()

    def write_header(self, step_state: StepState, counts: bool, finite: bool) -> Header:
        """``counts``: whether this worker's work does; ``finite``: whether its gradients are."""
        loop, members = self._loop, self._loop.membership
        busy = 0.0 if step_state.idle else concurrency.perf_counter() - (step_state.busy_since or step_state.opened)
        more = {"unfinished_s": busy, "behind": max(0, step_state.index - loop.next), "late_s": self.in_flight.late_s()}
        intentions = members.intentions() if members is not None else {}
        return write_header(loop, step_state, {**more, **intentions}, finite=finite, counts=counts)

    def record(self, step_state: StepState, header: Header, entered: float) -> StepRecord:
        """The record of a round that the proxy ran: it is over now, and this worker entered it then."""
        wall_s = concurrency.perf_counter() - step_state.opened
        busy = float((header.column("seconds") + header.column("unfinished_s")).max())
        latest = max(entered - step_state.opened, min(busy, step_state.plan.deadline_s or busy))
        record = record_of(
            step_state,
            header,
            self._loop.transport.slot_name,
            round_s=max(0.0, wall_s - latest),
            emulated=self._loop.machine is not None,
            auto=self._loop.auto,
            by_deadline=True,
        )
        return replace(record, wall_s=wall_s + self.commit_s)

    def round_over(self) -> None:
        """A round with a deadline has ended: entries of newcomers are spaced by these rounds too."""
        if self._loop.membership is not None:
            self._loop.membership.round_over()

    # -- the loop's course -------------------------------------------------------------------------------------------

    def between_steps(self) -> int | None:
        """Send copies that were promised, and take one over that has come. Returns the step that it follows."""
        self.promises.give(self._packed)
        return self._take_copy()

    def begin(self) -> None:
        """Another step begins, here."""
        self.in_flight.clear()
        self.side_stream.follow()

    def end(self) -> None:
        """The loop has come to its end."""
        self.promises.give(self._packed)

    def _packed(self) -> torch.Tensor:
        return checkpoint.pack(place_of(self._loop))

    def _take_copy(self) -> int | None:
        """Take over a peer's state where one was promised, and with it the peer's place in the training."""
        loop, proxy, backlog = self._loop, self.proxy, self.proxy.backlog
        with loop.training.changed:
            loop.training.changed.wait_for(lambda: proxy.error or backlog.copied is None or backlog.copied.here)
            copy, backlog.copied = backlog.copied, None
        error = proxy.error or (copy.error if copy is not None else None)
        if error is not None:
            raise error
        if copy is None:
            return None
        skipped = copy.index + 1 - loop.next
        take_place(loop, checkpoint.unpack(copy.data, device=loop.device))
        assert loop.next == copy.index + 1
        text = f"worker {loop.transport.rank} was {skipped} steps behind and took over a peer's state"
        loop.observe("note", {"level": "warning", "text": text})
        return copy.index

    # -- newcomers and the end ---------------------------------------------------------------------------------------

    def restart(self, place: Any) -> None:
        """A newcomer has taken over a peer's state: be where the peer's proxy is."""
        self.proxy.stop()
        self.proxy = Proxy(self._loop, self)
        self.proxy.take_place(place)

    def members_changed(self) -> None:
        self.promises.members_changed()
        self.proxy.backlog.forget_copy()

    def close(self, *, orderly: bool) -> None:
        if orderly:
            self.promises.give(self._packed)
            self.promises.join()
        self.proxy.stop_together() if orderly and not self._loop.finished else self.proxy.stop()
        if orderly:
            self.proxy.join()


class ProxyRound:
    """A round that closes at its deadline, or with the first so many shares, whoever is late."""

    def __init__(self, loop: LoopContext, step_state: StepState, deadlines: Deadlines) -> None:
        self._loop, self._step_state, self._gradients, self._deadlines = loop, step_state, loop.gradients, deadlines
        self._changed = loop.training.changed
        self._finished: Work | None = None
        self._aside: Aside | None = None
        """A micro-batch whose backward is done, and its gradients, until the loop comes back for more."""

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def take(self, opened: float) -> tuple[MicroBatch | None, float]:
        while self._still_open(opened):
            until = self._step_state.until
            room = 0 if self._step_state.loop_phase is LoopPhase.CUT_OFF else self._room()
            taken = self._loop.source.take(room) if room != 0 else None
            if taken is not None or not self._another_lap(until):
                return taken, opened
            opened = concurrency.perf_counter()
        return None, opened

    def _still_open(self, now: float) -> bool:
        """The loop wants a micro-batch: False when the round closed without it."""
        with self._changed:
            self._step_state.busy_since = now if self._step_state.open else None
            return not self._step_state.closed

    def _room(self) -> int | None:
        """The samples that the time left allows; 0: none. None: there is no deadline."""
        step_state, dealing = self._step_state, self._loop.dealing
        if step_state.until is None:
            return None
        whole, smallest = dealing.micro_batch, dealing.smallest
        sizes = [size for size in ladder(whole) if size >= smallest] if not self._loop.whole else [whole]
        fits = fit(step_state.until - concurrency.perf_counter(), recent_pace(list(self._loop.paces)), sizes)
        return fits or (
            0 if step_state.work.samples else sizes[-1]
        )  # try, or a slow worker would never be seen to recover

    def _another_lap(self, until: float | None) -> bool:
        """The share is done, or nothing fits ``until`` then: whether another lap, or an extension, has more."""
        step_state = self._step_state
        if step_state.closed or not (step_state.last or step_state.least):
            return False
        self._deadlines.in_flight.land()  # else what is dealt again might still come in
        try:
            return self._deadlines.proxy.idle(step_state, gone=False, until=until)
        except Dropped:  # the commit says so
            return False

    def backward(self, loss: torch.Tensor, weight: Any, micro: MicroBatch, *, among: Among, **graph: bool) -> None:
        if self._check():
            self._aside = both(
                self._aside, self._gradients.accumulation.backward_aside(loss, weight, among=among, **graph)
            )

    def _check(self) -> bool:
        """Before a backward, and before it joins: False when it would be for nothing."""
        with self._changed:
            if self._step_state.open:
                self._gradients.accumulation.check_aside()
            return self._step_state.open

    def drop(self) -> None:
        self._aside = None

    def end_backward(self) -> None:
        pass

    def done(self, work: Work) -> None:
        if self._loop.device.type != "cuda":
            self._loop.paces.append(work.slowest_s / work.samples)
        self._finished = work
        self._loop.timed(work)

    def next(self, figures: dict[str, Any], opened: float) -> None:
        finished, aside = self._finished, self._aside
        self._finished = self._aside = None
        if finished is None:
            with self._changed:
                self._step_state.work.add(Work(added=figures))
            return
        finished.added = figures
        self._check()
        self._deadlines.in_flight.start(
            self._step_state, finished, aside or self._gradients.accumulation.no_gradient(), opened
        )
        with self._changed:
            self._gradients.buckets.show()

    def may_be_left(self, busy: bool) -> bool:
        return not busy or not self._step_state.open  # what is left stays in this worker's queue

    def end_work(self, began: float) -> None:
        pass

    # -- the round ---------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """It may be over long since."""
        step_state, deadlines, proxy = self._step_state, self._deadlines, self._deadlines.proxy
        deadlines.in_flight.land()
        if step_state.open and step_state.began is not None:
            self._check()
        if not step_state.over:
            proxy.idle(step_state, gone=True)
        with self._changed:
            self._changed.wait_for(lambda: step_state.over or proxy.error)
        if not step_state.over and proxy.error is not None:
            raise proxy.error
        assert step_state.header is not None
        self._gradients.buckets.show()
        deadlines.side_stream.rejoin()
        deadlines.promises.note(step_state)
        total = step_state.total
        if total is None:
            deadlines.promises.decline()
            return False
        buffers = [total.buffers[1]] if total.buffers is not None else []
        deadlines.side_stream.lend([*total.flats, total.statistics, *buffers])
        self._gradients.exchange.adopt(total, step_state.header)
        return True

    def record(self, header: Header, applied: bool) -> StepRecord | None:
        return self._step_state.record

    def commit(self, header: Header, began: float) -> None:
        self._deadlines.proxy.backlog.taken_over(self._step_state)

    def refuse(self, header: Header) -> None:
        """The next step does, which waits for everybody."""

    def compare(self, header: Header) -> None:
        """Where they differ, the next step waits for everybody, and looks again."""
