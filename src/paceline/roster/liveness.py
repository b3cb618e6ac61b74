"""Is a silent worker to be given up? From how long, how long it may be, and what its process does."""

from __future__ import annotations

from paceline.roster.process import Look

LOOK_S = 0.5
"""Silent for so long, a worker's process is looked at."""
HOLDING_S = 120.0
"""How long a process that computes, or waits for a processor, may keep its beats back."""

FINE, BUSY, FROZEN, GONE = "fine", "busy", "frozen", "gone"


class Silence:
    """One stretch of a worker's silence, judged again and again while it lasts."""

    def __init__(self, look: Look) -> None:
        self._ticks = look.ticks
        """Processor time of its process at the beginning, and then at each verdict."""
        self._due_s = 0.0
        """Seconds of silence before which there is nothing new to judge."""

    def judge(self, silent_s: float, *, patience_s: float, look: Look) -> str:
        """After ``silent_s`` seconds: fine, busy (waited for, and named), frozen or gone (given up)."""
        if look.gone:
            return GONE
        if silent_s < max(patience_s, self._due_s):
            return FINE
        computes = look.ticks is not None and self._ticks is not None and look.ticks > self._ticks
        if look.stopped or not (computes or look.ready) or silent_s > HOLDING_S:
            return FROZEN
        self._ticks, self._due_s = look.ticks, silent_s + patience_s
        return BUSY
