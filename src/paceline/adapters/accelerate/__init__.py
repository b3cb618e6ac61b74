"""Accelerate's own loop on a fleet: ``from paceline.adapters.accelerate import Accelerator``, and nothing else changes.

A prepared loader yields this worker's micro-batches of one step of the fleet after the other. A prepared optimizer and
scheduler do nothing until the step's last micro-batch, as Accelerate's own do while gradients accumulate; then the
round runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL = "pip install 'paceline[accelerate]'"


def check_version(found: str) -> None:
    """Raise ImportError unless it is a version 1.

    >>> check_version("1.15.0")
    >>> check_version("0.34.2")
    Traceback (most recent call last):
    ImportError: paceline.adapters.accelerate is for Accelerate 1, and 0.34.2 is installed: pip install 'paceline[accelerate]'
    """  # noqa: E501
    if found.split(".")[0] != "1":
        raise ImportError(f"paceline.adapters.accelerate is for Accelerate 1, and {found} is installed: {INSTALL}")


try:
    check_version(version("accelerate"))
except PackageNotFoundError:
    raise ImportError(f"paceline.adapters.accelerate needs Accelerate: {INSTALL}") from None

from paceline.adapters.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
