"""The loops of a script: which loop a call of ``fleet.steps`` is, and what was called between the loops.

A script may call ``fleet.steps`` once, once per epoch, or phase after phase on other data. Loops are numbered in the
order of the calls and datasets in the order of their first use, the same on every worker (`Passes`, `ScriptLoop`). A
loop over a dataset goes on where the last one over it ended: with another epoch, hence another shuffle and other noise.
The second and later datasets have a seed of their own, so that one made anew for every loop is shuffled anew too.

A worker that joins or resumes in a later loop passes over the earlier ones. What calls such as ``fleet.evaluate``
between them returned is remembered, so that it can return the same there (`CallResults`).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from paceline.feed import key

LARGE = "too large to be remembered"
"""The text that stands for a result that is not kept."""
FORMER = {"agree": "any"}
"""Present names of calls that a checkpoint of 0.1 may hold under their former names."""
MOST = 10_000
"""The most numbers in a result that is remembered: more would swell every checkpoint."""


class CallResults:
    """The results of calls between loops, in the order of the calls.

    >>> results = CallResults()
    >>> results.add("any", True)
    >>> results.find("any", 0), results.find("any", 1)
    ([True], [])
    """

    def __init__(self, entries: Iterable[Sequence[Any]] = ()) -> None:
        self._entries = [[FORMER.get(call, call), result] for call, result in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, call: str, result: Any) -> None:
        self._entries.append([call, LARGE if _size(result) > MOST else deepcopy(result)])

    def find(self, call: str, number: int) -> list[Any]:
        """Return the result of the call of that number: a list of one value, or of none when it was not made.

        Raises ValueError when another call was made instead, or the result was too large to be kept.
        """
        if number >= len(self._entries):
            return []
        made, result = self._entries[number]
        if made != call or result == LARGE:
            other = f"fleet.{made} was called there before"
            why = "its result was too large to be remembered" if made == call else other
            raise ValueError(
                f"fleet.{call} between loops that are passed over: {why}, so it cannot give what it gave; let the "
                'script begin where the checkpoint was saved, with fleet.load(..., loops="rest")'
            )
        return [deepcopy(result)]

    def to_list(self) -> list[list[Any]]:
        """Return ``[call, result]`` for each call, as plain values and tensors, for a checkpoint."""
        return [list(entry) for entry in self._entries]

    def to_json(self) -> str:
        """Return the results as JSON, for a worker that passes over these loops.

        >>> results = CallResults([["evaluate", {"right": 3.0, "table": torch.ones(2)}]])
        >>> CallResults.from_json(results.to_json()).find("evaluate", 0)[0]["table"]
        tensor([1., 1.], dtype=torch.float64)
        """
        return json.dumps(self._entries, default=lambda table: {"table": table.tolist()})

    @classmethod
    def from_json(cls, text: str) -> CallResults:
        def table(part: dict[str, Any]) -> Any:
            return torch.tensor(part["table"], dtype=torch.float64) if set(part) == {"table"} else part

        return cls(json.loads(text, object_hook=table) if text else [])


def _size(result: Any) -> int:
    """Return the number of numbers in a call's result."""
    values = result.values() if isinstance(result, Mapping) else [result]
    return sum(int(getattr(value, "numel", lambda: 1)()) for value in values)


@dataclass(frozen=True)
class ScriptLoop:
    """One call of ``fleet.steps`` among those of the script."""

    number: int
    """The number of loops before it, also those before a restart."""
    dataset: int
    """The number of its dataset, in the order of their first use."""
    first_epoch: int

    def seed(self, seed: int) -> int:
        """Return the seed of the loop's shuffles and noise.

        >>> ScriptLoop(0, 0, 0).seed(7), ScriptLoop(1, 0, 1).seed(7), ScriptLoop(2, 1, 0).seed(7) == 7
        (7, 7, False)
        """
        return seed if self.dataset == 0 else key(seed, self.dataset)


class Passes:
    """The counts of loops and of passes over each dataset, and what else a script needs that makes its loops again."""

    def __init__(self) -> None:
        self.lengths: list[int | None] = []
        """The length of each loop's dataset."""
        self.call_results = CallResults()
        """The results of calls between loops."""
        self.saves = 0
        """The number of calls of ``fleet.save`` since the last loop ended."""
        self._next = 0
        self._counts: list[int] = []
        self._datasets: list[Callable[[], Any]] = []

    def next_loop(self, dataset: Any) -> ScriptLoop:
        """Return the next loop of the script, if it goes over this dataset."""
        known = (number for number, one in enumerate(self._datasets) if one() is dataset)
        number = next(known, len(self._datasets))
        return ScriptLoop(self._next, number, self._counts[number] if number < len(self._counts) else 0)

    def begin(self, script_loop: ScriptLoop, dataset: Any, length: int | None) -> None:
        """Begin this loop, the next one."""
        self.recognise(dataset, script_loop.dataset)
        self._next = script_loop.number + 1
        self.lengths[script_loop.number :] = [length]
        self.saves = 0

    def note(self, script_loop: ScriptLoop, passes: int) -> None:
        """Note the number of passes over the loop's dataset that have begun, in this loop and before."""
        self._counts[script_loop.dataset] = passes

    def continue_from(self, state: Mapping[str, Any], *, loop: int) -> None:
        """Take over saved counts, and number the next loop ``loop``, whatever was called before."""
        self.load_state_dict(state)
        self._next = loop

    def recognise(self, dataset: Any, number: int) -> None:
        """Remember this dataset as that of the given number."""
        self._make_room(number + 1)
        self._datasets[number] = _reference(dataset)

    def state_dict(self) -> dict[str, Any]:
        counts, lengths = list(self._counts), list(self.lengths)
        calls = self.call_results.to_list()  # under the key that older checkpoints have
        return {"counts": counts, "lengths": lengths, "told": calls, "saves": self.saves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = list(state["counts"])
        self.lengths, self.saves = list(state["lengths"]), state["saves"]
        self.call_results = CallResults(state["told"])
        self._counts = counts + self._counts[len(counts) :]
        self._make_room(len(self._counts))

    def _make_room(self, size: int) -> None:
        """Have entries for ``size`` datasets; those that this process has not seen were used before a restart."""
        self._counts += [0] * (size - len(self._counts))
        self._datasets += [_unknown] * (size - len(self._datasets))


def _unknown() -> None:
    """Stand for the reference to a dataset that this process has not seen."""


def _reference(dataset: Any) -> Callable[[], Any]:
    """Return a reference to the dataset, weak where possible: an ``id`` alone may be used again."""
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list or a tuple
        return lambda: dataset
