"""What P3's benchmark reads from a curve, and how it makes a wide cluster of a recorded job."""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import _cutoff_table as table
import p3


def test_a_target_is_reached_when_the_mean_of_three_evaluations_is() -> None:
    curve = [(0.0, 2.0), (1.0, 0.5), (2.0, 2.0), (3.0, 1.0), (4.0, 0.9), (5.0, 0.8)]
    assert p3.time_to(curve, 1.0) == 5.0
    assert p3.time_to(curve, 1.3) == 3.0
    assert math.isnan(p3.time_to(curve, 0.5))
    assert p3.written([1.0, math.nan]) == [1.0, None]


def test_a_widened_recording_is_copies_of_the_job_each_from_another_step_on() -> None:
    own = np.arange(12.0).reshape(4, 3)
    wide = table.widened(own, workers=8, steps=9, seed=1)
    assert wide.shape == (9, 8)
    for first in (0, 3, 6):
        copy = wide[:, first : first + 3]
        begins = int(copy[0, 0]) // 3
        np.testing.assert_array_equal(copy, own[(begins + np.arange(9)) % 4][:, : copy.shape[1]])


def test_a_model_learns_from_the_first_half_of_a_recording_and_the_second_is_played(tmp_path: Path) -> None:
    file = tmp_path / "job.csv"
    file.write_text("\n".join(f"{step},{step + 1},{step + 1}" for step in range(10)))
    learned, played = (table.seconds(str(file), 6, 30, 0, learned=first) for first in (True, False))
    assert set(np.unique(learned)) == {1, 2, 3, 4, 5}
    assert set(np.unique(played)) == {6, 7, 8, 9, 10}


def test_whole_runs_have_a_model_for_every_cluster_that_is_played() -> None:
    for size in (p3.FULL, p3.QUICK):
        made = {(source, workers, seed) for source, fleets, seed in p3.trainings(size, []) for workers in fleets}
        assert made >= {*p3.clusters(size, []), *((source, p3.WORKERS, 0) for source in p3.SCENARIOS)}
