"""Which threads wait inside an engine, and the end of a process in which one of them can no longer be freed.

On a connection that breaks at the wrong moment Gloo may forget to wake a thread that waits for a message. Nothing in
the process can free that thread. The worker then ends, the roster sees that, and the worker can come back.
"""

from __future__ import annotations

import sys
from types import TracebackType

from paceline import concurrency
from paceline.errors import FLEET_FAILED

LEAVE_S = 5.0
"""How long a thread may stay in the engine after its connections were shut."""
SLICE_S = 0.1
"""How often that is looked at: a process that was stopped for long has had no time to leave."""
STUCK = "paceline: a thread of this worker is stuck in Gloo after its connections were shut; it ends, and can come back"


class EngineWait:
    """One wait of one thread, while it is entered."""

    __slots__ = ("_waits", "since")

    def __init__(self, waits: set[EngineWait]) -> None:
        self._waits, self.since = waits, 0.0

    def __enter__(self) -> None:
        self.since = concurrency.monotonic()
        self._waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waits.discard(self)


class EngineWaits:
    """The waits of one group's threads inside its engine."""

    def __init__(self) -> None:
        self._waits: set[EngineWait] = set()

    def inside(self) -> EngineWait:
        """Return a context in which this thread counts as waiting."""
        return EngineWait(self._waits)

    def longest_s(self) -> float:
        """Return the seconds for which a thread has been in one wait; 0 when none waits."""
        now = concurrency.monotonic()
        return max((now - wait.since for wait in self._waits.copy()), default=0.0)

    def end_if_stuck(self) -> None:
        """End the process when a thread that waits now is in the same wait after `LEAVE_S`; returns at once."""
        if stuck := self._waits.copy():
            concurrency.Thread(target=self._watch, args=(stuck,), name="paceline-stuck", daemon=True).start()

    def _watch(self, stuck: set[EngineWait]) -> None:
        for _ in range(round(LEAVE_S / SLICE_S)):
            concurrency.sleep(SLICE_S)
            stuck &= self._waits
            if not stuck:
                return
        print(STUCK, file=sys.stderr, flush=True)
        concurrency.end_process(FLEET_FAILED)
