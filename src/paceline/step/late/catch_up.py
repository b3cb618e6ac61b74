"""Catching up: rounds that a late loop has yet to take over, and copies of a peer's state for one that is far behind.

The sums that are kept for a late loop are bounded. Beyond that its worker asks, in a round, for a copy of a peer's
state; the first worker that was in time promises one, and sends it between two steps of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from paceline import concurrency
from paceline.errors import FleetError, GenerationOver
from paceline.gradients import Header
from paceline.step.step_state import StepState
from paceline.transport import Transport

MOST_BYTES = 512 << 20
"""The most bytes of sums that are kept for a late loop."""
GIVING_S = 30.0
"""Seconds for which the end of a loop waits for each copy that is being sent."""


class Backlog:
    """The steps that are over and that the user's loop has yet to take over, or a copy instead of them."""

    def __init__(self, transport: Transport, lock: concurrency.Condition, copyable: Callable[[], bool]) -> None:
        """Begin with nothing kept.

        ``lock``: the lock of the training's state. ``copyable`` returns whether a copy would hold everything that
        has state.
        """
        self._transport, self._lock, self._copyable = transport, lock, copyable
        self._kept: list[StepState] = []
        self.copied: Copy | None = None
        """A peer's state, on its way or here, which the user's loop takes over instead of the steps up to it."""
        self.wants_copy = False

    def keep(self, step_state: StepState) -> None:
        self._kept.append(step_state)
        if step_state.header is not None and self.wants_copy:
            giver = peer_to_copy(step_state.header)
            if giver is not None:
                self.wants_copy = False
                before = self.copied  # it holds what the steps up to it no longer do
                self.copied = Copy(self._transport, giver, step_state.index, self._came, before=before)

    def forget(self, step_state: StepState) -> None:
        """Forget a step that the user's loop has committed."""
        with self._lock:
            if step_state in self._kept:
                self._kept.remove(step_state)
                self._lock.notify_all()

    def _came(self, copy: Copy) -> None:
        """Forget the steps up to a copy that is here; keep them when its giver declined."""
        with self._lock:
            if copy is not self.copied:  # it was forgotten meanwhile
                return
            copy.here = True
            if copy.declined:
                self.copied = copy.before
            copy.before = None
            for step_state in [
                step_state for step_state in self._kept if step_state.index <= copy.index and not copy.declined
            ]:
                step_state.total = None
                self._kept.remove(step_state)
            self._lock.notify_all()

    def make_room(self) -> bool:
        """Ask for a copy of a peer's state when the steps that a late loop has yet to take over are too large.

        Returns False where a copy is needed and the script does not track all that has state: then the others have to
        wait for this worker's loop.
        """
        with self._lock:
            if self.has_room():
                self.wants_copy = False  # its loop has caught up by itself
                return True
            if self.copied is not None and not self.copied.here:
                return True
            if not self._copyable():
                return False
            self.wants_copy = True
            return True

    def forget_copy(self) -> None:
        """Forget a copy that will not come, because members changed, and wake the loop that waits for it."""
        with self._lock:
            if self.copied is not None and not self.copied.here:
                self.copied = self.copied.before
                self._lock.notify_all()

    def has_room(self) -> bool:
        return sum(step_state.total.bytes for step_state in self._kept if step_state.total is not None) <= MOST_BYTES


class Copy:
    """A peer's state after a step, being received on a thread of its own, from the giver of this generation."""

    def __init__(
        self,
        transport: Transport,
        giver: int,
        index: int,
        came: Callable[[Copy], None],
        *,
        before: Copy | None = None,
    ) -> None:
        """Begin to receive the state after step ``index``. ``before``: an earlier copy, here and not taken over yet."""
        self.before = before
        self.index, self.here = index, False
        """The step after which the state was taken, and whether it has arrived."""
        self.declined = False
        """Whether the giver cannot give it."""
        self.error: BaseException | None = None
        self.data = torch.empty(0, dtype=torch.uint8)
        self._transport, self._giver, self._came = transport, giver, came
        self._generation = transport.generation
        concurrency.Thread(target=self._receive, name="paceline-copy", daemon=True).start()

    def _receive(self) -> None:
        size, generation = torch.zeros(1, dtype=torch.int64), self._generation
        try:
            self._transport.receive(size, self._giver, 2 * self.index, generation=generation)
            self.declined = int(size) == 0
            self.data = torch.empty(int(size), dtype=torch.uint8)
            if not self.declined:
                self._transport.receive(self.data, self._giver, 2 * self.index + 1, generation=generation)
        except GenerationOver:  # it goes on by itself, or asks again
            self.declined = True
        except BaseException as error:
            self.error = error
        self._came(self)


