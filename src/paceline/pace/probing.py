"""When a worker that sits out is tried again: at waits that double, and never at a price that shows.

A worker too slow to help gets no samples, so nothing more is learned about it; it may have become fast again. Now and
then it is therefore given one unit, and let in if that shows it helps. Its first turn comes 8 steps after it was last
seen, and every turn taken in vain doubles the wait. A turn is taken only when the seconds it is expected to add to the
step are at most the fraction ``budget`` of the time since the worker was last seen and since anybody was last tried, so
all tries together cost about that fraction. The exception is the first turn of a worker that had been working: it is
more likely to have stalled than to have become useless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pace.ledger import Ledger
from paceline.records import StepRecord

FIRST_WAIT = 8.0
"""Steps from the last time a worker was seen to its first turn; also the steps of work that earn a free one."""
RETRY = 2.0
"""Steps until a turn that was not taken comes again: the plan for the next step is already made."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Probes:
    """The turns of workers that sit out, by stable identity.

    Changed by records alone, so a plan asks without changing anything.
    """

    def __init__(self, *, budget: float) -> None:
        self.budget = budget
        self._ledger = Ledger(seen=-1.0, turn=-1.0, wait=FIRST_WAIT, tenure=0.0)
        self._last_try = -1

    def observe(self, record: StepRecord) -> None:
        """Note who was seen, and set the next turn of those who sat out or had their turn in this step."""
        book, step = self._ledger, float(record.step)
        book.arrange(record.workers)
        worked = np.fromiter(record.samples, dtype=np.float64, count=len(record.workers)) > 0
        tried = worked & (book["turn"] == step)
        regular = worked & ~tried
        self._last_try = record.step if tried.any() else self._last_try
        _set(book["wait"], tried, 2 * np.maximum(book["wait"], step - book["seen"]))
        _set(book["turn"], tried, step + book["wait"])
        _set(book["tenure"], tried, 0.0)
        _set(book["turn"], ~worked & (book["turn"] >= 0) & (book["turn"] <= step), step + RETRY)
        _set(book["turn"], ~worked & (book["turn"] < 0), step + book["wait"])
        _set(book["turn"], regular, -1.0)
        _set(book["wait"], regular, FIRST_WAIT)
        _set(book["tenure"], regular, book["tenure"] + 1)
        _set(book["seen"], worked | (book["seen"] < 0), step)

    def due(self, workers: tuple[int, ...], step: int, added_s: Floats, step_s: float) -> NDArray[np.intp]:
        """Return the indices of those whose turn comes in this step, the longest unseen first.

        ``added_s`` is what each would add to a step of ``step_s`` seconds.
        """
        seen, turn, wait, tenure = (self._ledger.look_up(name, workers) for name in ("seen", "turn", "wait", "tenure"))
        affordable = added_s <= self.budget * step_s * (step - np.maximum(seen, self._last_try))
        free = (tenure >= FIRST_WAIT) & (wait == FIRST_WAIT)
        due = np.flatnonzero((turn == step) & (affordable | free))
        return due[np.argsort(seen[due], kind="stable")]

    def state_dict(self) -> dict[str, Any]:
        return {**self._ledger.state_dict(), "last_try": self._last_try}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state)
        self._last_try = int(state["last_try"])


def _set(column: Floats, who: Mask, values: Floats | float) -> None:
    np.copyto(column, values, where=who)
