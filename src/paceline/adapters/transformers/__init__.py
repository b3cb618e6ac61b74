"""Transformers' Trainer on a fleet: `PacelineTrainer` with `PacelineArguments`.

The Trainer believes that it is alone, and that one step of the fleet is one batch. Micro-batches, weights and the round
are Paceline's; clipping, the optimiser, schedules, callbacks, logs and checkpoints stay the Trainer's.
"""

from paceline.adapters.transformers.versions import check_installed

check_installed()

from paceline.adapters.transformers.arguments import PacelineArguments  # noqa: E402
from paceline.adapters.transformers.trainer import PacelineTrainer  # noqa: E402

__all__ = ["PacelineArguments", "PacelineTrainer"]
