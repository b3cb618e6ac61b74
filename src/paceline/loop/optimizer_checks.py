"""Optimisers that are given to ``step.commit``: refused where replicas would drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import MisuseError
from paceline.loop.user_code import refuse_closures

if TYPE_CHECKING:
    from paceline.loop.context import LoopContext


class OptimizerChecks:
    """Of one loop. Each optimiser is looked at once."""

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop
        self._checked: set[int] = set()

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError for an optimiser of parameters that are not the fleet's, MisuseError for one that is not
        tracked where workers come and go."""
        for optimizer in optimizers:
            if id(optimizer) in self._checked:
                continue
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(f"step.commit takes optimizers, got {type(optimizer).__name__}")
            refuse_closures(optimizer)
            ours = {id(parameter) for parameter in self._loop.gradients.everything}
            groups = (group["params"] for group in optimizer.param_groups)
            if any(id(parameter) not in ours for group in groups for parameter in group):
                raise ValueError(
                    "the optimizer has parameters that are not in fleet.model(...): build it from the module that "
                    "fleet.model returns"
                )
            self._checked.add(id(optimizer))
        if self._loop.transport.elastic:
            self._refuse_untracked(optimizers)

    def _refuse_untracked(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """``optimizers`` of this commit; those that the script stepped itself were seen doing so."""
        tracking = self._loop.tracking
        for optimizer in (*optimizers, *tracking.stepped_untracked()):
            if not tracking.is_tracked(optimizer):
                raise MisuseError(
                    f"the optimizer ({type(optimizer).__name__}) is not tracked, so a worker that joins could not take "
                    "over its state: call fleet.track(optimizer=optimizer) before the first step"
                )
