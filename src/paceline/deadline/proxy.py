"""The proxy: a thread that enters rounds with a deadline for its worker, so that nobody waits for one that is stuck.

The user's loop may be anywhere inside a micro-batch when the deadline comes, and nothing can interrupt it there. The
proxy closes the turn with what is *finished*, runs the round, keeps the books and opens the next turn. A loop that is
late finds the turns it missed waiting for it, each with the sums of its round: it takes them over one by one, as steps
without micro-batches, and is where the others are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from paceline.combine import Gradients, Header
from paceline.combine.gradients.exchange import Sum, recovered, sum_aside
from paceline.deadline.catch_up import Backlog
from paceline.deadline.side_stream import Beside
from paceline.errors import Dropped, FleetError, GenerationOver
from paceline.loop.step_state import LoopPhase, RoundPhase, Turn
from paceline.loop.training_state import Books
from paceline.pace.shares import proportional
from paceline.records import StepRecord
from paceline.transport import Elastic, Transport

LISTEN_S = (0.001, 0.01)
"""Seconds between two looks for a signal of the others, at first and later."""
PATIENT = 1.2
"""A further lap of an epoch's last step may take so many times the expected seconds."""

WriteHeader = Callable[[Turn, bool, bool], Header]
"""Of a turn, whether this worker's work in it counts, and whether its gradients are finite."""
MakeRecord = Callable[[Turn, Header, float], StepRecord]
"""Of a turn whose round this worker entered at that time."""


