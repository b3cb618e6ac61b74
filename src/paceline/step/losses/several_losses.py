"""Several losses a micro-batch, each for models of its own: ``step.backward(loss, models=...)``.

A part is one such backward pass: the loss's gradient reaches the trained parameters of these models and of no others.
The round divides every parameter's sum by one weight, the fleet's total. So that the result is the mean that one
machine would have, three rules hold: the parts of a micro-batch have one weight, no parameter is in two of them, and
all micro-batches of a step, on every worker, have parts for the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.errors import MisuseError

ADVICE = (
    "for one set of parameters add the losses, step.backward(a + b); for models with a loss each (a GAN) give each "
    "its own, step.backward(loss, models=generator), or train them in steps by turns: docs/sharding.md"
)


def parameters_of(models: Any, ours: Iterable[torch.nn.Parameter]) -> frozenset[int]:
    """Return the ids of the trained parameters of one module or several, all of which must be the fleet's."""
    modules = [models] if isinstance(models, torch.nn.Module) else list(models)
    wrong = [type(module).__name__ for module in modules if not isinstance(module, torch.nn.Module)]
    if wrong:
        raise ValueError(f"step.backward(models=...) takes modules that fleet.model returned, got {wrong[0]}")
    known = {id(parameter) for parameter in ours}
    asked = [parameter for module in modules for parameter in module.parameters()]
    if any(id(parameter) not in known for parameter in asked):
        raise ValueError(
            "step.backward(models=...) has parameters that are not the fleet's: give modules that fleet.model "
            "returned, or parts of them"
        )
    trained = frozenset(id(parameter) for parameter in asked if parameter.requires_grad)
    if not trained:
        raise ValueError("step.backward(models=...) names no parameter that is trained: all of them are frozen")
    return trained


class Parts:
    """The parts of one step's micro-batches on this worker."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.given: frozenset[int] = frozenset()
        """Parameters, by id, that had their part of the present micro-batch."""
        self._weight: Any = None
        self._alike: frozenset[int] | None = None
        """What the step's first micro-batch trained; the empty set: everything, in one backward or in parts."""
        self._all: set[frozenset[int]] = set()
        """All parts of the step, by what they were for."""

    @property
    def partial(self) -> bool:
        """Whether this worker left models out of the step."""
        return bool(self._alike)

    def choose(
        self, models: Any, ours: Iterable[torch.nn.Parameter], weight: Any, *, used: bool
    ) -> frozenset[int] | None:
        """Return the parameters of the part that is to be done now; None: of every model, in one backward."""
        if models is None:
            if used:
                raise MisuseError(
                    f"step.backward(loss) after step.backward(loss, models=...) in one micro-batch of step "
                    f"{self._index}: {ADVICE}"
                )
            return None
        chosen = parameters_of(models, ours)
        if chosen & self.given:
            raise MisuseError(
                f"step.backward(models=...) came twice for the same parameters in one micro-batch of step "
                f"{self._index}: {ADVICE}"
            )
        if used and weight is not self._weight and float(weight) != float(self._weight):
            raise ValueError(
                f"the backward passes of one micro-batch have unlike weights, {float(self._weight):g} and "
                f"{float(weight):g}, and the round divides by one: give them the same weight, and scale a loss itself"
            )
        self._weight = weight
        return chosen

    def add(self, chosen: frozenset[int]) -> None:
        self.given |= chosen
        self._all.add(chosen)

    def drop(self) -> None:
        """Forget the parts of a micro-batch that comes again."""
        self.given = frozenset()

    def close(self, trained: Sequence[torch.nn.Parameter], *, counts: bool) -> None:
        """End the micro-batch; ``counts``: it has a gradient."""
        given, self.given = self.given, frozenset()
        if not counts:
            return
        given = frozenset() if given and given.issuperset(map(id, trained)) else given
        if self._alike is None:
            self._alike = given
        elif given != self._alike:
            raise MisuseError(
                f"the micro-batches of step {self._index} trained unlike models, so that a mean over all of them would "
                "be too small for some: give every micro-batch of a step its backward for the same models, and train "
                "others in other steps"
            )

    def check_commit(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Check that the optimisers of a commit update all models for which there was a loss."""
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group}
        if any(updated.isdisjoint(part) for part in self._all):
            raise MisuseError(
                f"step {self._index} had a step.backward(loss, models=...) for models that no optimizer of step.commit "
                "updates, so their gradient would be lost: give step.commit the optimizers of all of them"
            )

    def check_round(self, trained: Sequence[torch.nn.Parameter], used: Sequence[float]) -> None:
        """After the round: nobody may have trained what this worker left out. ``used``: by parameter, how many did."""
        mine = self._alike
        if mine and any(n > 0 and id(p) not in mine for p, n in zip(trained, used, strict=True)):
            raise MisuseError(
                f"in step {self._index} other workers trained models that this one left out of step.backward(models="
                "...): choose by step.index, which is the same on every worker, not by a count of micro-batches"
            )


def check_together(loss: torch.Tensor, weight: Any, models: Any) -> None:
    """Raise MisuseError where a loss, in a worker of several processes, cannot go backward through the whole model."""
    if models is not None:
        raise MisuseError(
            "step.backward(models=...) in a worker of several processes: each loss goes backward through all of a "
            "sharded model; add the losses up and call step.backward once"
        )
    if not isinstance(weight, torch.Tensor) and weight == 0 and not bool(loss.detach().isfinite()):
        raise MisuseError(
            "a micro-batch of weight 0 has a loss that is not finite (a mean over nothing?), and in a worker of "
            "several processes it goes backward all the same: give a finite loss, such as total / max(count, 1)"
        )