class Promises:
    """The workers that were promised a copy of this worker's state, and the copies on their way.

    The thread that records a round notes the promises that its header makes; the user's thread answers each of them,
    once: with its state between the promised step and the next, or by declining. While the user's thread waits for all
    workers in a call, which a worker that waits for a copy would never reach, every promise is declined at once.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = concurrency.Lock()
        self._asked: dict[int, tuple[int, int]] = {}
        """The step after which each worker was promised its copy, and the generation, by the rank in that one."""
        self._declines = 0
        """The number of calls, and ends of the loop, during which no copy is given."""
        self._giving: list[concurrency.Thread] = []

    def note(self, step_state: StepState) -> None:
        """Note the workers that asked for a copy in this step's round, if this worker is to give it."""
        header, generation = step_state.header, step_state.generation
        if header is None or generation != self._transport.generation or peer_to_copy(header) != self._transport.rank:
            return  # where members have changed since, ranks are others, and those workers ask again
        asking = np.flatnonzero(header.column("wants_state")).tolist()
        with self._lock:
            self._asked |= dict.fromkeys(asking, (step_state.index, generation))
            if self._declines:
                self._answer(_DECLINED)

    def give(self, pack: Callable[[], torch.Tensor], *, after: int) -> None:
        """Send the state after step ``after`` to those who were promised it, once the user's own code has run."""
        if not self._asked:  # a promise of a step is noted before its round is over
            return
        with self._lock:
            promised = {rank for rank, (index, _) in self._asked.items() if index == after}
        if promised:
            data = pack()
            with self._lock:
                self._answer(data, promised)

    def decline(self) -> None:
        """Decline the copies that were promised, for which this worker has no state; those workers may ask again."""
        with self._lock:
            self._answer(_DECLINED)

    @contextmanager
    def declined(self) -> Iterator[None]:
        """Decline all promises until the context ends."""
        self.close()
        try:
            yield
        finally:
            with self._lock:
                self._declines -= 1

    def close(self) -> None:
        """Decline all promises from now on."""
        with self._lock:
            self._declines += 1
            self._answer(_DECLINED)

    def members_changed(self) -> None:
        """Forget the promises: the workers that wait for a copy follow the change too, and ask again."""
        with self._lock:
            self._asked = {}

    def join(self) -> None:
        """Wait until the copies on their way have been sent, `GIVING_S` for each at most."""
        for thread in self._giving:
            thread.join(timeout=GIVING_S)

    def _answer(self, data: torch.Tensor, promised: Collection[int] | None = None) -> None:
        """Send ``data`` to these workers, or to all that were promised a copy. The caller holds the lock."""
        ranks = [rank for rank in self._asked if promised is None or rank in promised]
        self._giving = [thread for thread in self._giving if thread.is_alive()]
        for rank in ranks:
            args = (self._transport, data, rank, *self._asked.pop(rank))
            self._giving.append(concurrency.Thread(target=_give, args=args, name="paceline-give", daemon=True))
            self._giving[-1].start()


_DECLINED = torch.empty(0, dtype=torch.uint8)


def _give(transport: Transport, data: torch.Tensor, to: int, index: int, generation: int) -> None:
    """Send the state to a peer's `Copy`; without data, decline it.

    A peer that is lost meanwhile needs none, and the training's own calls raise what became of it.
    """
    with suppress(GenerationOver, FleetError):
        transport.send(torch.tensor([data.numel()], dtype=torch.int64), to, 2 * index, generation=generation)
        if data.numel():
            transport.send(data, to, 2 * index + 1, generation=generation)


def peer_to_copy(header: Header) -> int | None:
    """Return the rank that gives its state to those that want one: the first that was in time; None: nobody was."""
    able = np.flatnonzero((header.column("wants_state") == 0) & (header.column("behind") == 0))
    return int(able[0]) if able.size else None
