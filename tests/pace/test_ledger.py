"""Numbers stay with their worker, whatever its rank."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from paceline.pace.ledger import KEEP_ABSENT, Ledger

fleets = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True).map(tuple), min_size=1, max_size=12)


@given(fleets)
def test_every_worker_finds_its_own_number_again(fleets: list[tuple[int, ...]]) -> None:
    ledger, expected = Ledger(count=0.0), dict.fromkeys(range(10), 0.0)
    for workers in fleets:
        ledger.arrange(workers)
        ledger["count"][:] += 1
        expected.update({worker: expected[worker] + 1 for worker in workers})
        assert ledger["count"].tolist() == [expected[worker] for worker in workers]
        assert ledger.look_up("count", tuple(range(10))).tolist() == [expected[worker] for worker in range(10)]


@given(fleets)
def test_the_state_survives_json(fleets: list[tuple[int, ...]]) -> None:
    ledger, copy = Ledger(count=0.5), Ledger(count=0.5)
    for workers in fleets:
        ledger.arrange(workers)
        ledger["count"][:] *= 1.1
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.state_dict() == ledger.state_dict()
    assert copy.present == ledger.present


def test_only_so_many_absent_workers_are_remembered() -> None:
    ledger = Ledger(count=0.0)
    for worker in range(KEEP_ABSENT + 50):
        ledger.arrange((worker,))
        ledger["count"][:] = 1.0
    assert len(ledger.state_dict()["workers"]) == KEEP_ABSENT + 1
    assert ledger.look_up("count", (KEEP_ABSENT + 48, 0)).tolist() == [1.0, 0.0]


def test_looking_up_changes_nothing() -> None:
    ledger = Ledger(count=0.0)
    ledger.arrange((3, 4))
    before = json.dumps(ledger.state_dict())
    ledger.look_up("count", (3, 4))[:] = 7.0
    ledger.look_up("count", (4, 8))[:] = 7.0
    assert json.dumps(ledger.state_dict()) == before
