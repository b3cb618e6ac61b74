"""Emulated failures of a worker (``--failures``): rounds in which it does not train or exchange, and its return."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.combine.averaging.merging import copies
from paceline.machines.failures import Failures, Trouble


class EmulatedOutages:
    """Of one worker."""

    def __init__(self, failures: Failures | None, parameters: Sequence[torch.Tensor]) -> None:
        self._failures, self._parameters = failures, parameters
        self._initial = copies(parameters) if failures else []
        self._stale: list[torch.Tensor] = []

    def at(self, *, worker: int, round: int) -> Trouble:
        return Trouble() if self._failures is None else self._failures.at(worker=worker, round=round)

    @torch.no_grad()
    def come_back(self, trouble: Trouble, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """A period begins: a worker that returns has the parameters that its trouble left it, and a new optimiser."""
        if self._failures is None:
            return
        if trouble.returns_with is not None:
            source = self._initial if trouble.returns_with == "initial" or not self._stale else self._stale
            for parameter, value in zip(self._parameters, source, strict=True):
                parameter.data.copy_(value)
            for optimizer in optimizers:
                make_new(optimizer)
        if trouble.exchanges:
            self._stale = copies(self._parameters)


def make_new(optimizer: torch.optim.Optimizer) -> None:
    """As it was before its first step: without moments, and with a count of 0 where it counts steps by group."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), int):
            group["step"] = 0
