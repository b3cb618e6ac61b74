"""A run's log as seconds for an equal share."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.records import StepRecord
from paceline.simulate.matrices import equal_share_seconds


def record(
    step: int, samples: tuple[int, ...], seconds: tuple[float, ...], workers: tuple[int, ...] = (0, 1)
) -> StepRecord:
    return StepRecord(
        step=step, epoch=0, generation=0, workers=workers, planned=samples, samples=samples, seconds=seconds
    )


def test_unequal_shares_are_scaled_to_equal_ones() -> None:
    found = equal_share_seconds([record(0, (6, 2), (3.0, 4.0)), record(1, (4, 4), (2.0, 4.0))])
    assert found.tolist() == [[2.0, 8.0], [2.0, 4.0]]


def test_a_short_last_step_counts_as_a_full_one() -> None:
    found = equal_share_seconds([record(0, (4, 4), (1.0, 1.0)), record(1, (1, 1), (0.25, 0.5))])
    assert found.tolist() == [[1.0, 1.0], [1.0, 2.0]]


def test_who_sat_out_is_as_fast_as_when_last_measured() -> None:
    steps = [(8, 0), (4, 4), (8, 0), (4, 4)]
    times = [(2.0, 0.0), (1.0, 3.0), (2.0, 0.0), (1.0, float("nan"))]
    found = equal_share_seconds([record(k, n, t) for k, (n, t) in enumerate(zip(steps, times))])
    assert np.allclose(found, [[1.0, 3.0]] * 4)


def test_a_worker_found_stuck_at_a_deadline_took_that_long_besides() -> None:
    steps = [record(0, (4, 4), (1.0, 2.0))]
    late = record(1, (6, 0), (1.5, 0.0))
    steps.append(replace(late, planned=(8, 8), deadline_s=1.6, unfinished_s=(0.1, 1.6)))
    assert np.allclose(equal_share_seconds(steps), [[1.0, 2.0], [1.0, 2.0 + 1.6]])


def test_counts_that_deadlines_made_vary_do_not_move_the_batch() -> None:
    steps = [replace(record(k, (n, n), (n / 4, n / 4)), deadline_s=9.0) for k, n in enumerate((4, 3, 4, 9, 4))]
    assert np.allclose(equal_share_seconds(steps), 1.0)


def test_of_a_run_whose_workers_changed_the_longest_stretch_is_taken_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = [record(k, (4, 4), (1.0, 1.0)) for k in range(2)]
    after = [record(k, (4, 2, 2), (2.0, 1.0, 1.0), workers=(0, 2, 1)) for k in range(2, 7)]
    assert equal_share_seconds(before + after).shape == (5, 3)
    assert "steps 2 to 6 (5 of 7)" in caplog.text


def test_a_run_that_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="no steps"):
        equal_share_seconds([])
    with pytest.raises(ValueError, match="worker 1 was never measured"):
        equal_share_seconds([record(0, (2, 0), (1.0, 0.0))])
