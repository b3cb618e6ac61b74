"""A benchmark that waits for what its processes do, and says on stderr how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: Callable[[], T | None], name: str, *, within_s: float) -> T:
    """What ``what`` gives as soon as it is not None; the benchmark ends when it does not come."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if (value := what()) is not None:
            return value
        time.sleep(0.02)
    raise SystemExit(f"{name} did not come within {within_s:.0f} s")


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
