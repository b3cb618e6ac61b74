"""The part of its time that a worker is at work."""

import json

import numpy as np
import pytest

from paceline.pace.deadline import RANGE, Availability


def test_what_was_counted_over_what_was_expected_is_learned_for_each_group() -> None:
    at_work = Availability()
    stuck = np.array([False, False, True])
    for _ in range(200):
        at_work.observe(np.array([9.0, 9.0, 2.0]), np.array([10.0, 10.0, 10.0]), stuck)
    assert at_work.working == pytest.approx(0.9, abs=0.001)
    assert at_work.stuck == pytest.approx(0.2, abs=0.001)
    assert at_work.factors(stuck).tolist() == [at_work.working, at_work.working, at_work.stuck]


def test_a_group_without_members_keeps_what_it_knows() -> None:
    at_work = Availability()
    at_work.observe(np.array([5.0, 0.0]), np.array([5.0, 5.0]), np.array([False, True]))
    before = at_work.stuck
    for _ in range(100):
        at_work.observe(np.array([5.0, 5.0]), np.array([5.0, 5.0]), np.array([False, False]))
    assert at_work.stuck == before


def test_it_stays_in_bounds_whatever_is_said() -> None:
    at_work = Availability()
    for counted in (0.0, 1e12):
        for _ in range(300):
            at_work.observe(np.array([counted]), np.array([1.0]), np.array([False]))
        assert RANGE[0] <= at_work.working <= RANGE[1]
    at_work.observe(np.array([3.0]), np.array([0.0]), np.array([False]))
    assert np.isfinite(at_work.working)


def test_the_state_survives_json() -> None:
    one, other = Availability(), Availability()
    one.observe(np.array([3.0, 0.0]), np.array([5.0, 4.0]), np.array([False, True]))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (one.working, one.stuck) == (other.working, other.stuck)
