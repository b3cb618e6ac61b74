"""The parts of a loop for rounds with a deadline, and whether its steps may have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint import content as checkpoint
from paceline.step.context import LoopContext
from paceline.step.device import SideStream
from paceline.step.late.catch_up import Promises
from paceline.step.late.deadline_round import WorkInFlight
from paceline.step.late.proxy import Proxy
from paceline.step.members import loop_state, take_loop_state
from paceline.step.step_state import StepState

if TYPE_CHECKING:
    from paceline.step.late.deadline_round import DeadlineRound


class Deadlines:
    """The parts of a loop for rounds that wait for nobody: a proxy, work in flight on the device, and catching up."""

    def __init__(
        self, loop: LoopContext, make_round: Callable[[StepState], DeadlineRound | None], *, copies: bool = True
    ) -> None:
        """Make the parts.

        ``make_round`` makes the round of a step that the proxy opens, and returns None where it has no deadline.
        ``copies``: whether a worker that is far behind may take over a copy of a peer's state.
        """
        if loop.dealing.length is None:
            raise ValueError(
                "rounds with a deadline (pace joint or cutoff) need a dataset with a length: an iterable one cannot "
                "give again what a deadline cut off; use pace adaptive"
            )
        self._loop, self.make_round, self._copies = loop, make_round, copies
        self.side_stream = SideStream(loop.device)
        self.in_flight = WorkInFlight(loop, self.side_stream)
        self.promises = Promises(loop.transport)
        self.commit_s = 0.0
        """The seconds of the last update."""
        self.proxy = Proxy(loop, self)

    def copyable(self) -> bool:
        """Return whether a copy of a peer's state would hold everything that has state."""
        script = self._loop.script
        return self._copies and script.copyable and script.plain and not self._loop.tracking.stepped_untracked()

    def round_over(self) -> None:
        """Note that a round with a deadline has ended: entries of newcomers are spaced by these rounds too."""
        if self._loop.membership is not None:
            self._loop.membership.round_over()

    # -- the loop's course -------------------------------------------------------------------------------------------

    def between_steps(self) -> int | None:
        """Send the copies that were promised, and take over one that has come; return the step that it follows."""
        self._give()
        return self._take_copy()

    def begin(self) -> None:
        """Begin another step on this worker."""
        self.in_flight.clear()
        self.side_stream.follow()

    def end(self) -> None:
        """Send the copies that were promised: the loop has come to its end."""
        self._give()

    def _give(self) -> None:
        self.promises.give(self._packed, after=self._loop.position.next - 1)

    def _packed(self) -> torch.Tensor:
        return checkpoint.pack(loop_state(self._loop))

    def _take_copy(self) -> int | None:
        """Take over a peer's state where one was promised, and with it the peer's position in the training."""
        loop, proxy, backlog = self._loop, self.proxy, self.proxy.backlog
        with loop.training.lock:
            loop.training.lock.wait_for(lambda: proxy.error or backlog.copied is None or backlog.copied.here)
            copy, backlog.copied = backlog.copied, None
        error = proxy.error or (copy.error if copy is not None else None)
        if error is not None:
            raise error
        if copy is None:
            return None
        skipped = copy.index + 1 - loop.position.next
        take_loop_state(loop, checkpoint.unpack(copy.data, device=loop.device))
        assert loop.position.next == copy.index + 1
        text = f"worker {loop.transport.rank} was {skipped} steps behind and took over a peer's state"
        loop.notes.warn(text)
        return copy.index

    # -- newcomers and the end ---------------------------------------------------------------------------------------

    def restart(self, position: Any) -> None:
        """Start a new proxy where a peer's is: this newcomer has taken over the peer's state."""
        self.proxy.stop()
        self.proxy = Proxy(self._loop, self)
        self.proxy.take_position(position)

    def members_changed(self) -> None:
        self.promises.members_changed()
        self.proxy.backlog.forget_copy()

    def close(self, *, orderly: bool) -> None:
        if orderly:
            if self._loop.position.finished:
                self._give()
            self.promises.close()  # whoever takes over a copy does not see the step behind which the script left
            self.promises.join()
        self.proxy.stop_together() if orderly and not self._loop.position.finished else self.proxy.stop()
        if orderly:
            self.proxy.join()


class Allowed:
    """The check, before every plan, whether the plan may have a deadline.

    Where the script or the transport cannot do with deadlines the pace stays adaptive, and the reason is logged once.
    """

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def __call__(self) -> bool:
        """Return whether the next plan may have a deadline."""
        if why := self.why_not():
            self._loop.notes.log_once(f"pace {self._loop.training.pacer.name} stays adaptive: {why}")
        return not why

    def why_not(self) -> str:
        """Return the reason why there may be no deadline; empty when there may be one."""
        loop, transport = self._loop, self._loop.transport
        if loop.dealing.length is None:
            return "an iterable dataset cannot give again what a deadline cut off"
        if transport.backend == "nccl":
            return "rounds over NCCL have a deadline only where pace='joint' asks for one"
        if transport.elastic and loop.device.type == "cuda":
            return "workers with GPUs come and go, and rounds may turn to NCCL"
        if loop.script.own_updates:
            return "step.reduce() gives the gradient to the script, which may need that of the whole batch"
        if loop.gradients.accumulation.refrozen:
            return "parameters were frozen or unfrozen in this loop, which rounds with a deadline cannot follow"
        return ""
