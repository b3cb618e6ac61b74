"""Plain values of the script's own that belong to the training: the best score, epochs without progress, a flag."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from paceline.checkpoint.content import plain

logger = logging.getLogger("paceline")


class Values:
    """What ``fleet.state`` is: attributes that are saved with every checkpoint, loaded with it, and handed to a worker
    that joins or returns, which would otherwise begin with its script's first values.

    >>> state = Values()
    >>> state.best = 0.5
    >>> state.best, "best" in state, dict(state)
    (0.5, True, {'best': 0.5})
    """

    def __init__(self) -> None:
        super().__setattr__("_values", {})
        super().__setattr__("_unread", set())

    def __getattr__(self, name: str) -> Any:
        self._unread.discard(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"fleet.state has no {name!r}: give it a first value before the first step, and before fleet.load"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._unread and self._values[name] != value:
            logger.warning(
                "fleet.state.%s was just loaded from a checkpoint (%r) and is lost: give it its first value before "
                "fleet.load",
                name,
                self._values[name],
            )
        self._unread.discard(name)
        self._values[name] = plain(value, f"fleet.state.{name}")

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(list(self._values.items()))

    def __repr__(self) -> str:
        return f"<fleet.state: {', '.join(f'{name}={value!r}' for name, value in self) or 'empty'}>"

    def state_dict(self) -> dict[str, Any]:
        return {name: plain(value, f"fleet.state.{name}") for name, value in self}

    def load_state_dict(self, state: Mapping[str, Any], *, guard: bool = False) -> None:
        """``guard``: until `loop_begins`, the script is warned when it overwrites a value that it has not looked at."""
        self._values.update(deepcopy(dict(state)))
        self._unread.clear()
        if guard:
            self._unread.update(state)

    def replace(self, state: Mapping[str, Any]) -> None:
        """Exactly these values."""
        self._values.clear()
        self.load_state_dict(state)

    def loop_begins(self) -> None:
        self._unread.clear()
