"""Catching up: rounds that a late loop has yet to take over, and copies of a peer's state for one that is far behind.

What is kept for a late loop is bounded. Beyond that its worker asks, in a round, for a copy of a peer's state; the
first worker that was in time promises one, and sends it between two steps of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline import concurrency
from paceline.combine import Header
from paceline.errors import GenerationOver
from paceline.loop.step_state import StepState
from paceline.transport import Transport

MOST_BYTES = 512 << 20
"""Sums of rounds kept for a late loop."""
GIVING_S = 30.0


class Backlog:
    """The steps that are over and that the user's loop has yet to take over, or a copy in their place."""

    def __init__(self, transport: Transport, changed: concurrency.Condition, copyable: Callable[[], bool]) -> None:
        """``changed``: the lock of the training's state. ``copyable``: whether a copy would hold everything that has
        state."""
        self._transport, self._changed, self._copyable = transport, changed, copyable
        self._kept: list[StepState] = []
        self.copied: Copy | None = None
        """A peer's state, on its way or here: the user's loop takes it over instead of the steps up to it."""
        self.wants_copy = False

    def keep(self, step_state: StepState) -> None:
        self._kept.append(step_state)
        if step_state.header is not None and self.wants_copy:
            giver = peer_to_copy(step_state.header)
            if giver is not None:
                self.wants_copy = False
                self.copied = Copy(self._transport, giver, step_state.index, self._came)

    def taken_over(self, step_state: StepState) -> None:
        """The user's loop has committed a step."""
        with self._changed:
            if step_state in self._kept:
                self._kept.remove(step_state)
                self._changed.notify_all()

    def _came(self, copy: Copy) -> None:
        """A copy is here, so the steps up to it are not needed; or its giver declined, and they are."""
        with self._changed:
            if copy is not self.copied:  # it was forgotten meanwhile
                return
            copy.here = True
            if copy.declined:
                self.copied = None
            for step_state in [
                step_state for step_state in self._kept if step_state.index <= copy.index and not copy.declined
            ]:
                step_state.total = None
                self._kept.remove(step_state)
            self._changed.notify_all()

    def make_room(self) -> bool:
        """What a late loop has yet to take over is bounded: beyond that a copy of a peer's state replaces it. False
        where the script does not track all that has state: the others have to wait for this worker's loop."""
        with self._changed:
            if self.has_room() or (self.copied is not None and not self.copied.here):
                return True
            if not self._copyable():
                return False
            self.wants_copy, self.copied = True, None
            return True

    def forget_copy(self) -> None:
        """Members changed: what was on its way will not come, and whoever waits for it goes on."""
        with self._changed:
            if self.copied is not None and not self.copied.here:
                self.copied = None
                self._changed.notify_all()

    def has_room(self) -> bool:
        return sum(step_state.total.bytes for step_state in self._kept if step_state.total is not None) <= MOST_BYTES


class Copy:
    """A peer's state after a step, being received on a thread of its own."""

    def __init__(self, transport: Transport, giver: int, index: int, came: Callable[[Copy], None]) -> None:
        self.index, self.here = index, False
        """The step that the state follows, and whether it has arrived."""
        self.declined = False
        """The giver cannot give it."""
        self.error: BaseException | None = None
        self.data = torch.empty(0, dtype=torch.uint8)
        self._transport, self._giver, self._came = transport, giver, came
        self._generation = transport.generation
        concurrency.Thread(target=self._receive, name="paceline-copy", daemon=True).start()

    def _receive(self) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            if self._transport.generation != self._generation:
                raise GenerationOver("members changed")
            self._transport.receive(size, self._giver, 2 * self.index)
            self.declined = int(size) == 0
            self.data = torch.empty(int(size), dtype=torch.uint8)
            if not self.declined:
                self._transport.receive(self.data, self._giver, 2 * self.index + 1)
        except GenerationOver:  # it goes on by itself, or asks again
            self.declined = True
        except BaseException as error:
            self.error = error
        self._came(self)


class Promises:
    """Workers that were promised a copy of this worker's state, and copies on their way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asked: dict[int, int] = {}
        """By rank: after which step it was promised."""
        self._giving: list[concurrency.Thread] = []

    def note(self, step_state: StepState) -> None:
        """Who asked for a copy in this step's round, if this worker is to give it."""
        if step_state.header is not None and peer_to_copy(step_state.header) == self._transport.rank:
            self._asked |= dict.fromkeys(
                np.flatnonzero(step_state.header.column("wants_state")).tolist(), step_state.index
            )

    def give(self, pack: Callable[[], torch.Tensor]) -> None:
        """At the end of a step, the user's own code after it included: send the state to those who were promised it."""
        if self._asked:
            self._answer(pack())

    def decline(self) -> None:
        """This worker has no state that fits: those who asked go on by themselves, or ask again."""
        self._answer(torch.empty(0, dtype=torch.uint8))

    def members_changed(self) -> None:
        """Who waits for a copy was told, and asks again."""
        self._asked = {}

    def join(self) -> None:
        """Until those on their way have come."""
        for thread in self._giving:
            thread.join(timeout=GIVING_S)

    def _answer(self, data: torch.Tensor) -> None:
        for rank, index in self._asked.items():
            args = (self._transport, data, rank, index)
            self._giving.append(concurrency.Thread(target=_give, args=args, name="paceline-give", daemon=True))
            self._giving[-1].start()
        self._asked = {}


def _give(transport: Transport, data: torch.Tensor, to: int, index: int) -> None:
    """The other end of a `Copy`; no data: it is declined."""
    transport.send(torch.tensor([data.numel()], dtype=torch.int64), to, 2 * index)
    if data.numel():
        transport.send(data, to, 2 * index + 1)


def peer_to_copy(header: Header) -> int | None:
    """Who gives its state to those that want one: the first worker that was in time; None when nobody was."""
    able = np.flatnonzero((header.column("wants_state") == 0) & (header.column("behind") == 0))
    return int(able[0]) if able.size else None
