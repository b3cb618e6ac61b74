"""Workers that sit out get their turn: soon, then ever more rarely, and within the budget."""

from __future__ import annotations

import json

import numpy as np
from pace_rig import record

from paceline.pace.probing import Probes


def turns(probes: Probes, *, steps: int, added_s: float, worked_before: int = 0) -> list[int]:
    """Steps in which worker 1 of a fleet of two gets its turn, and takes it; plans lag one step behind records."""
    taken: list[int] = []
    for step in range(steps):
        if 1 in probes.due((0, 1), step, np.array([0.0, added_s]), 1.0):
            taken.append(step)
        if step:
            works = step - 1 in taken or step - 1 < worked_before
            probes.observe(record(step - 1, [8, int(works)], [1.0, 0.1]))
    return taken


def test_the_wait_doubles() -> None:
    taken = turns(Probes(budget=0.01), steps=600, added_s=-0.5)
    assert taken[0] == 8
    gaps = np.diff(taken)
    assert len(gaps) >= 3
    assert np.all(gaps[1:] >= 2 * gaps[:-1])


def test_a_turn_too_dear_waits_until_it_is_within_the_budget() -> None:
    taken = turns(Probes(budget=0.01), steps=1500, added_s=3.0)
    assert 300 <= taken[0] <= 302
    assert np.diff(taken)[0] >= 600


def test_the_first_turn_of_a_worker_that_had_worked_is_free() -> None:
    taken = turns(Probes(budget=0.01), steps=200, added_s=50.0, worked_before=20)
    assert taken == [28]


def test_a_worker_that_works_has_no_turn() -> None:
    assert turns(Probes(budget=0.01), steps=100, added_s=-0.5, worked_before=100) == []


def test_the_longest_unseen_comes_first() -> None:
    probes = Probes(budget=0.01)
    probes.observe(record(0, [8, 8, 0], [1.0, 1.0, 0.0]))
    for step in range(1, 8):
        probes.observe(record(step, [8, 1 if step == 4 else 0, 0], [1.0, 1.0, 0.0]))
    for step in range(8, 40):
        due = probes.due((0, 1, 2), step, np.full(3, -1.0), 1.0).tolist()
        assert due in ([], [1], [2], [2, 1])
        probes.observe(record(step, [8, 0, 0], [1.0, 0.0, 0.0]))
    assert 2 in probes.due((0, 1, 2), 40, np.full(3, -1.0), 1.0) or 2 in probes.due(
        (0, 1, 2), 41, np.full(3, -1.0), 1.0
    )


def test_all_tries_together_keep_to_the_budget() -> None:
    """Fifty idle workers that each add half a step: about one try in fifty steps, not one each."""
    probes, workers = Probes(budget=0.01), tuple(range(51))
    tries, due = 0, np.empty(0, dtype=np.intp)
    for step in range(1000):
        samples = np.zeros(51, dtype=int)
        samples[0] = 8
        samples[due[:1]] = 1
        tries += len(due[:1])
        probes.observe(record(step, samples.tolist(), samples.astype(float).tolist(), workers=workers))
        due = probes.due(workers, step + 1, np.r_[0.0, np.full(50, 0.5)], 1.0)
    assert 5 <= tries <= 1000 / 50 + 1


def test_the_schedule_survives_json() -> None:
    probes, copy = Probes(budget=0.01), Probes(budget=0.01)
    turns(probes, steps=50, added_s=-0.5)
    copy.load_state_dict(json.loads(json.dumps(probes.state_dict())))
    assert copy.state_dict() == probes.state_dict()
