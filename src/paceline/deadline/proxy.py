"""The proxy: a thread that enters rounds with a deadline for its worker, so that nobody waits for one that is stuck.

The user's loop may be anywhere inside a micro-batch when the deadline comes, and nothing can interrupt it there. The
proxy closes the step with what is *finished*, runs the round, keeps the training's state and opens the next step. A
loop that is late finds the steps it missed waiting for it, each with the sums of its round: it takes them over one by
one, as steps without micro-batches, and is where the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline import concurrency
from paceline.combine import Header
from paceline.combine.gradients.exchange import Sum, re_formed, summed
from paceline.deadline.catch_up import Backlog
from paceline.deadline.laps import lap_seconds, lap_shares
from paceline.errors import Dropped, FleetError, GenerationOver
from paceline.loop.orders import CAUSE
from paceline.loop.step_state import LoopPhase, RoundPhase, StepState

if TYPE_CHECKING:
    from paceline.deadline.rounds import Deadlines
    from paceline.loop.context import LoopContext

LISTEN_S = (0.001, 0.01)
"""Seconds between two looks for a signal of the others, at first and later."""


class Proxy:
    """Closes the steps that have a deadline. The others are the user's thread's own."""

    def __init__(self, loop: LoopContext, deadlines: Deadlines) -> None:
        self._transport, self._training, self._gradients = loop.transport, loop.training, loop.gradients
        self._deadlines = deadlines
        self.error: BaseException | None = None
        self.backlog = Backlog(loop.transport, loop.training.changed, deadlines.copyable)
        self._stopping = False
        self._needed = False
        """Whether a step of this loop had a deadline: the same on every worker."""
        self._entered = 0
        """Rounds and laps that this worker has gone into."""
        self._last_to_enter: int | None = None
        """Once it is stopping: the last of them that it may go into; None while the workers agree on it."""
        self._loop = loop.transport.calls
        """Tells this loop's signals from those of an earlier one with the same steps."""
        self._step_state: StepState | None = None
        self._thread = concurrency.Thread(target=self._run, name="paceline-proxy", daemon=True)

    # -- from the user's thread ------------------------------------------------------------------------------------

    def watch(self, step_state: StepState) -> None:
        """A step was opened; if it has a deadline, it is the proxy's from here on. The first of them starts the
        thread."""
        if step_state.plan.bounded:
            self._needed = True
            self._deadlines.side_stream.open()
        with self._training.changed:
            self._step_state = step_state
            self._training.changed.notify_all()
        if step_state.plan.bounded and not self._thread.is_alive() and not self._stopping:
            self._thread.start()

    def begun(self, step_state: StepState) -> None:
        """The user's loop has begun an open step: the clock runs for everybody."""
        self._transport.signal(self._name("begun", step_state))

    def idle(self, step_state: StepState, *, gone: bool, until: float | None = None) -> bool:
        """The user's loop has nothing more to do in this step, ``until`` then. True when another lap or an extension
        has more for it, which cannot be once it is ``gone`` from its micro-batches."""
        with self._training.changed:
            step_state.enter(LoopPhase.WAITING if gone else LoopPhase.DONE)
            step_state.busy_since = None
            if gone:
                step_state.extra = 0  # what it was offered stays in its queue
            elif step_state.least and step_state.until != until:
                self._offer_rest(step_state)  # it was extended just now
            if step_state.extra:
                return self._take_extra(step_state)
            self._training.changed.notify_all()
        wait_for = step_state.plan.wait_for
        if wait_for is not None and self._transport.tally(self._name("arrived", step_state)) == wait_for:
            self._transport.signal(self._name("complete", step_state))
        with self._training.changed:
            self._training.changed.wait_for(lambda: step_state.over or step_state.extra or self.error)
            return self._take_extra(step_state)

    def _take_extra(self, step_state: StepState) -> bool:
        if self.error is not None:
            raise self.error
        if step_state.over or not step_state.extra:
            return False
        counted = step_state.counted[self._transport.rank]
        self._training.dealing.take_up(step_state.extra, done=step_state.work.samples - counted)
        step_state.extra = 0
        step_state.enter(LoopPhase.WORKING)
        return True

    def stop_together(self) -> None:
        """End the threads of all workers after the same round: whoever waits in one is not left alone there. All
        workers call it. Where no step had a deadline there is nothing to agree on."""
        if not self._needed:
            self.stop()
            return
        self._stop(last=None)
        entered = [0]
        try:
            entered = self._transport.gather("the end of the loop", self._entered)
        except FleetError:  # whatever comes next says so too
            pass
        finally:  # also after Ctrl-C: the thread waits to be told
            self._stop(last=max(entered))

    def stop(self) -> None:
        """End the thread. A round it is in ends by itself, or by the transport's failure."""
        self._stop(last=0)

    def _stop(self, *, last: int | None) -> None:
        with self._training.changed:
            self._stopping, self._last_to_enter = True, last
            self._training.changed.notify_all()

    def join(self) -> None:
        if self._thread.is_alive() and concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (step_state := self._next()) is not None:
                self._await_begin(step_state)
                with self._deadlines.side_stream.work():
                    self._close(step_state)
        except _Left:
            return
        except BaseException as error:
            if isinstance(error, Dropped):  # its frames hold the group that was left, and the worker goes on
                error = Dropped(str(error), generation=error.generation)
            with self._training.changed:
                self.error = error
                self._training.changed.notify_all()
        finally:
            self._transport.release()  # nobody else would: no round of this thread's is left to be recorded

    def _next(self) -> StepState | None:
        """The open step, once it has a deadline; None when there will be none."""
        with self._training.changed:
            self._training.changed.wait_for(
                lambda: (
                    self._stopping
                    or self._training.finished
                    or (self._step_state is not None and self._step_state.plan.bounded and not self._step_state.over)
                )
            )
            mine = self._step_state is not None and self._step_state.plan.bounded and not self._step_state.over
            return self._step_state if mine and not self._training.finished else None

    def _await_begin(self, step_state: StepState) -> None:
        """Wait until somebody's loop has begun the step, here or elsewhere."""
        while not self._hear(self._name("begun", step_state), lambda: step_state.began is not None):
            if step_state.began is not None:  # it was said to others than those who are there now
                self.begun(step_state)
        with self._training.changed:
            step_state.run(concurrency.perf_counter())
        if self._transport.rank == 0:
            for old in ("begun", "arrived", "complete"):
                self._transport.forget(self._name(old, step_state, ago=3))

    def _hear(self, name: str, here: Callable[[], bool]) -> bool:
        """Listen; False when members changed meanwhile."""
        try:
            self._listen(name, here)
        except GenerationOver as over:
            re_formed(self._transport, over)
            return False
        return True

    def _enter(self) -> None:
        """Before a round or a lap: end the thread instead when the loop was left and nobody is in it."""
        with self._training.changed:
            self._training.changed.wait_for(lambda: not self._stopping or self._last_to_enter is not None)
            if self._last_to_enter is not None and self._entered >= self._last_to_enter:
                raise _Left
            self._entered += 1

    def _close(self, step_state: StepState) -> None:
        if step_state.plan.deadline_s is None:
            self._await_count(step_state)
        else:
            self._await_idle(step_state)
        while step_state.least and self._extend(step_state):
            pass
        while step_state.last and self._lap(step_state):
            pass
        while not (self._stopping or self.backlog.make_room()):  # nobody says this name: see who is there meanwhile
            self._hear(self._name("room", step_state), self.backlog.has_room)
        self._enter()
        self._keep_up()
        entered = concurrency.perf_counter()
        header, mine = self._run_round(step_state)
        record = self._deadlines.record(step_state, header, entered)
        with self._training.changed:
            self._deadlines.round_over()
            step_state.header, step_state.total = header, mine
            self.backlog.keep(step_state)
            self._training.note(self._training.close(step_state, header, record, by_deadline=True))
        if step_state.ends_epoch and not self._training.finished:
            self._agree_on_order()
        with self._training.changed:
            step_state.enter(RoundPhase.OVER)
            if self._training.plan is not None and not self._training.finished:  # else the leader hands a plan round
                self._step_state = self._training.open(self._training.plan)
                self._deadlines.opened(self._step_state)
            self._training.changed.notify_all()
        self._transport.release()

    def _run_round(self, step_state: StepState) -> tuple[Header, Sum]:
        """What the round gave; it is run again when members are lost meanwhile."""
        exchange, label = self._gradients.exchange, f"the round of step {step_state.index}"
        while (sums := exchange.run_aside(lambda: self._seal(step_state), label)) is None:
            pass
        return sums

    def _await_idle(self, step_state: StepState) -> None:
        """Wait until the worker has nothing more to do, or its time is over."""
        assert step_state.until is not None
        with self._training.changed:
            while (
                not (step_state.idle or self._stopping) and (left := step_state.until - concurrency.perf_counter()) > 0
            ):
                self._training.changed.wait(min(left, 3600.0))

    def _await_count(self, step_state: StepState) -> None:
        """P3's cut-off: wait until so many workers have done their share."""
        if (transport := self._transport).elastic:  # nobody can count while the roster is away
            self._hear(
                self._name("complete", step_state),
                lambda: step_state.hurried or (transport.roster_away and step_state.idle),
            )
            return
        with self._transport.round(
            f"the arrivals of step {step_state.index}", aside=True
        ):  # it is watched: some may be lost
            self._listen(self._name("complete", step_state), lambda: False)

    def _listen(self, name: str, here: Callable[[], bool]) -> None:
        """Wait until this worker itself knows, or another has said ``name``."""
        pause, longest = LISTEN_S
        while True:
            with self._training.changed:
                if self._training.changed.wait_for(lambda: self._stopping or here(), timeout=pause):
                    return
            if self._transport.heard(name):
                return
            pause = min(1.3 * pause, longest)

    def _agree_on_order(self) -> None:
        """A new epoch's custom order must be the same on every worker, or samples would be lost and doubled in
        silence."""
        digest = self._training.dealing.order_digest()
        if digest is None:
            return
        self._enter()
        epoch = self._training.dealing.epoch

        def mine() -> torch.Tensor:
            said = torch.zeros(self._transport.size, dtype=torch.float64)
            said[self._transport.rank] = int(digest[:12], 16)  # 48 bits travel exactly
            return said

        said = self._sum(f"agreeing on order({epoch})", mine)
        others = np.flatnonzero(said.numpy() != said[0].item()).tolist()
        if others:
            raise ValueError(
                f"workers disagree in order({epoch}): workers {others} have another order than worker 0. {CAUSE}"
            )

    def _name(self, what: str, step_state: StepState, ago: int = 0) -> str:
        return f"{what}/{self._loop}/{step_state.index - ago}"

    def _seal(self, step_state: StepState) -> tuple[Header, Sum]:
        """Nothing joins any more: what this worker brings to the round."""
        with self._training.changed:
            self._deadlines.in_flight.count_landed()
            step_state.enter(RoundPhase.CLOSED)
            counts = step_state.began is not None and (
                step_state.plan.wait_for is None or step_state.idle or step_state.last
            )
            mine = self._gradients.close(step_state.work.samples) if counts else self._gradients.exchange.nothing()
            header = self._deadlines.write_header(step_state, counts, mine.finite)
            header.write(self._transport.rank, wants_state=self.backlog.wants_copy)
            return header, mine

    # -- the floor -------------------------------------------------------------------------------------------------

    def _extend(self, step_state: StepState) -> bool:
        """At the deadline all say what they have. With less than the floor, those that are free go on with more, and
        the round closes later; who is stuck stays in the step. False when it closes now."""
        self._enter()
        said = self._sum(f"the floor of step {step_state.index}", lambda: self._said(step_state))
        counts, done, gone = said.numpy()
        with self._training.changed:
            if int(counts.sum()) == step_state.told:
                step_state.patience *= 2  # nobody found the time long enough
            step_state.told = int(counts.sum())
            busy = (done == 0) & (gone == 0)
            more = self._training.extend(step_state, counts.astype(int).tolist(), (done > 0).tolist(), busy.tolist())
            if more is not None and not more.recall:
                step_state.until = concurrency.perf_counter() + more.seconds
                self._offer_rest(step_state)
                self._training.changed.notify_all()
        if more is None:
            self._transport.release()
            return False
        self._keep_up()
        if more.recall:
            return self._lap(step_state)
        self._await_idle(step_state)
        return True

    def _offer_rest(self, step_state: StepState) -> None:
        """Offer a loop that is done what is left of its share, as it is dealt now. Under the lock."""
        if step_state.loop_phase is LoopPhase.DONE:
            step_state.extra = max(0, step_state.shares[self._transport.rank] - step_state.work.samples)

    def _said(self, step_state: StepState, *, cut_off: bool = False) -> torch.Tensor:
        """For all to sum: what this worker has counted, whether it is done and would take more, whether it has left."""
        said = torch.zeros(3, self._transport.size, dtype=torch.float64)
        with self._training.changed:
            self._deadlines.in_flight.count_landed()
            if cut_off:
                step_state.extra = 0  # an offer that the loop has not woken to take: it is dealt again
                if not step_state.idle:
                    step_state.enter(LoopPhase.CUT_OFF)
            waits = step_state.loop_phase is LoopPhase.WAITING
            free = step_state.idle and not waits
            said[:, self._transport.rank] = torch.tensor([step_state.work.samples, free, waits])
        return said

    # -- laps ------------------------------------------------------------------------------------------------------

    def _lap(self, step_state: StepState) -> bool:
        """In an epoch's last step everything is to be finished: what late workers left is dealt again to those that are
        done, as often as it takes, instead of a tiny step of its own. Before it, near an epoch's end, a thin step takes
        so back what it lacks. False when nothing is left, or missing."""
        self._enter()
        said = self._sum(f"the lap of step {step_state.index}", lambda: self._said(step_state, cut_off=True))
        done, idle = said[0].numpy().astype(int), said[1].numpy() > 0
        with self._training.changed:
            before = np.array(step_state.counted)
            dealing, counted = self._training.dealing, int(done.sum())
            undone = (dealing.remaining or 0) - int((done - before).sum())
            enough = undone == 0 or (not step_state.last and counted >= step_state.least)
            if enough or bool(said[2].all()):
                self._transport.release()
                return False
            shares = lap_shares(step_state, undone, counted, idle, smallest=dealing.smallest)
            if step_state.ranges and (done == before).all():
                step_state.patience *= 2  # nobody found the time long enough
            self._training.lap(step_state, tuple((done - before).tolist()), tuple(shares.tolist()))
            seconds = lap_seconds(step_state, shares)
            step_state.until = concurrency.perf_counter() + seconds
            if not step_state.last:
                step_state.extended(seconds)
            self._training.changed.notify_all()
        self._keep_up()
        self._await_idle(step_state)
        return True

    # -- workers come and go -----------------------------------------------------------------------------------------

    def _sum(self, label: str, mine: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Everybody's ``mine``, summed; asked again when members are lost meanwhile."""
        while (said := summed(self._transport, label, lambda: [mine()], aside=True)) is None:
            pass
        return said[0]

    def _keep_up(self) -> None:
        """Before this worker says anything of itself: see who is there."""
        self._transport.release()
        self._transport.deliver_members_changed()

    @property
    def place(self) -> dict[str, int]:
        """Where this proxy is in the sequence of its calls, for a newcomer's."""
        return {"loop": self._loop, "entered": self._entered, "needed": self._needed}

    def take_place(self, place: Mapping[str, int]) -> None:
        """Before its thread starts: be where a peer's proxy is."""
        self._loop, self._entered, self._needed = place["loop"], place["entered"], bool(place["needed"])


class _Left(Exception):
    """The loop was left."""
