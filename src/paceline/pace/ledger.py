"""Per-worker numbers keyed by stable identity, held as arrays in rank order.

Workers come and go and change rank; their numbers stay theirs. The rows of those present come first, in rank order, so
the usual step (nobody came, nobody left) works on whole arrays without a look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

KEEP_ABSENT = 1000
"""The most workers that left and are remembered, the latest to leave first."""


class Ledger:
    """Columns of float64 by name, one row per worker; a new worker's row holds the defaults.

    >>> ledger = Ledger(speed=1.0)
    >>> ledger.arrange((7, 9))
    True
    >>> ledger["speed"][:] = [2.0, 3.0]
    >>> ledger.arrange((9, 5)), ledger["speed"].tolist()
    (True, [3.0, 1.0])
    """

    def __init__(self, **defaults: float) -> None:
        self._defaults = defaults
        self._columns: dict[str, Floats] = {name: np.empty(0) for name in defaults}
        self._here = self._columns
        """The columns' first rows, of the workers present."""
        self._workers: tuple[int, ...] = ()
        self._present: tuple[int, ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        return self._present

    def __getitem__(self, name: str) -> Floats:
        """Return the column of the workers present, in rank order; writing into it changes the ledger."""
        return self._here[name]

    def everybody(self, name: str) -> Floats:
        """Return the column with those that left behind those present; writing into it changes the ledger."""
        return self._columns[name]

    def met(self, workers: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return who of these was ever present, and is remembered."""
        return self._rows(workers) >= 0

    def misses(self, workers: tuple[int, ...]) -> bool:
        """Return whether somebody who was once present is not among these."""
        return not set(self._workers) <= set(workers)

    def arrange(self, workers: tuple[int, ...]) -> bool:
        """Make ``workers`` the ones present, in this order; True when that changed anything."""
        if workers is self._present or workers == self._present:
            return False
        here = set(workers)
        absent = tuple(w for w in self._workers if w not in here)[:KEEP_ABSENT]
        rows = self._rows(workers + absent)
        self._columns = {name: self._take(name, rows) for name in self._defaults}
        self._present, self._workers = workers, workers + absent
        self._note_present()
        return True

    def _note_present(self) -> None:
        self._here = {name: column[: len(self._present)] for name, column in self._columns.items()}

    def look_up(self, name: str, workers: tuple[int, ...]) -> Floats:
        """Return the column for any workers, in their order; changes nothing."""
        if workers is self._present or workers == self._present:
            return self[name].copy()
        return self._take(name, self._rows(workers))

    def _rows(self, workers: tuple[int, ...]) -> NDArray[np.intp]:
        """Return the row of each worker; -1 for one never met."""
        row = {worker: index for index, worker in enumerate(self._workers)}
        return np.fromiter((row.get(worker, -1) for worker in workers), dtype=np.intp, count=len(workers))

    def _take(self, name: str, rows: NDArray[np.intp]) -> Floats:
        return np.append(self._columns[name], self._defaults[name])[rows]

    def state_dict(self) -> dict[str, Any]:
        columns = {name: column.tolist() for name, column in self._columns.items()}
        return {"workers": list(self._workers), "present": len(self._present), "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._workers = tuple(int(worker) for worker in state["workers"])
        self._present = self._workers[: int(state["present"])]
        rows = len(self._workers)
        saved = state["columns"]
        self._columns = {
            name: np.array(saved.get(name, [default] * rows), dtype=np.float64)
            for name, default in self._defaults.items()
        }
        self._note_present()
