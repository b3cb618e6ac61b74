"""Small numbers for names, the same on every worker: given out through the store, on first use by anybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.transport.network import Store


class Slots:
    """The names that this worker knows, in the order of their numbers.

    ``store`` gives the group's store as it stands; ``ask`` makes a request of it, and raises the transport's errors.
    """

    def __init__(self, store: Callable[[], Store], ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._store, self._ask = store, ask
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        while name not in self._numbers:  # the first slot that is ours or free
            slot = len(self._numbers)
            given = self._ask(partial(self._store().compare_set, f"slot/{slot}", "", name))
            self._numbers[str(given.decode())] = slot
        return self._numbers[name]

    def name(self, slot: int) -> str:
        while len(self._numbers) <= slot:  # given out by another worker before it used it
            name = self._ask(partial(self._store().get, f"slot/{len(self._numbers)}"))
            self._numbers[str(name.decode())] = len(self._numbers)
        return self.names()[slot]

    def names(self) -> list[str]:
        return list(self._numbers)

    def adopt(self, known: Sequence[Sequence[str]]) -> None:
        """Names were numbered one after another, so everybody knows a beginning of the same list: the longest."""
        longest = max(range(len(known)), key=lambda number: len(known[number]))
        self._numbers = {name: slot for slot, name in enumerate(known[longest])}
