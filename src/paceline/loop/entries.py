"""How often newcomers may enter: a round waits until the last of them has its state, so an entry is a pause for all.

After an entry that cost a pause of p seconds the next one waits for ``p (1 / PART - 1)`` seconds more, so that entries
take no more than the fraction `PART` of the time; whoever comes meanwhile enters with the others, in one pause.
"""

from __future__ import annotations

PART = 0.2
MOST_S = 60.0
"""Nobody waits longer than this to enter: what the script did before its next step may look like a pause."""
RATE = 0.2
"""Weight of the newest step in the usual seconds of one."""


class Entries:
    """Told of every round's end and of every entry, in seconds of one clock."""

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._last_s: float | None = None
        self._opened_s: float | None = None
        self._until_s = float("-inf")

    def may_open(self, now_s: float) -> bool:
        """Whether those who wait may enter after the next round."""
        return now_s >= self._until_s

    def opened(self, now_s: float) -> None:
        """An entry has begun."""
        if self._opened_s is None:
            self._opened_s = now_s

    def round_over(self, now_s: float) -> None:
        """A round of all members has ended, the first one after an entry included."""
        if self._opened_s is not None:
            pause_s = max(0.0, now_s - self._opened_s - (self._usual_s or 0.0))
            self._until_s = now_s + min(MOST_S, pause_s * (1 / PART - 1))
        elif self._last_s is not None:
            took_s = now_s - self._last_s
            self._usual_s = took_s if self._usual_s is None else self._usual_s + RATE * (took_s - self._usual_s)
        self._last_s, self._opened_s = now_s, None