class Proxy:
    """Closes the turns that have a deadline. The others are the user's thread's own."""

    def __init__(
        self,
        *,
        beside: Beside,
        landed: Callable[[Turn], None],
        transport: Transport,
        books: Books,
        gradients: Gradients,
        header: WriteHeader,
        record: MakeRecord,
        opened: Callable[[Turn], None],
        backlog: Backlog,
    ) -> None:
        self._transport, self._books, self._gradients = transport, books, gradients
        self._beside, self._landed = beside, landed
        self._header, self._record, self._opened = header, record, opened
        self.error: BaseException | None = None
        self.backlog = backlog
        self._stopping = False
        self._entered = 0
        """Rounds and laps that this worker has gone into."""
        self._last_to_enter: int | None = None
        """Once it is stopping: the last of them that it may go into; None while the workers agree on it."""
        self._loop = transport.calls
        """Tells this loop's signals from those of an earlier one with the same steps."""
        self._turn: Turn | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-proxy", daemon=True)

    # -- from the user's thread ------------------------------------------------------------------------------------

    def watch(self, turn: Turn) -> None:
        """A turn was opened; if it has a deadline, it is the proxy's from here on."""
        with self._books.changed:
            self._turn = turn
            self._books.changed.notify_all()
        if not self._thread.is_alive() and not self._stopping:
            self._thread.start()

    def begun(self, turn: Turn) -> None:
        """The user's loop has begun an open turn: the clock runs for everybody."""
        self._transport.signal(self._name("begun", turn))

    def idle(self, turn: Turn, *, gone: bool) -> bool:
        """The user's loop has nothing more to do in this turn. True when another lap has more for it, which cannot be
        once it is ``gone`` from its micro-batches."""
        with self._books.changed:
            turn.enter(LoopPhase.WAITING if gone else LoopPhase.DONE)
            turn.busy_since = None
            self._books.changed.notify_all()
        wait_for = turn.plan.wait_for
        if wait_for is not None and self._transport.tally(self._name("arrived", turn)) == wait_for:
            self._transport.signal(self._name("complete", turn))
        with self._books.changed:
            self._books.changed.wait_for(lambda: turn.over or turn.extra or self.error)
            return self._take_extra(turn)

    def _take_extra(self, turn: Turn) -> bool:
        if self.error is not None:
            raise self.error
        if turn.over or not turn.extra:
            return False
        self._books.dealing.take_up(turn.extra)
        turn.extra = 0
        return True

    def stop_together(self) -> None:
        """End the threads of all workers after the same round: whoever waits in one is not left alone there. All
        workers call it."""
        self._stop(last=None)
        try:
            entered = self._transport.gather("the end of the loop", self._entered)
        except FleetError:  # whatever comes next says so too
            entered = [0]
        self._stop(last=max(entered))

    def stop(self) -> None:
        """End the thread. A round it is in ends by itself, or by the transport's failure."""
        self._stop(last=0)

    def _stop(self, *, last: int | None) -> None:
        with self._books.changed:
            self._stopping, self._last_to_enter = True, last
            self._books.changed.notify_all()

    def join(self) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (turn := self._next()) is not None:
                self._await_begin(turn)
                with self._beside.work():
                    self._close(turn)
        except _Left:
            return
        except BaseException as error:
            if isinstance(error, Dropped):  # its frames hold the group that was left, and the worker goes on
                error = Dropped(str(error), generation=error.generation)
            with self._books.changed:
                self.error = error
                self._books.changed.notify_all()

    def _next(self) -> Turn | None:
        """The open turn, once it has a deadline; None when there will be none."""
        with self._books.changed:
            self._books.changed.wait_for(
                lambda: (
                    self._stopping
                    or self._books.finished
                    or (self._turn is not None and self._turn.plan.bounded and not self._turn.over)
                )
            )
            mine = self._turn is not None and self._turn.plan.bounded and not self._turn.over
            return self._turn if mine and not self._books.finished else None

    def _await_begin(self, turn: Turn) -> None:
        """Wait until somebody's loop has begun the step, here or elsewhere."""
        while not self._hear(self._name("begun", turn), lambda: turn.began is not None):
            if turn.began is not None:  # it was said to others than those who are there now
                self.begun(turn)
        with self._books.changed:
            turn.run(time.perf_counter())
        if self._transport.rank == 0:
            for old in ("begun", "arrived", "complete"):
                self._transport.forget(self._name(old, turn, ago=3))

    def _hear(self, name: str, here: Callable[[], bool]) -> bool:
        """Listen; False when members changed meanwhile."""
        try:
            self._listen(name, here)
        except GenerationOver as over:
            recovered(self._transport, over)
            return False
        return True

    def _enter(self) -> None:
        """Before a round or a lap: end the thread instead when the loop was left and nobody is in it."""
        with self._books.changed:
            self._books.changed.wait_for(lambda: not self._stopping or self._last_to_enter is not None)
            if self._last_to_enter is not None and self._entered >= self._last_to_enter:
                raise _Left
            self._entered += 1

    def _close(self, turn: Turn) -> None:
        if turn.plan.deadline_s is None:
            self._await_count(turn)
        else:
            self._await_idle(turn)
        while turn.last and self._lap(turn):
            pass
        self.backlog.make_room(lambda: self._stopping)
        self._enter()
        self._keep_up()
        entered = time.perf_counter()
        header, mine = self._run_round(turn)
        record = self._record(turn, header, entered)
        with self._books.changed:
            turn.header, turn.total = header, mine
            self.backlog.keep(turn)
            self._books.note(self._books.close(turn, header, record, by_deadline=True))
        if turn.ends_epoch and not self._books.finished:
            self._agree_on_order()
        with self._books.changed:
            turn.enter(RoundPhase.OVER)
            if self._books.plan is not None and not self._books.finished:  # else the leader hands a plan round
                self._turn = self._books.open(self._books.plan)
                self._opened(self._turn)
            self._books.changed.notify_all()
        self._release()

    def _run_round(self, turn: Turn) -> tuple[Header, Sum]:
        """What the round gave; it is run again when members are lost meanwhile."""
        while True:
            try:
                header, mine = self._seal(turn)
            except GenerationOver as over:  # the store that names figures is away
                recovered(self._transport, over)
                continue
            if self._gradients.exchange_aside(mine, header, f"the round of step {turn.index}"):
                return header, mine

    def _await_idle(self, turn: Turn) -> None:
        """Wait until the worker has nothing more to do, or its time is over."""
        assert turn.until is not None
        with self._books.changed:
            while not (turn.idle or self._stopping) and (left := turn.until - time.perf_counter()) > 0:
                self._books.changed.wait(min(left, 3600.0))

    def _await_count(self, turn: Turn) -> None:
        """P3's cut-off: wait until so many workers have done their share."""
        if isinstance(transport := self._transport, Elastic):  # nobody can count while the roster is away
            self._hear(self._name("complete", turn), lambda: turn.hurried or (transport.deaf and turn.idle))
            return
        with self._transport.round(f"the arrivals of step {turn.index}", aside=True):  # it is watched: some may be lost
            self._listen(self._name("complete", turn), lambda: False)

    def _listen(self, name: str, here: Callable[[], bool]) -> None:
        """Wait until this worker itself knows, or another has said ``name``."""
        pause, longest = LISTEN_S
        while True:
            with self._books.changed:
                if self._books.changed.wait_for(lambda: self._stopping or here(), timeout=pause):
                    return
            if self._transport.heard(name):
                return
            pause = min(1.3 * pause, longest)

    def _agree_on_order(self) -> None:
        """A new epoch's custom order must be the same on every worker, or samples would be lost and doubled in
        silence."""
        digest = self._books.dealing.order_digest()
        if digest is None:
            return
        self._enter()
        epoch = self._books.dealing.epoch

        def mine() -> torch.Tensor:
            said = torch.zeros(self._transport.size, dtype=torch.float64)
            said[self._transport.rank] = int(digest[:12], 16)  # 48 bits travel exactly
            return said

        said = self._sum(f"agreeing on order({epoch})", mine)
        others = np.flatnonzero(said.numpy() != said[0].item()).tolist()
        if others:
            raise ValueError(
                f"workers disagree in order({epoch}): workers {others} have another order than worker 0; it must "
                "depend on the epoch alone"
            )

    def _name(self, what: str, turn: Turn, ago: int = 0) -> str:
        return f"{what}/{self._loop}/{turn.index - ago}"

    def _seal(self, turn: Turn) -> tuple[Header, Sum]:
        """Nothing joins any more: what this worker brings to the round."""
        with self._books.changed:
            self._landed(turn)
            turn.enter(RoundPhase.CLOSED)
            counts = turn.began is not None and (turn.plan.wait_for is None or turn.idle or turn.last)
            mine = self._gradients.close(turn.work.samples) if counts else self._gradients.nothing()
            header = self._header(turn, counts, mine.finite)
            header.write(self._transport.rank, wants_state=self.backlog.wants_copy)
            return header, mine

    # -- laps ------------------------------------------------------------------------------------------------------

    def _lap(self, turn: Turn) -> bool:
        """In an epoch's last step everything is to be finished: what late workers left is dealt again to those that are
        done, as often as it takes, instead of a tiny step of its own. False when nothing is left."""
        self._enter()

        def mine() -> torch.Tensor:
            said = torch.zeros(3, self._transport.size, dtype=torch.float64)
            with self._books.changed:
                self._landed(turn)
                if not turn.idle:
                    turn.enter(LoopPhase.CUT_OFF)
                waits, done = turn.loop_phase is LoopPhase.WAITING, turn.loop_phase is LoopPhase.DONE
                said[:, self._transport.rank] = torch.tensor([turn.work.samples, done, waits])
            return said

        said = self._sum(f"the lap of step {turn.index}", mine)
        done, idle = said[0].numpy().astype(int), said[1].numpy() > 0
        with self._books.changed:
            before = np.array(turn.counted)
            left = (self._books.dealing.remaining or 0) - int((done - before).sum())
            if left == 0 or bool(said[2].all()):
                self._release()
                return False
            speeds = np.where(idle, np.maximum(turn.plan.samples, 1.0), 0.0)
            shares = proportional(speeds, left) if idle.any() else np.zeros(len(done), dtype=int)
            if turn.ranges and (done == before).all():
                turn.patience *= 2  # nobody found the time long enough
            self._books.lap(turn, tuple((done - before).tolist()), tuple(shares.tolist()))
            if turn.extra:
                turn.enter(LoopPhase.WORKING)
            turn.until = time.perf_counter() + _lap_seconds(turn, shares)
            self._books.changed.notify_all()
        self._keep_up()
        self._await_idle(turn)
        return True

    # -- workers come and go -----------------------------------------------------------------------------------------

    def _sum(self, label: str, mine: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Everybody's ``mine``, summed; asked again when members are lost meanwhile."""
        while (said := sum_aside(self._transport, label, [mine()])) is None:
            pass
        return said[0]

    def _release(self) -> None:
        """What the last call gave is in the books: they may follow who is there now."""
        if isinstance(self._transport, Elastic):
            self._transport.release()

    def _keep_up(self) -> None:
        """Before this worker says anything of itself: see who is there."""
        if isinstance(self._transport, Elastic):
            self._transport.release()
            self._transport.follow()

    @property
    def place(self) -> dict[str, int]:
        """Where this proxy is in the sequence of its calls, for a newcomer's."""
        return {"loop": self._loop, "entered": self._entered}

    def take_place(self, place: Mapping[str, int]) -> None:
        """Before its thread starts: be where a peer's proxy is."""
        self._loop, self._entered = place["loop"], place["entered"]


def _lap_seconds(turn: Turn, shares: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    """A lap's deadline: the step's own, by the part of its first share that a worker has again, and room for chance."""
    whole = turn.plan.deadline_s or time.perf_counter() - turn.opened
    first = np.maximum(turn.plan.samples, 1)
    return turn.patience * PATIENT * whole * max(float((shares / first).max()), 0.05)


class _Left(Exception):
    """The loop was left."""
