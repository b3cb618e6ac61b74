"""A check that modules stay as they are between two updates: an average of weights by hand moves once per update.

In Accelerate's loop the script's own code runs once per micro-batch, and workers have unlike numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.errors import MisuseError
from paceline.step.checks.sameness import is_readable, sampled_number
from paceline.training.untracked import named_in_script

WATCHED = 3
"""Steps at the beginning of a loop in which modules are looked at."""


class ModulesBetweenUpdates:
    """The modules of the script that are not trained, as they were when it got a micro-batch."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        """Look at all modules but parts of these ``models``."""
        trained = {id(parameter) for model in models for parameter in model.parameters()}
        self._found: dict[str, tuple[Sequence[torch.Tensor], tuple[int, int]]] = {}
        for name, thing in named_in_script():
            if isinstance(thing, torch.nn.Module):
                own = [
                    p for p in thing.parameters() if id(p) not in trained and is_readable(p) and not p.is_inference()
                ]
                if own:
                    self._found[name] = own, _state_of(own)

    def check(self) -> None:
        """Raise MisuseError for a module whose parameters have changed since."""
        for name, (parameters, state) in self._found.items():
            if _state_of(parameters) != state:
                raise MisuseError(
                    f"{name} was changed in a micro-batch that is not the last of its update, and workers have unlike "
                    "numbers of them: write `if accelerator.sync_gradients:` before what changes it, so that it runs "
                    "once per update"
                )


def _state_of(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return numbers that change with the parameters; torch counts no change through ``p.data``."""
    return sum(parameter._version for parameter in parameters), sampled_number(parameters)
