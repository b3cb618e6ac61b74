"""The proxy: a thread that enters rounds with a deadline for its worker, so that nobody waits for one that is stuck.

The user's loop may be anywhere inside a micro-batch when the deadline comes, and nothing can interrupt it there. The
proxy closes the step with what is *finished*, runs the round, keeps the training's state and opens the next step. A
loop that is late finds the steps it missed waiting for it, each with the sums of its round: it takes them over one by
one, as steps without micro-batches, and is where the others are.

Before it closes a step the proxy may go on with it in two ways. Below the floor the deadline is moved, and free workers
are dealt more (`Proxy._extend`). In an epoch's last step, what late workers left is dealt again, lap after lap
(`Proxy._lap`; `lap_shares` and `lap_seconds` decide how much and for how long).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline import concurrency
from paceline.errors import Dropped, FleetError, GenerationOver
from paceline.gradients.fleet_sums import sum_until_done
from paceline.pace.forecast import Mask
from paceline.pace.shares import Ints, proportional
from paceline.step.checks.sameness import CAUSE, is_to_end
from paceline.step.late.catch_up import Backlog
from paceline.step.step_state import LoopPhase, RoundPhase, StepState

if TYPE_CHECKING:
    from paceline.step.context import LoopContext
    from paceline.step.late.deadline_round import DeadlineRound, Deadlines

PATIENT = 1.2
"""The factor by which a further lap may take longer than expected."""
POLL_S = (0.001, 0.01)
"""Seconds between two polls for a signal of the others, at first and later."""


def lap_shares(step_state: StepState, undone: int, counted: int, idle: Mask, *, smallest: int) -> Ints:
    """Return what each idle worker gets of the epoch's ``undone`` samples, in proportion to its first share.

    In the last step all of them are dealt; else what the step lacks, which has ``counted`` samples. Nobody gets fewer
    than ``smallest`` samples, and no rest of fewer stays.
    """
    lacks = undone if step_state.last else min(undone, max(0, step_state.floor - counted))
    if not lacks or not idle.any():
        return np.zeros(len(idle), dtype=np.int64)
    speeds = np.where(idle, np.maximum(step_state.plan.samples, 1.0), 0.0)
    if step_state.last or smallest == 1:
        return proportional(speeds, lacks)
    lacks = max(lacks, smallest)
    one = np.zeros(len(idle), dtype=np.int64)
    one[int(np.argmax(speeds))] = undone if undone - lacks < smallest else lacks
    return one


def lap_seconds(step_state: StepState, shares: Ints) -> float:
    """Return a lap's deadline: the step's, times the largest part of a first share dealt again, and some more."""
    step_s = step_state.plan.deadline_s or concurrency.perf_counter() - step_state.opened
    first = np.maximum(step_state.plan.samples, 1)
    return step_state.patience * PATIENT * step_s * max(float((shares / first).max()), 0.05)


class Proxy:
    """The thread that closes the steps that have a deadline. The user's thread closes the others itself."""

    def __init__(self, loop: LoopContext, deadlines: Deadlines) -> None:
        self._transport, self._training = loop.transport, loop.training
        self._deadlines = deadlines
        self.error: BaseException | None = None
        self.backlog = Backlog(loop.transport, loop.training.lock, deadlines.copyable)
        self._stopping = False
        self._needed = False
        """Whether a step of this loop had a deadline: the same on every worker."""
        self._entered = 0
        """The number of rounds and laps that this worker has entered."""
        self._last_to_enter: int | None = None
        """The last round or lap to enter, once the proxy is stopping; None while the workers agree on it."""
        self._loop_number = loop.transport.calls
        """The number in the names of this loop's signals, which an earlier loop with the same steps does not have."""
        self._step_round: DeadlineRound | None = None
        """The round to run next, or the last one; None while a step without a deadline is open."""
        self._thread = concurrency.Thread(target=self._run, name="paceline-proxy", daemon=True)

    # -- from the user's thread ------------------------------------------------------------------------------------

    def watch(self, step_round: DeadlineRound | None) -> None:
        """Run this round when its time comes; None: the step that was opened waits for everybody.

        The first round with a deadline starts the thread.
        """
        if step_round is not None:
            self._needed = True
            self._deadlines.side_stream.open()
        with self._training.lock:
            self._step_round = step_round
            self._training.lock.notify_all()
        if step_round is not None and not self._thread.is_alive() and not self._stopping:
            self._thread.start()

    def begun(self, step_state: StepState) -> None:
        """Signal that the user's loop has begun an open step: the clock starts for everybody."""
        self._transport.signal(self._name("begun", step_state))

    def wait_for_more(self, step_state: StepState, *, gone: bool, until: float | None = None) -> bool:
        """Wait, in the user's loop that has nothing to do, until the step is over or deals it more.

        Returns True when another lap or an extension has more for the loop, which cannot be once it is ``gone`` from
        its micro-batches. ``until``: the end of the lap as the loop last saw it.
        """
        with self._training.lock:
            step_state.enter(LoopPhase.WAITING if gone else LoopPhase.DONE)
            step_state.busy_since = None
            if gone:
                step_state.extra = 0  # what it was offered stays in its queue
            elif step_state.floor and step_state.until != until:
                self._offer_rest(step_state)  # it was extended just now
            if step_state.extra:
                return self._take_extra(step_state)
            self._training.lock.notify_all()
        wait_for = step_state.plan.wait_for
        if wait_for is not None:
            self._arrive(step_state, wait_for)
        with self._training.lock:
            self._training.lock.wait_for(lambda: step_state.over or step_state.extra or self.error)
            return self._take_extra(step_state)

    def _arrive(self, step_state: StepState, wait_for: int, by: int = 1) -> None:
        """Add to the step's arrivals; whoever completes the plan's number signals that the round closes."""
        if self._transport.tally(self._name("arrived", step_state), by) >= wait_for:
            self._transport.signal(self._name("complete", step_state))

    def _take_extra(self, step_state: StepState) -> bool:
        if self.error is not None:
            raise self.error
        if step_state.closed or not step_state.extra:
            return False
        counted = step_state.counted[self._transport.rank]
        self._training.dealing.begin_share(step_state.extra, done=step_state.work.samples - counted)
        step_state.extra = 0
        step_state.enter(LoopPhase.WORKING)
        return True

    def stop_together(self) -> None:
        """End the threads of all workers after the same round, so that none is left alone in a round.

        All workers call this. Where no step had a deadline there is nothing to agree on.
        """
        if not self._needed:
            self.stop()
            return
        self._stop(last=None)
        entered = [0]
        try:
            entered = self._transport.gather("the end of the loop", self._entered)
        except FleetError:  # whatever comes next raises it too
            pass
        finally:  # also after Ctrl-C: the thread waits for this number
            self._stop(last=max(entered))

    def stop(self) -> None:
        """End the thread. A round it is in ends by itself, or by the transport's failure."""
        self._stop(last=0)

    def _stop(self, *, last: int | None) -> None:
        with self._training.lock:
            self._stopping, self._last_to_enter = True, last
            self._training.lock.notify_all()

    def join(self) -> None:
        if self._thread.is_alive() and concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (step_round := self._next()) is not None:
                self._await_begin(step_round.step_state)
                with self._deadlines.side_stream.work():
                    self._close(step_round)
        except _Left:
            return
        except BaseException as error:
            if isinstance(error, Dropped):  # its frames hold the group that was left, and the worker goes on
                error = Dropped(str(error), generation=error.generation)
            with self._training.lock:
                self.error = error
                self._training.lock.notify_all()
        finally:
            self._transport.release()  # nobody else would: this thread has no round left to record

    def _next(self) -> DeadlineRound | None:
        """Wait for the next round with a deadline and return it; None when there will be none."""

        def due() -> bool:
            return self._step_round is not None and not self._step_round.step_state.over

        with self._training.lock:
            self._training.lock.wait_for(lambda: self._stopping or self._training.finished or due())
            return self._step_round if due() and not self._training.finished else None

    def _await_begin(self, step_state: StepState) -> None:
        """Wait until somebody's loop has begun the step, here or elsewhere.

        Where members changed in the step the clock runs at once: a signal that went to the old members is lost.
        """
        while not self._wait_for_signal(
            self._name("begun", step_state), lambda: step_state.began is not None or step_state.hurried
        ):
            pass
        with self._training.lock:
            step_state.start_clock(concurrency.perf_counter())
        if self._transport.rank == 0:
            for old in ("begun", "arrived", "complete"):
                self._transport.forget(self._name(old, step_state, ago=3))

    def _wait_for_signal(self, name: str, here: Callable[[], bool]) -> bool:
        """Wait for a signal as `_poll_signal` does; return False when members changed meanwhile."""
        try:
            self._poll_signal(name, here)
        except GenerationOver as over:
            self._transport.recover(over, background=True)
            return False
        return True

    def _enter(self) -> None:
        """Count a round or a lap that this worker enters; end the thread instead when the loop was left."""
        with self._training.lock:
            self._training.lock.wait_for(lambda: not self._stopping or self._last_to_enter is not None)
            if self._last_to_enter is not None and self._entered >= self._last_to_enter:
                raise _Left
            self._entered += 1

    def _close(self, step_round: DeadlineRound) -> None:
        step_state = step_round.step_state
        if step_state.plan.deadline_s is None:
            self._await_count(step_state)
        else:
            self._await_idle(step_state)
        while step_state.floor and self._extend(step_state):
            pass
        while step_state.last and self._lap(step_state):
            pass
        while not (self._stopping or self.backlog.make_room()):
            # Nobody sends this signal: the wait only follows changes of members.
            self._wait_for_signal(self._name("room", step_state), self.backlog.has_room)
        self._enter()
        self._keep_up()
        header, total, record = step_round.run_for_worker()
        with self._training.lock:
            self._deadlines.round_over()
            step_state.header, step_state.total = header, total
            self._deadlines.promises.note(step_state)
            self.backlog.keep(step_state)
            self._training.note(self._training.close(step_state, header, record, by_deadline=True))
        if step_state.ends_epoch and not self._training.finished:
            self._agree_on_order()
        with self._training.lock:
            step_state.enter(RoundPhase.OVER)
            if self._training.plan is not None and not self._training.finished:  # else the leader sends a plan to all
                self._step_round = self._deadlines.make_round(self._training.open(self._training.plan))
            self._training.lock.notify_all()
        self._transport.release()

    def _await_idle(self, step_state: StepState) -> None:
        """Wait until the worker has nothing more to do, or its time is over."""
        assert step_state.until is not None
        with self._training.lock:
            while (
                not (step_state.idle or self._stopping) and (left := step_state.until - concurrency.perf_counter()) > 0
            ):
                self._training.lock.wait(min(left, 3600.0))

    def _recount(self, step_state: StepState) -> None:
        """Decide, on the leader, with how many complete shares the open step closes, from every record there is.

        The plan's number was decided a step earlier. The others go on comparing arrivals with the plan's number, so the
        leader adds ``planned - count`` to the arrivals: negative where more shares are wanted. Where as many have
        arrived already the round closes with them.
        """
        planned, count = step_state.plan.wait_for, self._training.recount(step_state)
        if planned is None or count is None:
            return
        step_state.decided_count = count
        if count != planned:
            self._arrive(step_state, planned, by=planned - count)

    def _await_count(self, step_state: StepState) -> None:
        """Wait until the plan's number of workers, or the leader's newer one, have done their share (P3's cut-off)."""
        self._recount(step_state)
        if (transport := self._transport).elastic:  # nobody can count while the roster is unreachable
            self._wait_for_signal(
                self._name("complete", step_state),
                lambda: step_state.hurried or (transport.roster_away and step_state.idle),
            )
            return
        # A round, so that the wait is watched: workers may be lost meanwhile.
        with self._transport.round(f"the arrivals of step {step_state.index}", background=True):
            self._poll_signal(self._name("complete", step_state), lambda: False)

    def _poll_signal(self, name: str, here: Callable[[], bool]) -> None:
        """Wait until ``here`` is true on this worker, or a worker has sent the signal ``name``."""
        pause, longest = POLL_S
        while True:
            with self._training.lock:
                if self._training.lock.wait_for(lambda: self._stopping or here(), timeout=pause):
                    return
            if self._transport.was_signalled(name):
                return
            pause = min(1.3 * pause, longest)

    def _agree_on_order(self) -> None:
        """Raise ValueError unless a new epoch's custom order is the same on every worker, as `check_order` does.

        Else samples would be lost and doubled in silence.
        """
        digest = self._training.dealing.order_digest()
        if digest is None:
            return
        self._enter()
        epoch, number = self._training.dealing.epoch, float(int(digest[:12], 16))  # 48 bits travel exactly

        def mine() -> torch.Tensor:
            table = torch.zeros(2, self._transport.size, dtype=torch.float64)
            table[:, self._transport.rank] = torch.tensor([number, self._transport.since], dtype=torch.float64)
            return table

        digests, since = self._sum(f"agreeing on order({epoch})", mine).tolist()
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others and is_to_end(number, digests, since):
            raise ValueError(
                f"workers disagree in order({epoch}): workers {others} have another order than worker 0. {CAUSE}"
            )

    def _name(self, what: str, step_state: StepState, ago: int = 0) -> str:
        return f"{what}/{self._loop_number}/{step_state.index - ago}"

    # -- the floor -------------------------------------------------------------------------------------------------

    def _extend(self, step_state: StepState) -> bool:
        """Extend the step when all workers together have counted less than the floor at its deadline.

        Those that are free go on with more, and the round closes later; a worker that is stuck stays in the step.
        Returns False when the round closes now.
        """
        self._enter()
        reports = self._sum(f"the floor of step {step_state.index}", lambda: self._report(step_state))
        counts, done, gone = reports.numpy()
        with self._training.lock:
            if int(counts.sum()) == step_state.fleet_counted:
                step_state.patience *= 2  # nobody found the time long enough
            step_state.fleet_counted = int(counts.sum())
            busy = (done == 0) & (gone == 0)
            more = self._training.extend(step_state, counts.astype(int).tolist(), (done > 0).tolist(), busy.tolist())
            if more is not None and not more.recall:
                step_state.until = concurrency.perf_counter() + more.seconds
                self._offer_rest(step_state)
                self._training.lock.notify_all()
        if more is None:
            self._transport.release()
            return False
        self._keep_up()
        if more.recall:
            return self._lap(step_state)
        self._await_idle(step_state)
        return True

    def _offer_rest(self, step_state: StepState) -> None:
        """Offer a loop that is done what is left of its share, as it is dealt now. The caller holds the lock."""
        if step_state.loop_phase is LoopPhase.DONE:
            step_state.extra = max(0, step_state.shares[self._transport.rank] - step_state.work.samples)

    def _report(self, step_state: StepState, *, cut_off: bool = False) -> torch.Tensor:
        """Return a table to be summed, with this worker's column: samples counted, whether free, whether it waits.

        A free loop is done and would take more; a waiting one has left its micro-batches. ``cut_off``: from now on the
        micro-batch that the loop is in does not count.
        """
        table = torch.zeros(3, self._transport.size, dtype=torch.float64)
        with self._training.lock:
            self._deadlines.in_flight.count_landed()
            if cut_off:
                step_state.extra = 0  # an offer that the loop has not woken to take: it is dealt again
                if not step_state.idle:
                    step_state.enter(LoopPhase.CUT_OFF)
            waits = step_state.loop_phase is LoopPhase.WAITING
            free = step_state.idle and not waits
            table[:, self._transport.rank] = torch.tensor([step_state.work.samples, free, waits])
        return table

    # -- laps ------------------------------------------------------------------------------------------------------

    def _lap(self, step_state: StepState) -> bool:
        """Deal again, to those that are done, what late workers have not finished.

        Return False when all is done, the floor is reached, or no loop can take more.

        In an epoch's last step everything is to be finished: there are as many laps as it takes, instead of a tiny step
        of its own. Before it, near an epoch's end, a thin step takes back in the same way what it lacks.
        """
        self._enter()
        reports = self._sum(f"the lap of step {step_state.index}", lambda: self._report(step_state, cut_off=True))
        done, idle = reports[0].numpy().astype(int), reports[1].numpy() > 0
        with self._training.lock:
            before = np.array(step_state.counted)
            dealing, counted = self._training.dealing, int(done.sum())
            undone = (dealing.remaining or 0) - int((done - before).sum())
            enough = undone == 0 or (not step_state.last and counted >= step_state.floor)
            if enough or bool(reports[2].all()):
                self._transport.release()
                return False
            shares = lap_shares(step_state, undone, counted, idle, smallest=dealing.smallest)
            if step_state.ranges and (done == before).all():
                step_state.patience *= 2  # nobody found the time long enough
            self._training.lap(step_state, tuple((done - before).tolist()), tuple(shares.tolist()))
            seconds = lap_seconds(step_state, shares)
            step_state.until = concurrency.perf_counter() + seconds
            if not step_state.last:
                step_state.extend_deadline(seconds)
            self._training.lock.notify_all()
        self._keep_up()
        self._await_idle(step_state)
        return True

    # -- workers come and go -----------------------------------------------------------------------------------------

    def _sum(self, label: str, mine: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return everybody's ``mine``, summed; it is called again when members are lost meanwhile."""
        return sum_until_done(self._transport, label, lambda: [mine()], background=True)[0]

    def _keep_up(self) -> None:
        """Follow changes of members before this worker reports anything."""
        self._transport.release()
        self._transport.deliver_members_changed()

    @property
    def position(self) -> dict[str, int]:
        """The position of this proxy in the sequence of its calls, for a newcomer's proxy."""
        return {"loop": self._loop_number, "entered": self._entered, "needed": self._needed}

    def take_position(self, position: Mapping[str, int]) -> None:
        """Go on, before the thread starts, where a peer's proxy is."""
        self._loop_number, self._entered, self._needed = position["loop"], position["entered"], bool(position["needed"])


class _Left(Exception):
    """The end of the proxy's thread, because the loop was left."""
