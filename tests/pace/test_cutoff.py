"""P3's decision against brute force, and the counts fixed beforehand."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.pace.cutoff import Cutoff, best_count, best_static_count, clairvoyant_counts, static_count
from paceline.pace.forecast import Forecast, LastValue, OrderStatistics, Seen, Smoothed, Window

TIMES = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(0.01, 100))


@given(TIMES, st.sampled_from([0.0, 0.3, 10.0]))
def test_the_count_is_the_best_of_all_counts(samples: np.ndarray, overhead_s: float) -> None:
    def gain(count: int) -> float:
        return float(np.mean([count / (sorted(row)[count - 1] + overhead_s) for row in samples.tolist()]))

    best = max(gain(count) for count in range(1, samples.shape[1] + 1))
    assert gain(best_count(samples, overhead_s=overhead_s)) == pytest.approx(best)


@given(TIMES, st.sampled_from([0.0, 0.3]))
def test_the_best_static_count_and_the_clairvoyant_are_the_best_of_all(own: np.ndarray, overhead_s: float) -> None:
    ordered = np.sort(own, axis=1)
    every = range(1, own.shape[1] + 1)
    static = [c * len(own) / float((ordered[:, c - 1] + overhead_s).sum()) for c in every]
    assert static[best_static_count(ordered, overhead_s=overhead_s) - 1] == pytest.approx(max(static))
    for row, count in zip(ordered, clairvoyant_counts(ordered, overhead_s=overhead_s)):
        assert count / (row[count - 1] + overhead_s) == pytest.approx(max(c / (row[c - 1] + overhead_s) for c in every))


def test_like_workers_are_all_waited_for() -> None:
    assert best_count(np.ones((3, 7))) == 7
    assert clairvoyant_counts(np.ones((3, 7))).tolist() == [7, 7, 7]


def test_a_costly_round_waits_for_more_workers() -> None:
    samples = np.array([[1.0, 1.0, 1.0, 3.0]])
    assert best_count(samples) == 3
    assert best_count(samples, overhead_s=10.0) == 4


def test_the_decision_averages_throughput_over_samples_and_not_times() -> None:
    # By mean times (1 and 5.5) the second worker would be left; it is fast half of the time, which is worth more.
    samples = np.array([[1.0, 1.0], [1.0, 10.0]])
    assert best_count(samples) == 2


@pytest.mark.parametrize(("fraction", "workers", "count"), [(0.9, 158, 142), (0.9, 1, 1), (0.1, 3, 1), (1.0, 8, 8)])
def test_a_static_count_is_the_nearest_whole_number(fraction: float, workers: int, count: int) -> None:
    assert static_count(fraction, workers) == count


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.1, math.nan])
def test_a_static_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        static_count(fraction, 4)


def test_the_first_step_waits_for_everybody_and_the_next_knows_better() -> None:
    rule = Cutoff(LastValue())
    assert rule.count(4) == 4
    rule.observe(Seen.whole([1.0, 1.0, 1.0, 9.0]))
    assert rule.count(4) == 3
    rule.observe(Seen.until([1.0, 1.0, 1.0, 9.0], 1.0))
    assert rule.count(4) == 3


def test_the_same_seed_decides_the_same() -> None:
    def counts() -> list[int]:
        noise, rule = np.random.default_rng(3), Cutoff(Smoothed(), seed=5)
        chosen = []
        for own in np.exp(0.3 * noise.standard_normal((30, 20))):
            chosen.append(rule.count(20))
            rule.observe(Seen.until(own, float(np.sort(own)[chosen[-1] - 1])))
        return chosen

    assert counts() == counts()
    assert len(set(counts())) > 1


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"draws": 0}, {"overhead_s": -1.0}, {"overhead_s": math.inf}, {"overhead_s": math.nan}):
        with pytest.raises(ValueError, match="not"):
            Cutoff(LastValue(), **wrong)


@pytest.mark.parametrize("make", [LastValue, Smoothed, OrderStatistics, Window])
@pytest.mark.parametrize("saved_after", [0, 1, 15])
def test_a_rule_goes_on_from_its_saved_state_as_if_nothing_had_happened(
    make: Callable[[], Forecast], saved_after: int
) -> None:
    times = np.exp(0.4 * np.random.default_rng(3).standard_normal((30, 20)))

    def play(rule: Cutoff, steps: np.ndarray) -> list[int]:
        chosen = []
        for own in steps:
            chosen.append(rule.count(20))
            rule.observe(Seen.until(own, float(np.sort(own)[chosen[-1] - 1])))
        return chosen

    whole, first, second = Cutoff(make(), seed=1), Cutoff(make(), seed=1), Cutoff(make(), seed=2)
    before = play(first, times[:saved_after])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + play(second, times[saved_after:]) == play(whole, times)
