"""What each worker adds to the fleet: the formula, the report's column, and the sentence about one that costs more."""

import pytest

from paceline.observe import verdict
from paceline.observe.analysis.figures import StepCost, adds, summarise
from paceline.observe.words.verdict import worker_table
from paceline.records import StepRecord


def run(speeds: dict[int, float], *, round_s: float, steps: int = 40, first: int = 0) -> list[StepRecord]:
    """Return steps of 100 samples by workers of these speeds, shares following them."""
    total = sum(speeds.values())
    shares = [round(100 * speed / total) for speed in speeds.values()]
    seconds = tuple(share / speed for share, speed in zip(shares, speeds.values()))
    return [
        StepRecord(
            first + step, 0, 0, tuple(speeds), tuple(shares), tuple(shares), seconds,
            wall_s=max(seconds) + round_s, round_s=round_s,
        )
        for step in range(steps)
    ]  # fmt: skip


def test_where_rounds_cost_nothing_a_worker_adds_its_speed() -> None:
    free = StepCost(samples=100, round_s={3: 0.0}, other_s=0.0)
    assert adds({0: 50.0, 1: 30.0, 2: 20.0}, (0, 1, 2), free) == pytest.approx({0: 50, 1: 30, 2: 20})


def test_a_slow_worker_is_worth_it_only_where_it_brings_more_than_the_round_grows() -> None:
    """P1 (derived): v_new / sum v must exceed the relative growth of the step by the longer round."""
    step = StepCost(samples=100, round_s={4: 0.09}, other_s=0.01)
    for slow in (0.5, 5.0, 20.0):
        with_it, without = 100 / (90 + slow) + 0.09 + 0.01, 100 / 90 + 0.09 * (2 / 3) / (3 / 4) + 0.01
        found = adds({0: 30.0, 1: 30.0, 2: 30.0, 3: slow}, (0, 1, 2, 3), step)[3]
        assert found == pytest.approx(100 / with_it - 100 / without)
        assert (found > 0) == (slow > 0.5)


def test_a_round_that_was_measured_without_the_worker_needs_no_ring() -> None:
    step = StepCost(samples=100, round_s={2: 0.5, 3: 0.1}, other_s=0.0)
    assert adds({0: 50.0, 1: 50.0, 2: 1.0}, (0, 1, 2), step)[2] == pytest.approx(100 / (100 / 101 + 0.1) - 100 / 1.5)


def test_the_figures_say_what_a_worker_adds_and_one_that_left_is_measured_against_those_who_stayed() -> None:
    records = [*run({0: 60.0, 1: 40.0}, round_s=0.0), *run({0: 60.0, 2: 40.0}, round_s=0.0, first=40)]
    found = {worker.worker: worker.adds for worker in summarise(records).workers}
    assert found == pytest.approx({0: 60, 1: 40, 2: 40}, rel=0.01)


def test_the_table_has_the_column_where_machines_are_unlike() -> None:
    like, unlike = (
        worker_table(verdict(run(speeds, round_s=0.0))) for speeds in ({0: 50.0, 1: 50.0}, {0: 80.0, 1: 20})
    )
    assert "adds" not in like.names
    column = unlike.names.index("adds")
    assert [row[column] for row in unlike.rows] == ["+80", "+20"]


def test_a_worker_that_costs_more_than_it_brings_is_named() -> None:
    slow = verdict(run({0: 99.0, 1: 1.0}, round_s=0.2))
    assert "Worker 1 seems to cost more than it brings: without it about 15.7 samples/s more are in reach" in slow.text
    assert slow.to_json()["workers"][1]["adds"] == pytest.approx(-15.67, abs=0.01)
    assert "more than it brings" not in verdict(run({0: 80.0, 1: 20.0}, round_s=0.01)).text
