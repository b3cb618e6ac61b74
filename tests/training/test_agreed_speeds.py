"""How workers divide work outside the steps: by speeds that all have from the leader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.training.evaluate import AgreedSpeeds


class Changing:
    """A transport whose members another thread changes after they were read once."""

    id, rank, size = 7, 2, 3

    def __init__(self) -> None:
        self._workers = (3, 5, 7)

    @property
    def workers(self) -> tuple[int, ...]:
        found, self._workers = self._workers, (-1, 7)
        self.rank, self.size = self._workers.index(7), len(self._workers)
        return found


@pytest.mark.parametrize(("speeds", "found"), [([4, 2, 1], (2, (4, 2, 1))), ([0, 0, 0], (2, (1, 1, 1)))])
def test_a_worker_that_falls_out_meanwhile_has_a_rank_among_those_whose_speeds_it_has(
    speeds: list[int], found: Any
) -> None:
    context: Any = SimpleNamespace(transport=Changing())
    agreed = AgreedSpeeds(context)
    agreed.take([{"workers": [3, 5, 7], "speeds": speeds}])
    assert agreed.of_members() == found
    assert agreed.of_members() == (1, (1, 1)), "and then among those of whom it has heard since"
