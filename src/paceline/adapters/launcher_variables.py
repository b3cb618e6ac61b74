"""Variables of the launcher by which Accelerate would find other processes, and make a group of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.transport import MPI_SIZES

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MPI_SIZES)
"""Names of the variables."""


@contextmanager
def as_if_alone(**variables: str) -> Iterator[None]:
    """Hide other processes from the environment meanwhile, and set these variables."""
    hidden = {*LAUNCHER, *variables}
    before = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in hidden:
            os.environ.pop(name, None)
        os.environ.update(before)
