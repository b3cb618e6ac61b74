"""Which loop of the script a call of ``fleet.steps`` is, and how often each dataset was gone through before it.

A script may call ``fleet.steps`` once, once an epoch, or phase after phase on other data. Loops are numbered in the
order of the calls and datasets in the order of their first use, the same on every worker. A loop over a dataset goes on
where the last one over it ended: with another epoch, hence another shuffle and other noise. The second and later
datasets have a seed of their own, so that one made anew for every loop is shuffled anew too.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from paceline.feed import key
from paceline.loop.resume import LARGE

MOST = 10_000
"""Numbers in a result that is remembered: more would swell every checkpoint."""


@dataclass(frozen=True)
class Place:
    """A loop among the script's loops."""

    loop: int
    """Loops before it, also those before a restart."""
    data: int
    """Its dataset's number."""
    first_epoch: int

    def seed(self, seed: int) -> int:
        """Of the loop's shuffles and noise.

        >>> Place(0, 0, 0).seed(7), Place(1, 0, 1).seed(7), Place(2, 1, 0).seed(7) == 7
        (7, 7, False)
        """
        return seed if self.data == 0 else key(seed, self.data)


class Passes:
    """Counts loops, and passes over each dataset; and what else a script that makes its loops again needs to know."""

    def __init__(self) -> None:
        self.lengths: list[int | None] = []
        """Of the datasets, loop by loop."""
        self.told: list[list[Any]] = []
        """What calls between loops gave: ``[call, result]``."""
        self.saves = 0
        """Calls of ``fleet.save`` since the last loop ended."""
        self._next = 0
        self._counts: list[int] = []
        self._datasets: list[Callable[[], Any]] = []

    def place(self, dataset: Any) -> Place:
        """What the next loop is, if it goes over this dataset."""
        known = (number for number, one in enumerate(self._datasets) if one() is dataset)
        number = next(known, len(self._datasets))
        return Place(self._next, number, self._counts[number] if number < len(self._counts) else 0)

    def begin(self, place: Place, dataset: Any, length: int | None) -> None:
        """The next loop begins there."""
        self.recognise(dataset, place.data)
        self._next = place.loop + 1
        self.lengths[place.loop :] = [length]
        self.saves = 0

    def note(self, place: Place, passes: int) -> None:
        """So many passes over the loop's dataset have begun, in this loop and before."""
        self._counts[place.data] = passes

    def remember(self, call: str, result: Any) -> None:
        """What a call between loops gave."""
        self.told.append([call, LARGE if _size(result) > MOST else deepcopy(result)])

    def go_on_after(self, state: Mapping[str, Any], *, loop: int) -> None:
        """Take over saved counts; the next call is loop ``loop``, whatever was called before."""
        self.load_state_dict(state)
        self._next = loop

    def recognise(self, dataset: Any, number: int) -> None:
        """This is the dataset of that number."""
        self._make_room(number + 1)
        self._datasets[number] = _reference(dataset)

    def state_dict(self) -> dict[str, Any]:
        counts, told = list(self._counts), [list(entry) for entry in self.told]
        return {"counts": counts, "lengths": list(self.lengths), "told": told, "saves": self.saves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = list(state["counts"])
        self.lengths, self.told, self.saves = list(state["lengths"]), list(state["told"]), state["saves"]
        self._counts = counts + self._counts[len(counts) :]
        self._make_room(len(self._counts))

    def _make_room(self, size: int) -> None:
        """For so many datasets; those beyond the ones known here were used before a restart."""
        self._counts += [0] * (size - len(self._counts))
        self._datasets += [_unknown] * (size - len(self._datasets))


def told_to_json(told: list[list[Any]]) -> str:
    """For a worker that passes these loops by.

    >>> told_from_json(told_to_json([["evaluate", {"right": 3.0, "table": torch.ones(2)}]]))[0][1]["table"]
    tensor([1., 1.], dtype=torch.float64)
    """
    return json.dumps(told, default=lambda table: {"table": table.tolist()})


def told_from_json(text: str) -> list[list[Any]]:
    def table(part: dict[str, Any]) -> Any:
        return torch.tensor(part["table"], dtype=torch.float64) if set(part) == {"table"} else part

    return list(json.loads(text, object_hook=table)) if text else []


def _size(result: Any) -> int:
    """Numbers in a call's result."""
    values = result.values() if isinstance(result, Mapping) else [result]
    return sum(int(getattr(value, "numel", lambda: 1)()) for value in values)


def _unknown() -> None:
    """Of a dataset that this process has not seen."""


def _reference(dataset: Any) -> Callable[[], Any]:
    """Knows the dataset again, and keeps it alive only where there is no other way: an address may be used again."""
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list or a tuple
        return lambda: dataset
