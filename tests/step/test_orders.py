"""Custom orders that workers do not share: the first place where they part is found."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from paceline.step.checks.sameness import check_order

Change = Callable[[Any], Any]


class Side:
    """One of two workers that gather with each other."""

    shards, since = 1, 0

    def __init__(self, rank: int, said: dict[str, list[Any]], both: Barrier) -> None:
        self.rank, self._said, self._both = rank, said, both
        self.calls = 0

    def gather(self, label: str, value: Any) -> list[Any]:
        self.calls += 1
        everybody = self._said.setdefault(f"{self.calls} {label}", [None, None])
        everybody[self.rank] = value
        self._both.wait(timeout=20)
        return everybody


class Ordered:
    """A dealing with a custom order."""

    epoch = 3

    def __init__(self, numbers: Any) -> None:
        self._numbers = np.asarray(numbers, dtype=np.int64)

    def order_digest(self) -> str:
        return str(hash(self._numbers.tobytes()))

    def drawn(self) -> Any:
        return self._numbers


def told(one: Any, other: Any) -> list[str]:
    """What both workers raise."""
    said, both = dict[str, list[Any]](), Barrier(2)
    sides: list[Any] = [Side(rank, said, both) for rank in range(2)]

    def check(side: Any, numbers: Any) -> str:
        dealing: Any = Ordered(numbers)
        with pytest.raises(ValueError, match="workers disagree in order") as raised:
            check_order(side, dealing)
        assert side.calls <= 6
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(check, sides, [one, other]))


def changed(position: int, value: int, length: int = 1_000_000) -> Any:
    numbers = np.arange(length)
    numbers[position] = value
    return numbers


@pytest.mark.parametrize("position", [0, 63, 64, 543_210, 999_999])
def test_the_first_unlike_position_is_named_on_both(position: int) -> None:
    first, second = told(np.arange(1_000_000), changed(position, 7_000_000))
    assert first == second
    assert f"order(3): position {position} is sample {position} on worker 0 and sample 7000000 on worker 1. " in first


def test_an_order_that_ends_early_says_where() -> None:
    first, _ = told(np.arange(100), np.arange(90))
    assert "position 90 is sample 90 on worker 0 and beyond its end on worker 1" in first
