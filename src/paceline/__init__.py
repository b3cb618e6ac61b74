"""Paceline trains one PyTorch model on machines that are not alike, at the sum of their speeds.

>>> import paceline
>>> with paceline.join(quiet=True) as fleet:        # doctest: +SKIP
...     model = fleet.model(Net())
...     for step in fleet.steps(dataset, global_batch=256, micro_batch="auto"):
...         for x, y in step:
...             step.backward(loss_fn(model(x), y))
...         step.commit(optimizer)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import research as research
    from paceline.averaging.weighted_average import Averaging, Outer
    from paceline.errors import (
        CallMismatch,
        FleetError,
        LoaderDied,
        MisuseError,
        NonFiniteGradients,
        PacelineError,
        WorkerFailed,
        WorkerLost,
    )
    from paceline.fleet import Fleet, join
    from paceline.launcher.functions import launch
    from paceline.pace import Adaptive, Auto, Epoch, Equal, Fixed, Joint
    from paceline.records import History, Plan, StepRecord
    from paceline.step.step import Step
    from paceline.step.steps import Steps

__version__ = "0.2.0"

__all__ = [
    "Adaptive",
    "Auto",
    "Averaging",
    "CallMismatch",
    "Epoch",
    "Equal",
    "Fixed",
    "Fleet",
    "FleetError",
    "History",
    "Joint",
    "LoaderDied",
    "MisuseError",
    "NonFiniteGradients",
    "Outer",
    "PacelineError",
    "Plan",
    "Step",
    "StepRecord",
    "Steps",
    "WorkerFailed",
    "WorkerLost",
    "join",
    "launch",
]

_ROOMS = {
    "averaging.weighted_average": ("Averaging", "Outer"),
    "errors": (
        "CallMismatch",
        "FleetError",
        "LoaderDied",
        "MisuseError",
        "NonFiniteGradients",
        "PacelineError",
        "WorkerFailed",
        "WorkerLost",
    ),
    "fleet": ("Fleet", "join"),
    "launcher.functions": ("launch",),
    "step.steps": ("Steps",),
    "pace": ("Adaptive", "Auto", "Epoch", "Equal", "Fixed", "Joint"),
    "records": ("History", "Plan", "StepRecord"),
    "step.step": ("Step",),
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: the command line answers ``--help`` without loading torch."""
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"paceline.{room}"), name)
    if name == "research":
        return import_module("paceline.research")
    moved = ": since 0.2 it is paceline.research." + name if name in ("Cutoff", "ElasticAverage") else ""
    raise AttributeError(f"module 'paceline' has no attribute {name!r}{moved}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
