"""SIGTERM, as spot machines send it: finish the micro-batch, return the claims, leave."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from paceline import concurrency

LEFT = 143
"""Exit code of a worker that left because it was asked to, as a shell gives it: 128 + 15."""


class Leave(SystemExit):
    """This worker was asked to leave, and holds nothing that it would have to finish first."""

    def __init__(self) -> None:
        super().__init__(LEFT)


class Leaving(Protocol):
    """The transport, as far as it hears that this worker was asked to leave."""

    leaving: bool
    at_rest: bool
    """This worker is at no step: it may leave at once."""


@contextmanager
def leave_on_sigterm(transport: Leaving) -> Iterator[None]:
    """Inside, a first SIGTERM makes this worker leave after its step; a second one ends it as usual.

    A handler of the user's own is left alone, and so is a worker that does not run on the main thread, where Python
    handles no signals.
    """
    if (
        concurrency.current_thread() is not concurrency.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        transport.leaving = True
        if transport.at_rest:
            raise Leave

    signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
