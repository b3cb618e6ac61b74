"""How a worker ends when the fleet has failed: with one line, and without waiting for an engine that is stuck."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from paceline.errors import FLEET_FAILED, FleetError


def end_with_one_line(error: FleetError) -> None:
    """If nobody catches this error, say it in one line: a stack trace would only bury the worker's name."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            previous(kind, raised, trace)
            return
        print(f"paceline: {raised}", file=sys.stderr, flush=True)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(FLEET_FAILED)  # the engine's threads may still be stuck in a broken round: do not wait for them

    sys.excepthook = hook
