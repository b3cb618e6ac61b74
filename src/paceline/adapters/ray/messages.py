"""What the driver asks of a worker's actor, and what the actor tells the driver. Plain data, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MARK = "driver.mark"
"""A file in the run's folder: a node that sees the driver's own shares its disk, and the run's log needs no sending."""


@dataclass(frozen=True)
class NodeOrder:
    """One process of a worker."""

    number: int
    called: tuple[str, ...]
    """What follows the interpreter: the script and its arguments, or ``-m``, a module and its arguments."""
    function: bytes | None
    """In place of a script: a function of no arguments, pickled."""
    environment: Mapping[str, str]
    folder: str
    """The driver's working folder: the process's, too, where it exists and Ray brings no other."""
    run_dir: str
    mark: str
    """What the driver's `MARK` holds."""


@dataclass(frozen=True)
class Began:
    """The actor has a node, and its process runs there."""

    node: str
    address: str


@dataclass(frozen=True)
class Printed:
    """Bytes of its stdout (0) or stderr (1)."""

    stream: int
    data: bytes


@dataclass(frozen=True)
class Logged:
    """Whole lines of the run's log on the node, from this byte of the file on."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Ended:
    """The process has ended, and all it wrote was sent; ``value`` is what a function returned, pickled."""

    code: int
    value: bytes = b""


Message = Began | Printed | Logged | Ended
