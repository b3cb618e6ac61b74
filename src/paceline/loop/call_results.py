"""What ``fleet.evaluate`` and ``fleet.agree`` gave between loops, remembered for a script that makes its loops again.

A run that goes on from a checkpoint makes these calls with parameters that are already further on: the calls give what
they gave before, so that the script's decisions fall as they fell.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

LARGE = "too large to be remembered"
"""Stands for a result that is not kept."""
MOST = 10_000
"""Numbers in a result that is remembered: more would swell every checkpoint."""


class CallResults:
    """The results, in the order of the calls.

    >>> results = CallResults()
    >>> results.add("agree", True)
    >>> results.find("agree", 0), results.find("agree", 1)
    ([True], [])
    """

    def __init__(self, entries: Iterable[Sequence[Any]] = ()) -> None:
        self._entries = [list(entry) for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, call: str, result: Any) -> None:
        self._entries.append([call, LARGE if _size(result) > MOST else deepcopy(result)])

    def find(self, call: str, number: int) -> list[Any]:
        """The result of the call of that number: one value, or none when it was not made. ValueError when another call
        was made in its place."""
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
        """Plain values and tensors, ``[call, result]`` each, for a checkpoint."""
        return [list(entry) for entry in self._entries]

    def to_json(self) -> str:
        """For a worker that passes these loops by.

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
    """Numbers in a call's result."""
    values = result.values() if isinstance(result, Mapping) else [result]
    return sum(int(getattr(value, "numel", lambda: 1)()) for value in values)
