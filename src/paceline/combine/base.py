"""What a combine is: how the workers' work merges, as the loop over the steps asks for it.

A combine gives out steps, exchanges what was done in one, and commits it. `Steps` (loop/steps.py) calls it and knows
nothing else of it; which combines there are stands in choose.py.
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
    from paceline.loop.context import LoopContext
    from paceline.loop.step import Step
    from paceline.loop.step_state import StepState


@dataclass(frozen=True)
class CombineParts:
    """What a combine may be made of, beside what the parts of the loop share."""

    models: Sequence[torch.nn.Module]
    failures: Failures | None = None
    """Those to emulate."""
    lengths: Sequence[int] = ()
    """How much of an epoch each worker claims when it opens; empty: it is dealt as it goes."""
    first_round: int = 0
    """Rounds of the run's loops before this one."""
    form: Format | None = None
    """Of parameters on the wire; None: as they are."""


class Combine(Protocol):
    """How work merges in one loop. It holds what the parts of the loop share as ``loop``."""

    loop: LoopContext

    @property
    def rounds(self) -> int:
        """Shared updates so far."""

    @property
    def counts_steps(self) -> bool:
        """Whether every worker makes as many steps as the dataset and the global batch say."""

    @property
    def hands_over_state(self) -> bool:
        """Whether a worker's state may have to be taken over by another one."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self) -> Step | None:
        """The next step. None: the fleet is in a later loop of the script, which this newcomer has to come to first."""

    def exchange(self, step: Step, clip_norm: float | None, *, own: bool) -> bool:
        """Run the step's round; True when there is a gradient to apply, which then is in ``p.grad``. ``own``: code of
        the user's own comes before the update."""

    def commit(self, step: Step, updated: float) -> None:
        """The step is over on this worker; ``updated``: since when the update was under way."""

    # -- between steps -------------------------------------------------------------------------------------------------

    def meet(self, label: str) -> AbstractContextManager[Any]:
        """Everybody comes to this call; in the context the parameters are those to show."""

    def shown(self) -> AbstractContextManager[Any]:
        """In the context the parameters are those to show and to save."""

    def models_were_set(self) -> None:
        """A checkpoint was loaded behind this loop: the models have other weights than its last round left."""

    def warn(self, text: str) -> None:
        """A warning that all who step together have: one of them tells it."""

    def ended(self) -> None:
        """The loop has given out its last step, or was left."""

    def close(self, *, orderly: bool) -> None:
        """End the loop. ``orderly``: not because of an error."""

    def wait_for_threads(self) -> None:
        """Once the transport is closed: the process must not end under a thread of this loop."""

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepState | None:
        """The step under way, unless what it did is counted: members may change in the middle of it."""

    def members_changed(self, kept: Sequence[int | None]) -> None:
        """By new rank, ``kept`` says who the members were."""

    def whole_state(self) -> dict[str, Any]:
        """At a step boundary: everything that a newcomer needs to be where this worker is."""

    def take_over(self, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
        """A peer's `whole_state`: this worker goes on where the peer is."""

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to the parameters as they are on this worker, however far the fleet has gone on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; before the first step."""
