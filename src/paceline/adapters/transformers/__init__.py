"""Transformers' Trainer on a fleet: `PacelineTrainer` with `PacelineArguments`.

The Trainer runs as if alone, and one step of the fleet is one of its batches. Micro-batches, weights and the round are
Paceline's; clipping, the optimiser, schedules, callbacks, logs and checkpoints stay the Trainer's.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL = "pip install 'paceline[transformers]'"


def check_installed() -> None:
    """Raise ImportError that states what to install, unless Transformers 5 and Accelerate are installed."""
    for package in ("transformers", "accelerate"):
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"paceline.adapters.transformers needs {package}: {INSTALL}") from None
        if package == "transformers":
            check_version(found)


def check_version(found: str) -> None:
    """Raise ImportError unless it is a version 5.

    >>> check_version("5.2.0")
    >>> check_version("4.57.1")
    Traceback (most recent call last):
    ImportError: paceline.adapters.transformers is for Transformers 5, and 4.57.1 is installed: pip install 'paceline[transformers]'
    """  # noqa: E501
    if found.split(".")[0] != "5":
        raise ImportError(f"paceline.adapters.transformers is for Transformers 5, and {found} is installed: {INSTALL}")


check_installed()

from paceline.adapters.transformers.arguments import PacelineArguments  # noqa: E402
from paceline.adapters.transformers.trainer import PacelineTrainer  # noqa: E402

__all__ = ["PacelineArguments", "PacelineTrainer"]
