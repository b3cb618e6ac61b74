"""Whether a loop's steps may have a deadline, where the pace can do without (auto)."""

from __future__ import annotations

from paceline.loop.context import LoopContext


class Allowed:
    """Asked before every plan. What a deadline would need, and adaptive does not, is a reason for none: it is said once
    in the run's log, and the pace stays adaptive."""

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def __call__(self) -> bool:
        """Whether the next plan may have a deadline."""
        if why := self.why_not():
            self._loop.say_once(f"pace {self._loop.training.pacer.name} stays adaptive: {why}")
        return not why

    def why_not(self) -> str:
        """The reason for no deadline; empty when there may be one."""
        loop, transport = self._loop, self._loop.transport
        if loop.dealing.length is None:
            return "an iterable dataset cannot give again what a deadline cut off"
        if transport.backend == "nccl":
            return "rounds over NCCL have a deadline only where pace='joint' asks for one"
        if transport.elastic and loop.device.type == "cuda":
            return "workers with GPUs come and go, and rounds may turn to NCCL"
        if loop.own_updates:
            return "step.combine() gives the gradient to the script, which may need that of the whole batch"
        if loop.gradients.accumulation.refrozen:
            return "parameters were frozen or unfrozen in this loop, which rounds with a deadline cannot follow"
        return ""
