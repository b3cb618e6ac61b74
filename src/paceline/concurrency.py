"""Threads, locks, waits, clocks and the sudden end of a process: the one module through which the library uses them.

Every file writes ``concurrency.Condition()``, ``concurrency.sleep(...)`` or ``concurrency.monotonic()``, and none
imports `threading`, `queue` or the clocks of `time` itself (a test checks this). A test can therefore replace all of
them with `use`: it then owns every thread, every wait and the time, runs complete fleets inside one process in an order
drawn from a seed, and detects a deadlock as soon as there is one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty as Empty
from queue import SimpleQueue as SimpleQueue
from threading import Condition as Condition
from threading import Event as Event
from threading import Lock as Lock
from threading import RLock as RLock
from threading import Thread as Thread
from threading import current_thread as current_thread
from threading import local as local
from threading import main_thread as main_thread
from time import monotonic as monotonic
from time import perf_counter as perf_counter
from time import sleep as sleep
from time import time as time
from typing import Any

end_process = os._exit
"""The function that ends the process at once, with an exit code, where a thread can no longer be freed."""

REPLACED = (
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "SimpleQueue",
    "Thread",
    "current_thread",
    "end_process",
    "local",
    "main_thread",
    "monotonic",
    "perf_counter",
    "sleep",
    "time",
)
"""Names that `use` replaces."""


def before_threads_end(close: Callable[[], None]) -> None:
    """Call ``close`` when the script has ended, before the interpreter waits for threads.

    After that the interpreter starts no thread, and leaving a fleet may need one. A process forked from this one, as
    those of a DataLoader are, does not call it: its parent is still there.
    """
    here = os.getpid()
    threading._register_atexit(lambda: close() if os.getpid() == here else None)  # type: ignore[attr-defined]


@contextmanager
def use(world: Any) -> Iterator[None]:
    """Take threads, locks, waits and clocks from ``world``, an object with the names in `REPLACED`, in the block."""
    before = {name: globals()[name] for name in REPLACED}
    globals().update({name: getattr(world, name) for name in REPLACED})
    try:
        yield
    finally:
        globals().update(before)
