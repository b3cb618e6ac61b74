"""The protocol of a combine: how the workers' work merges.

A combine gives out steps, exchanges what was done in one, and commits it. `StepLoop`, `Step`, `Membership` and
training/ call these methods, and nothing else of a combine; training/combines.py lists the combines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.machines.failures import Failures
from paceline.transport.formats import Format

if TYPE_CHECKING:
    from paceline.step.context import LoopContext
    from paceline.step.step import Step
    from paceline.step.step_state import StepState


@dataclass(frozen=True)
class CombineParts:
    """The parts that a combine may need, beside those that the parts of the loop share."""

    models: Sequence[torch.nn.Module]
    failures: Failures | None = None
    """The failures to emulate."""
    lengths: Sequence[int] = ()
    """The samples of an epoch that each worker claims when the epoch opens; empty: they are dealt step by step."""
    first_round: int = 0
    """The number of rounds in the run's loops before this one."""
    wire_format: Format | None = None
    """The format in which parameters travel; None sends them unchanged."""


class Combine(Protocol):
    """The way in which work merges in one loop; ``loop`` has what the parts of the loop share."""

    loop: LoopContext

    @property
    def rounds(self) -> int:
        """Shared updates so far."""

    @property
    def counts_steps(self) -> bool:
        """Whether the dataset's length and the global batch give the number of steps that every worker makes."""

    @property
    def hands_over_state(self) -> bool:
        """Whether a worker's state may have to be taken over by another one."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        """Begin the next step and return it.

        Returns None when the fleet is in a later loop of the script: this newcomer's script must reach that first.
        """

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """Run the step's round; return whether there is a gradient to apply, which then is in ``p.grad``.

        ``own``: code of the user's own comes before the update.
        """

    def commit(self, step: Step, update_began: float) -> None:
        """End the step on this worker; ``update_began`` is a time (perf_counter)."""

    def complete(self) -> None:
        """Complete the last step, which was committed before its device had computed it; mostly there is none.

        Raises NonFiniteGradients, as its own commit would have, when it had nothing to apply and the run is to stop.
        """

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Return a context for a call of all workers: in it the models hold the parameters to evaluate and to save."""

    def shown(self) -> AbstractContextManager[Any]:
        """Return a context in which the models hold the parameters to evaluate and to save."""

    def models_were_set(self) -> None:
        """Go on from other weights than the last round left: a checkpoint was loaded behind this loop."""

    def warn(self, text: str) -> None:
        """Log a warning that all workers that step together have; one of them logs it."""

    def ended(self) -> None:
        """Note that the loop has given out its last step, or was left."""

    def close(self, *, orderly: bool) -> None:
        """End the loop; ``orderly`` is False after an error."""

    def wait_for_threads(self) -> None:
        """Wait, once the transport is closed, for the threads of this loop: the process must not end under them."""

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """The step under way, in which members may change; None once its result is counted."""

    def count_round(self) -> None:
        """Count the open step's round where it is over already: members change before its commit."""

    def members_changed(self, old_ranks: Sequence[int | None]) -> None:
        """Follow a change of members: ``old_ranks`` has the old rank, or None, of each new rank."""

    def newcomer_state(self) -> dict[str, Any]:
        """Return everything that a newcomer needs to be where this worker is at a step boundary."""

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """Take over a peer's `newcomer_state`, and go on where the peer is."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to this worker's present parameters, however far the fleet has gone on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, before the first step, where ``state_dict`` was called."""
