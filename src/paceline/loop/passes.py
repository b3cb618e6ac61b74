"""Which loop of the script a call of ``fleet.steps`` is, and how often each dataset was gone through before it.

A script may call ``fleet.steps`` once, once an epoch, or phase after phase on other data. Loops are numbered in the
order of the calls and datasets in the order of their first use, the same on every worker. A loop over a dataset goes on
where the last one over it ended: with another epoch, hence another shuffle and other noise. The second and later
datasets have a seed of their own, so that one made anew for every loop is shuffled anew too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.feed import key
from paceline.loop.call_results import CallResults


@dataclass(frozen=True)
class LoopPlace:
    """A loop among the script's loops."""

    loop: int
    """Loops before it, also those before a restart."""
    data: int
    """Its dataset's number."""
    first_epoch: int

    def seed(self, seed: int) -> int:
        """Of the loop's shuffles and noise.

        >>> LoopPlace(0, 0, 0).seed(7), LoopPlace(1, 0, 1).seed(7), LoopPlace(2, 1, 0).seed(7) == 7
        (7, 7, False)
        """
        return seed if self.data == 0 else key(seed, self.data)


class Passes:
    """Counts loops, and passes over each dataset; and what else a script that makes its loops again needs to know."""

    def __init__(self) -> None:
        self.lengths: list[int | None] = []
        """Of the datasets, loop by loop."""
        self.call_results = CallResults()
        """Of calls between loops."""
        self.saves = 0
        """Calls of ``fleet.save`` since the last loop ended."""
        self._next = 0
        self._counts: list[int] = []
        self._datasets: list[Callable[[], Any]] = []

    def place(self, dataset: Any) -> LoopPlace:
        """What the next loop is, if it goes over this dataset."""
        known = (number for number, one in enumerate(self._datasets) if one() is dataset)
        number = next(known, len(self._datasets))
        return LoopPlace(self._next, number, self._counts[number] if number < len(self._counts) else 0)

    def begin(self, place: LoopPlace, dataset: Any, length: int | None) -> None:
        """The next loop begins there."""
        self.recognise(dataset, place.data)
        self._next = place.loop + 1
        self.lengths[place.loop :] = [length]
        self.saves = 0

    def note(self, place: LoopPlace, passes: int) -> None:
        """So many passes over the loop's dataset have begun, in this loop and before."""
        self._counts[place.data] = passes

    def continue_from(self, state: Mapping[str, Any], *, loop: int) -> None:
        """Take over saved counts; the next call is loop ``loop``, whatever was called before."""
        self.load_state_dict(state)
        self._next = loop

    def recognise(self, dataset: Any, number: int) -> None:
        """This is the dataset of that number."""
        self._make_room(number + 1)
        self._datasets[number] = _reference(dataset)

    def state_dict(self) -> dict[str, Any]:
        counts, lengths = list(self._counts), list(self.lengths)
        return {"counts": counts, "lengths": lengths, "told": self.call_results.to_list(), "saves": self.saves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = list(state["counts"])
        self.lengths, self.saves = list(state["lengths"]), state["saves"]
        self.call_results = CallResults(state["told"])
        self._counts = counts + self._counts[len(counts) :]
        self._make_room(len(self._counts))

    def _make_room(self, size: int) -> None:
        """For so many datasets; those beyond the ones known here were used before a restart."""
        self._counts += [0] * (size - len(self._counts))
        self._datasets += [_unknown] * (size - len(self._datasets))


def _unknown() -> None:
    """Of a dataset that this process has not seen."""


def _reference(dataset: Any) -> Callable[[], Any]:
    """Knows the dataset again, and keeps it alive only where there is no other way: an address may be used again."""
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list or a tuple
        return lambda: dataset
