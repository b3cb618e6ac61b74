"""How a worker ends before its script does: on SIGTERM, or when the fleet has failed.

On SIGTERM, which spot machines send before they are taken away, a worker finishes its micro-batch, returns its claims
and leaves. When the fleet has failed, it prints one line, and does not wait for an engine that is stuck.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Protocol

from paceline import concurrency
from paceline.errors import FLEET_FAILED, FleetError

LEFT = 143
"""Exit code of a worker that left because it was asked to, as a shell gives it for SIGTERM: 128 + 15."""


class Leave(SystemExit):
    """The exit of a worker that was asked to leave and has nothing to finish first."""

    def __init__(self) -> None:
        super().__init__(LEFT)


class Leaving(Protocol):
    """The part of a transport that records that this worker was asked to leave."""

    leaving: bool
    at_rest: bool
    """Whether this worker is at no step, so that it may leave at once."""


@contextmanager
def leave_on_sigterm(transport: Leaving) -> Iterator[None]:
    """Make a first SIGTERM in the block let this worker leave after its step; a second one ends it as usual.

    A handler of the user's own stays in place. Nothing changes either on a thread other than the main one, where Python
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


def end_with_one_line(error: FleetError) -> None:
    """Print this error as one line if nobody catches it: a stack trace would only hide the worker's name."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            previous(kind, raised, trace)
            return
        print(f"paceline: {raised}", file=sys.stderr, flush=True)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(FLEET_FAILED)  # does not wait for the engine's threads, which may be stuck in a broken round

    sys.excepthook = hook
